"""Every model against transformers: the same weights give the same logits.

Tolerance in float32: 1e-4 on logits of size 1 to 10; sums of up to 80 products, in another order, over 3 layers.
"""

from __future__ import annotations

import re

import pytest
import torch
from dense_attention import DenseRun
from tiny_checkpoints import FAMILY_NAMES, MAX_LEN, ROPES, WINDOW, hf_logits, hf_model, load, random_ids

from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES
from ringcore.model_executor.models import model_class

pytestmark = pytest.mark.sampled

LENGTH = 120  # three times the original context of the scaled kinds, so that their scaling matters


def assert_conforms(hf, folder, atol=1e-4, dtype="float32"):
    ids = random_ids(LENGTH)
    run = DenseRun(load(folder, dtype=getattr(torch, dtype)), MAX_LEN, 1, dtype)
    # A prompt in two chunks and some single tokens: positions and cache go on where they were.
    chunks = [ids[:70], ids[70:115], *([token] for token in ids[115:])]
    ours = torch.cat([run.step({0: chunk}) for chunk in chunks])
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, hf_logits(hf, ids), atol=atol, rtol=1e-5)


FAMILY_ROPES = [(family, rope) for family in FAMILY_NAMES for rope in ROPES]
# transformers looks for `truncate` beside the parameters of the layer types, not in them.
FAMILY_ROPES.remove(("Gemma3", "yarn untruncated"))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("family", "rope"), FAMILY_ROPES)
def test_rope_and_tying(checkpoint, family, rope, tied):
    assert_conforms(*checkpoint(family, rope, tie_word_embeddings=tied))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {"attention_bias": True}),
        ("Llama", {"mlp_bias": True}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("Qwen3", {"attention_bias": True}),
        ("Gemma3", {"attention_bias": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_biases(checkpoint, family, options):
    hf, folder = checkpoint(family, **options)
    assert any("bias" in name for name, _ in hf.named_parameters())
    assert_conforms(hf, folder)


@pytest.mark.parametrize("kv_heads", [1, 4], ids=["MQA", "MHA"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_kv_heads(checkpoint, family, kv_heads):
    assert_conforms(*checkpoint(family, num_key_value_heads=kv_heads))


@pytest.mark.parametrize("head_dim", [8, 32])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral"])
def test_explicit_head_dim(checkpoint, family, head_dim):
    hf, folder = checkpoint(family, head_dim=head_dim)
    assert hf.model.layers[0].self_attn.q_proj.out_features == 4 * head_dim != 64
    assert_conforms(hf, folder)


def test_gemma3_with_heads_of_256(checkpoint):
    assert_conforms(*checkpoint("Gemma3", head_dim=256, query_pre_attn_scalar=256, num_key_value_heads=1))


SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWS = {
    "Mistral": ({}, {0: WINDOW, 1: WINDOW, 2: WINDOW}),
    "Mistral without": ({"sliding_window": None}, {}),
    "Mistral, one token": ({"sliding_window": 1}, {0: 1, 1: 1, 2: 1}),
    "Mistral, longer than the prompt": ({"sliding_window": 500}, {0: 500, 1: 500, 2: 500}),
    "Gemma3": ({}, {0: WINDOW, 2: WINDOW}),
    "Gemma3, every second": ({"layer_types": None, "sliding_window_pattern": 2}, {0: WINDOW, 2: WINDOW}),
    "Gemma3, every sixth": ({"layer_types": None}, {0: WINDOW, 1: WINDOW, 2: WINDOW}),
    "Gemma3, full": ({"layer_types": [FULL] * 3}, {}),
    "Qwen2": ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, {1: 9, 2: 9}),
    "Qwen3": ({"use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL, FULL]}, {0: 9}),
    "Qwen3, unused": ({"sliding_window": 9, "max_window_layers": 1}, {}),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_sliding_windows(tmp_path, case):
    options, windows = WINDOWS[case]
    hf = hf_model(re.match(r"\w+", case)[0], **options)
    hf.save_pretrained(tmp_path)
    assert_conforms(hf, tmp_path)
    layers = load(tmp_path).attention_layers
    assert {layer.index: layer.sliding_window for layer in layers if layer.sliding_window is not None} == windows


def test_several_shards(checkpoint):
    hf, folder = checkpoint("Qwen2", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert_conforms(hf, folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_16_bits(checkpoint, family, dtype):
    """bfloat16 keeps 8 bits: logits of size 10 agree to some tenths, and mostly on the best token."""
    hf, folder = checkpoint(family, tie_word_embeddings=True)
    ids = random_ids(LENGTH)
    ours = DenseRun(load(folder, dtype=getattr(torch, dtype)), MAX_LEN, 1, dtype).step({0: ids})
    reference = hf_logits(hf, ids)
    error = (ours - reference).norm() / reference.norm()
    assert error < (0.03 if dtype == "bfloat16" else 0.004)


@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_bfloat16_log_probabilities(tmp_path, family):
    """Of the same bfloat16 weights, computed in float32, we are hardly further off than transformers in bfloat16."""
    hf = hf_model(family, tie_word_embeddings=True).bfloat16()
    hf.save_pretrained(tmp_path)
    ids = random_ids(LENGTH)
    ours = DenseRun(load(tmp_path, dtype=torch.bfloat16), MAX_LEN, 1, "bfloat16").step({0: ids}).log_softmax(-1)
    theirs = hf_logits(hf, ids).log_softmax(-1)
    exact = hf_logits(hf.float(), ids).log_softmax(-1)
    assert (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()


def test_sequences_in_one_step_do_not_touch_each_other(checkpoint):
    _, folder = checkpoint("Qwen3", "yarn")
    model = load(folder)
    prompts = [random_ids(n, seed=n) for n in (1, 17, 40)]
    alone = [DenseRun(model, MAX_LEN, 1).step({0: prompt}) for prompt in prompts]
    together = DenseRun(model, MAX_LEN, 3).step(dict(enumerate(prompts))).split([len(p) for p in prompts])
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_bind_takes_every_tensor(checkpoint):
    """So that originals are freed as they are packed; the attention layers are what the cache is planned from."""
    _, folder = checkpoint("Llama")
    model = load(folder)
    assert [layer.name for layer in model.attention_layers] == [f"layers.{i}.attention" for i in range(3)]
    spec = model.attention_layers[1].kv_cache_spec(16, "float32")
    assert (spec.num_kv_heads, spec.head_size) == (2, 16)


def test_every_registered_model_has_its_class():
    for architecture in FAMILIES.architectures:
        assert model_class(architecture).__name__ == architecture
        assert model_class(architecture).family is FAMILIES[architecture]


def test_unknown_architecture_names_the_known():
    with pytest.raises(ModelLoadError, match="'MambaForCausalLM' is not known; known: LlamaForCausalLM"):
        model_class("MambaForCausalLM")
