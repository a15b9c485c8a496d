"""Layers of multi-token prediction: what they draft is what plain torch finds; tokens are those without drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from head_rows import drafted, greedy
from safetensors.torch import load_file, save_file
from step_driver import make_config, start

from ringcore.errors import ConfigError, ModelLoadError
from ringcore.worker.worker import Worker

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, SIZE, EPS, THETA = 97, 64, 96, 4, 2, 16, 1e-6, 10000.0
MTP = {"method": "mtp", "num_drafts": 4}


def mtp_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    shapes: dict[str, tuple[int, ...]] = {
        "input_proj.weight": (HIDDEN, 2 * HIDDEN),
        "self_attn.q_proj.weight": (HEADS * SIZE, HIDDEN),
        "self_attn.q_proj.bias": (HEADS * SIZE,),
        "self_attn.k_proj.weight": (KV_HEADS * SIZE, HIDDEN),
        "self_attn.k_proj.bias": (KV_HEADS * SIZE,),
        "self_attn.v_proj.weight": (KV_HEADS * SIZE, HIDDEN),
        "self_attn.v_proj.bias": (KV_HEADS * SIZE,),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
    }
    tensors = {name: 0.15 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("token_", "hidden_", "input_", "post_attention_", "final_"):
        tensors[f"{name}layernorm.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    return tensors


@pytest.fixture(scope="module")
def tiny_mimo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """(folder, the transformers model without its MTP layer): a Qwen2 by another name."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 3}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 128}
    config = Qwen2Config(**sizes, **heads, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False, rms_norm_eps=EPS)
    with torch.random.fork_rng():
        torch.manual_seed(12)
        model = Qwen2ForCausalLM(config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    folder = tmp_path_factory.mktemp("tiny-mimo")
    model.save_pretrained(folder)
    write(folder, mtp_tensors())
    return str(folder), model


def write(folder: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> str:
    weights, config = folder / "model.safetensors", folder / "config.json"
    own = {name: tensor for name, tensor in load_file(weights).items() if "mtp_layers" not in name}
    save_file(own | {f"model.mtp_layers.0.{name}": tensor for name, tensor in tensors.items()}, weights)
    given = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    config.write_text(json.dumps(json.loads(config.read_text()) | given | fields))
    return str(folder)


@torch.inference_mode()
def reference(model: Any, tokens: list[int], count: int) -> list[int]:
    """What it would draft after these tokens, of which the model has computed all but the last, without a cache."""
    taken: list[Any] = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, inputs, output: taken.append(output))
    model.model(torch.tensor([tokens[:-1]]))
    hook.remove()
    last = taken[0][0] if isinstance(taken[0], tuple) else taken[0]
    features, ids, drafted = last.reshape(-1, HIDDEN), tokens[1:], []
    for _ in range(count):
        out = layer(model, torch.tensor(ids), features)
        drafted.append(int(model.lm_head(out[-1]).argmax()))
        ids, features = [*ids, drafted[-1]], torch.cat([features, out[-1:]])
    return drafted


def layer(model: Any, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    tensors = mtp_tensors()
    norm = lambda name, x: F.rms_norm(x, (HIDDEN,), tensors[f"{name}layernorm.weight"], EPS)  # noqa: E731
    embedded = model.model.embed_tokens.weight[ids].clone()
    embedded[0] = 0
    both = torch.cat([norm("hidden_", features), norm("token_", embedded)], 1)
    stream = F.linear(both, tensors["input_proj.weight"])
    x, linear = (
        norm("input_", stream),
        lambda x, name: F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias")),
    )
    q, k, v = (linear(x, f"self_attn.{one}_proj").view(len(ids), -1, SIZE).transpose(0, 1) for one in "qkv")
    angles = (torch.arange(len(ids))[:, None] * THETA ** (-torch.arange(0, SIZE, 2) / SIZE)).repeat(1, 2)
    halves = lambda x: torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)  # noqa: E731
    q, k = (x * angles.cos() + halves(x) * angles.sin() for x in (q, k))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
    attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    stream = stream + linear(attended.transpose(0, 1).reshape(len(ids), -1), "self_attn.o_proj")
    x = norm("post_attention_", stream)
    stream = stream + linear(F.silu(linear(x, "mlp.gate_proj")) * linear(x, "mlp.up_proj"), "mlp.down_proj")
    return norm("final_", stream)


def test_it_drafts_what_plain_torch_finds(tiny_mimo: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks, steps after wrong drafts; greedy tokens are transformers'."""
    folder, model = tiny_mimo
    written, found = drafted(make_config(folder, speculative=MTP), monkeypatch)
    assert [drafts for _, drafts in found] == [reference(model, tokens, 4) for tokens, _ in found]
    assert written == greedy(model, len(written))


def test_a_checkpoint_with_it_is_served_without(tiny_mimo: tuple[str, Any]) -> None:
    worker = start(Worker(make_config(tiny_mimo[0]), 0, None))
    assert len(worker.get_kv_cache_spec()) == 3
    worker.shutdown()


def test_what_cannot_be_served_is_refused(
    tiny_mimo: tuple[str, Any], tiny_llama: tuple[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"of MiMoForCausalLM, deepseek_v3, glm4_moe, glm4_moe_lite, and not"):
        make_config(tiny_llama[0], speculative=MTP)
    with pytest.raises(ConfigError, match=r"speculative.model='.'"):
        make_config(tiny_mimo[0], speculative=MTP | {"model": "."})
    with pytest.raises(ConfigError, match=r"num_drafts=17: give an integer from 1 to 16"):
        make_config(tiny_mimo[0], speculative=MTP | {"num_drafts": 17})
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((Path(tiny_mimo[0]) / name).read_bytes())
    tensors = mtp_tensors()
    with pytest.raises(ConfigError, match=r"has no layers of multi-token prediction \(num_nextn_predict_layers is 0\)"):
        make_config(write(tmp_path, tensors, num_nextn_predict_layers=0), speculative=MTP)
    del tensors["input_proj.weight"]
    with pytest.raises(ModelLoadError, match=r"'model.mtp_layers.0.input_proj.weight' is missing"):
        make_config(write(tmp_path, tensors), speculative=MTP)
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    with pytest.raises(ConfigError, match=r"in 16 bits, and this checkpoint is quantized"):
        make_config(write(tmp_path, tensors, quantization_config=fp8), speculative=MTP)
