import math

import numpy as np
import pytest
from raw_files import tiny_gguf, tiny_metadata

from ringcore.checkpoint import ModelSpec, RopeSpec
from ringcore.checkpoint.gguf_spec import read_gguf_spec
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES

EMBEDDING = {"token_embd.weight": np.ones((16, 32))}


def read(tmp_path, architecture="llama", arrays=EMBEDDING, tokens=(), **changed):
    metadata = [*tiny_metadata(architecture, **changed), *tokens]
    return read_gguf_spec(str(tiny_gguf(tmp_path / "x.gguf", metadata, arrays)), FAMILIES)


def refused(tmp_path, match, **options):
    with pytest.raises(ModelLoadError, match=match):
        read(tmp_path, **options)


def test_every_field(tmp_path):
    tokens = [
        ("tokenizer.ggml.bos_token_id", "u32", 1),
        ("tokenizer.ggml.eos_token_id", "u32", 2),
        ("tokenizer.ggml.eot_token_id", "u32", 3),
        ("tokenizer.ggml.eom_token_id", "u32", 2),
    ]
    assert read(tmp_path, tokens=tokens) == ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,  # not the 9.99999997e-07 of float32
        max_position_embeddings=64,
        rope=RopeSpec(theta=500000.0),
        tie_word_embeddings=True,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        dtype="float32",
        bos_token_id=1,
        eos_token_ids=[2, 3],
    )


def test_what_the_tensors_say(tmp_path):
    names = ("output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_up.bias")
    spec = read(tmp_path, "qwen2", EMBEDDING | {name: np.ones((16, 32)) for name in names})
    assert spec.architecture == "Qwen2ForCausalLM"
    assert not spec.tie_word_embeddings
    assert spec.attention_bias
    assert spec.attention_out_bias
    assert spec.mlp_bias


def test_head_size_of_its_own(tmp_path):
    spec = read(tmp_path, "qwen3", attention__key_length=("u32", 16), attention__value_length=("u32", 16))
    assert (spec.architecture, spec.head_dim) == ("Qwen3ForCausalLM", 16)
    refused(tmp_path, "rope.dimension_count' is 4; only the head size 8", rope__dimension_count=("u32", 4))
    refused(tmp_path, "value_length' is 4", attention__value_length=("u32", 4))
    refused(tmp_path, "head_count' is 5, which does not divide 32", attention__head_count=("u32", 5))


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope__scaling__type": ("str", "none")}, RopeSpec(500000.0)),
        ({"rope__freq_base": None}, RopeSpec(10000.0)),
        ({"rope__scale_linear": ("f32", 2.5)}, RopeSpec(500000.0, "linear", 2.5)),
        (
            {"rope__scaling__type": ("str", "linear"), "rope__scaling__factor": ("f32", 4.0)},
            RopeSpec(500000.0, "linear", 4.0),
        ),
    ],
)
def test_scaling(tmp_path, scaling, expected):
    assert read(tmp_path, **scaling).rope == expected


YARN = {
    "rope__scaling__type": ("str", "yarn"),
    "rope__scaling__factor": ("f32", 4.0),
    "rope__scaling__original_context_length": ("u32", 32),
}


def test_yarn(tmp_path):
    rope = read(tmp_path, **YARN).rope
    assert rope == RopeSpec(500000.0, "yarn", 4.0, 32, beta_fast=32.0, beta_slow=1.0)
    rope = read(
        tmp_path, **YARN, rope__scaling__attn_factor=("f32", 0.5), rope__scaling__yarn_beta_fast=("f32", 16.0)
    ).rope
    assert rope.attention_factor == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))
    assert rope.beta_fast == 16.0


