import json

import numpy as np
import pytest
from raw_files import tiny_gguf, tiny_metadata

from ringcore.checkpoint import TransformersSpec, find_model, read_model_spec
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES

EMBEDDING = {"token_embd.weight": np.ones((16, 32))}


def read(tmp_path, architecture="phi3", arrays=EMBEDDING, model_impl="auto", tokens=(), **changed):
    metadata = [*tiny_metadata(architecture, **changed), *tokens]
    spec = read_model_spec(find_model(tiny_gguf(tmp_path / "x.gguf", metadata, arrays)), FAMILIES, model_impl)
    assert isinstance(spec, TransformersSpec)
    return spec, json.loads(spec.config)


def refused(tmp_path, match, **options):
    with pytest.raises(ModelLoadError, match=match):
        read(tmp_path, **options)


COMMON = {
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,  # not the 9.99999997e-07 of float32
    "tie_word_embeddings": True,
    "dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}


def test_every_field(tmp_path):
    tokens = [(f"tokenizer.ggml.{kind}_token_id", "u32", i + 1) for i, kind in enumerate(("bos", "eos", "eot"))]
    spec, config = read(tmp_path, tokens=tokens)
    assert config == COMMON | {
        "model_type": "phi3",
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
    }
    assert (spec.num_layers, spec.vocab_size, spec.hidden_size, spec.max_position_embeddings) == (2, 16, 32, 64)
    assert (spec.model_type, spec.eos_token_ids, spec.weight_files, spec.dtype) == ("phi3", [2, 3], [], "float32")


def test_what_only_some_have(tmp_path):
    _, config = read(tmp_path, attention__sliding_window=("u32", 20), rope__dimension_count=("u32", 6))
    assert config["sliding_window"] == 20
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.75
    _, config = read(tmp_path, attention__sliding_window=("u32", 0))
    assert config["sliding_window"] is None
    untied = EMBEDDING | {"output.weight": np.ones((16, 32), np.float16)}
    assert not read(tmp_path, arrays=untied)[1]["tie_word_embeddings"]


EXPERTS = EMBEDDING | {
    "blk.0.ffn_down_exps.weight": np.ones((3, 32, 24)),
    "blk.0.ffn_down_shexp.weight": np.ones((32, 40)),
}
ROUTED = {"expert_count": ("u32", 3), "expert_used_count": ("u32", 2)}


def test_widths_of_experts_are_those_of_their_tensors(tmp_path):
    _, config = read(tmp_path, "qwen2moe", EXPERTS, **ROUTED)
    widths = (config["moe_intermediate_size"], config["shared_expert_intermediate_size"], config["norm_topk_prob"])
    assert widths == (24, 40, False)
    _, config = read(tmp_path, "qwen3moe", EXPERTS, **ROUTED, expert_feed_forward_length=("u32", 24))
    assert (config["moe_intermediate_size"], config["norm_topk_prob"], config["num_experts"]) == (24, True, 3)
    _, config = read(tmp_path, "qwen3moe", EXPERTS, **ROUTED, expert_weights_norm=("bool", False))
    assert config["norm_topk_prob"] is False
    refused(tmp_path, "tensor 'blk.0.ffn_down_exps.weight' is missing", architecture="qwen3moe", **ROUTED)


@pytest.mark.parametrize(("num_layers", "scalar"), [(2, 16), (46, 8)])
def test_gemma2_scales_by_its_head_size_but_for_the_largest(tmp_path, num_layers, scalar):
    _, config = read(tmp_path, "gemma2", attention__key_length=("u32", 16), block_count=("u32", num_layers))
    assert config["query_pre_attn_scalar"] == scalar
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)


def test_yarn_of_gpt_oss(tmp_path):
    yarn = {
        "rope__scaling__type": ("str", "yarn"),
        "rope__scaling__factor": ("f32", 32.0),
        "rope__scaling__original_context_length": ("u32", 16),
    }
    _, config = read(tmp_path, "gpt-oss", EXPERTS, **ROUTED, **yarn)
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    assert (config["intermediate_size"], config["num_local_experts"], config["sliding_window"]) == (24, 3, 128)


def test_a_native_family_by_transformers(tmp_path):
    _, config = read(tmp_path, "llama", model_impl="transformers")
    assert config == COMMON | {"model_type": "llama", "attention_bias": False, "mlp_bias": False}
    window = {"attention__sliding_window": ("u32", 24), "attention__sliding_window_pattern": ("u32", 2)}
    _, config = read(tmp_path, "gemma3", model_impl="transformers", **window)
    assert (config["model_type"], config["sliding_window"], config["query_pre_attn_scalar"]) == ("gemma3_text", 24, 8)
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert {kind: rope["rope_theta"] for kind, rope in config["rope_parameters"].items()} == {
        "full_attention": 500000.0,
        "sliding_attention": 10000.0,
    }


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"architecture": "falcon"},
            "'falcon' is not known in GGUF files; known: gemma2, gemma3, gpt-oss, gpt2, llama,",
        ),
        ({"model_impl": "native"}, "architecture 'phi3' is not known; known: gemma3, llama"),
        ({"context_length": None}, "'phi3.context_length' is missing"),
        ({"feed_forward_length": ("[u32]", [48, 48])}, r"'phi3.feed_forward_length' is \[48, 48\], an integer"),
        ({"expert_count": ("u32", 4)}, "'phi3.expert_count' is present, and no model of 'phi3' is known to have it"),
        (
            {"arrays": EMBEDDING | {"rope_factors_long.weight": np.ones(4)}},
            "longest sequence of a batch is not computed",
        ),
        ({"attention__head_count": ("u32", 5)}, "'phi3.attention.head_count' is 5, which does not divide 32"),
        ({"attention__value_length": ("u32", 4)}, "value_length' is not the 8 of attention.key_length"),
        (
            {"architecture": "starcoder2", "rope__dimension_count": ("u32", 4)},
            "dimension_count' is 4; only the head size 8",
        ),
        ({"architecture": "gpt2"}, "'gpt2.attention.layer_norm_rms_epsilon' is present"),
        (
            {"architecture": "minimax-m2", "arrays": EXPERTS, **ROUTED, "expert_gating_func": ("u32", 1)},
            "'minimax-m2.expert_gating_func' is 1; only 2 is computed",
        ),
    ],
)
def test_refusals(tmp_path, options, match):
    rms = {"attention__layer_norm_rms_epsilon": None, "attention__layer_norm_epsilon": ("f32", 1e-5)}
    refused(tmp_path, match, **((rms if options.get("architecture") == "starcoder2" else {}) | options))