def test_llama3_scaling_is_found_in_its_divisors(tmp_path):
    """Against transformers' own frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(head_dim=64, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **given})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    arrays = EMBEDDING | {"rope_freqs.weight": plain / scaled.numpy()}
    sizes = {"attention__key_length": ("u32", 64), "rope__dimension_count": ("u32", 64)}
    rope = read(tmp_path, arrays=arrays, **sizes).rope
    assert rope.factor == pytest.approx(32.0, rel=1e-6)
    assert rope == RopeSpec(500000.0, "llama3", rope.factor, 8192, 1.0, 4.0)
    other = plain / scaled.numpy()
    other[20] *= 1.1
    refused(tmp_path, "no llama3 scaling", arrays=EMBEDDING | {"rope_freqs.weight": other}, **sizes)
    refused(tmp_path, "no llama3 scaling", arrays=EMBEDDING | {"rope_freqs.weight": other[:8]}, **sizes)


GEMMA3 = {"attention__sliding_window": ("u32", 24), "attention__key_length": ("u32", 16)}


def test_gemma3(tmp_path):
    spec = read(tmp_path, "gemma3", **GEMMA3, block_count=("u32", 7))
    assert (spec.architecture, spec.head_dim) == ("Gemma3ForCausalLM", 16)
    assert spec.sliding_windows == dict.fromkeys((0, 1, 2, 3, 4, 6), 24)
    assert (spec.rope, spec.sliding_rope) == (RopeSpec(500000.0), RopeSpec(10000.0))
    assert spec.query_pre_attn_scalar is None
    linear = {"rope__scaling__type": ("str", "linear"), "rope__scaling__factor": ("f32", 8.0)}
    pattern = {"attention__sliding_window_pattern": ("[bool]", [False, True])}
    spec = read(tmp_path, "gemma3", **GEMMA3, **linear, **pattern, rope__freq_base_swa=("f32", 30000.0))
    assert spec.sliding_windows == {1: 24}
    assert (spec.rope, spec.sliding_rope) == (RopeSpec(500000.0, "linear", 8.0), RopeSpec(30000.0))
    spec = read(tmp_path, "gemma3", **GEMMA3, attention__sliding_window_pattern=("u32", 2))
    assert spec.sliding_windows == {0: 24}


def test_the_largest_gemma3_scales_by_hidden_size_and_heads(tmp_path):
    spec = read(tmp_path, "gemma3", **GEMMA3, block_count=("u32", 62))
    assert spec.query_pre_attn_scalar == 32 / 4


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"attention__sliding_window": None}, "'gemma3.attention.sliding_window' is missing"),
        ({"attention__sliding_window": ("u32", 0)}, "'gemma3.attention.sliding_window' is 0, it must be from 1"),
        ({"attention__sliding_window_pattern": ("u32", 0)}, "sliding_window_pattern' is 0, it must be from 1"),
        ({"attention__sliding_window_pattern": ("[bool]", [True])}, "true or false for each of 2 layers is needed"),
        ({"attention__sliding_window_pattern": ("[u32]", [1, 0])}, "true or false for each of 2 layers is needed"),
        ({"attn_logit_softcapping": ("f32", 50.0)}, "'gemma3.attn_logit_softcapping' is 50.0; capped logits"),
    ],
)
def test_refusals_of_gemma3(tmp_path, changed, match):
    refused(tmp_path, match, architecture="gemma3", **(GEMMA3 | changed))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"architecture": "gemma"}, "'gemma' is not known; known: gemma3, llama, qwen2, qwen3"),
        ({"arrays": {"x": np.ones(1)}}, "'token_embd.weight' is missing"),
        ({"block_count": None}, "'llama.block_count' is missing"),
        (
            {"block_count": ("u64", 1 << 40)},
            "'llama.block_count' is 1099511627776, it must be from 1 to 1000;",
        ),
        ({"context_length": ("str", "64")}, "'llama.context_length' is '64', an integer"),
        ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon' is missing"),
        ({"expert_count": ("u32", 8)}, "experts are not computed"),
        ({"attention__sliding_window": ("u32", 512)}, "the models of llama have no sliding window"),
        ({"final_logit_softcapping": ("f32", 30.0)}, "'llama.final_logit_softcapping' is 30.0; capped logits"),
        ({"rope__scaling__type": ("str", "longrope"), "rope__scaling__factor": ("f32", 2.0)}, "is 'longrope'; known"),
        ({**YARN, "rope__scaling__yarn_log_multiplier": ("f32", 0.1)}, "yarn without yarn_log_multiplier"),
        ({**YARN, "rope__scaling__original_context_length": None}, "original_context_length' is missing"),
    ],
)
def test_refusals(tmp_path, options, match):
    refused(tmp_path, match, **options)
