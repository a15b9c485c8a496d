"""How GGUF files store models that have no family here and that transformers computes: a record per architecture.

transformers has such a mapping too, which leaves out what its default configurations happen to have (the base of
StarCoder2's RoPE, the width of experts). These have every number that a file states, and a file that states another
one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["GGUF_ARCHITECTURES", "MappedArchitecture"]

_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_WITHOUT_MLP = {key: name for key, name in _SIZES.items() if name != "intermediate_size"}
_RMS_NORM = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_EXPERT_WIDTH = ("blk.0.ffn_down_exps.weight", 2)
# Gemma 2 27B scales its scores by hidden_size / num_heads, which a file does not record: GGML recognizes it by this.
_LAYERS_OF_GEMMA2_27B = 46

Config = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedArchitecture:
    """Keys of the header are without the name of the architecture before them; fields are those of config.json.

    Read for every architecture: head sizes, the rotary embedding, the vocabulary, tied embeddings, token ids, and
    `attention.head_count_kv`.
    """

    model_type: str  # transformers' name
    numbers: Mapping[str, str]  # key: field
    defaults: Mapping[str, tuple[str, Any]] = field(default_factory=dict)  # key: (field, GGML's where a file has none)
    shapes: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # field: (tensor, dimension) that has its size
    bias_field: str | None = None  # true if the linears of attention have biases
    derive: Callable[[Config], Config] | None = None  # fields that follow from the others
    required_values: Mapping[str, int] = field(default_factory=dict)  # key: the only value that the model computes
    ignored: tuple[str, ...] = ()  # keys that say the same as a shape
    rotary: bool = True
    partial_rotary: bool = False  # whether a part of a head may be rotated

    norm_plus_one: bool = False  # norms multiply by 1 + weight; a GGUF file stores the sum
    transposed: tuple[str, ...] = ()  # matrices of a layer that a Hugging Face checkpoint has as [..., in, out]
    # End of a Hugging Face name: what the package `gguf` knows it as. Of two, the outputs alternate.
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _gemma2_scale(config: Config) -> Config:
    is_27b = config["num_hidden_layers"] == _LAYERS_OF_GEMMA2_27B
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": per_head if is_27b else config["head_dim"]}


def _window_or_none(config: Config) -> Config:
    return {"sliding_window": config["sliding_window"] or None}


def _untruncated_yarn(config: Config) -> Config:
    """As published; a file does not say it."""
    rope = config["rope_parameters"]
    return {"rope_parameters": rope | {"truncate": False} if rope["rope_type"] == "yarn" else rope}


# By general.architecture.
GGUF_ARCHITECTURES: Mapping[str, MappedArchitecture] = {
    "phi3": MappedArchitecture(
        model_type="phi3",
        numbers=_SIZES | _RMS_NORM,
        defaults={"attention.sliding_window": ("sliding_window", 0)},
        derive=_window_or_none,
        partial_rotary=True,
    ),
    "starcoder2": MappedArchitecture(
        model_type="starcoder2",
        numbers=_SIZES | {"attention.layer_norm_epsilon": "norm_epsilon"},
        bias_field="use_bias",
    ),
    "gemma2": MappedArchitecture(
        model_type="gemma2",
        numbers=_SIZES | _RMS_NORM,
        defaults={
            "attention.sliding_window": ("sliding_window", 4096),
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
        },
        derive=_gemma2_scale,
        norm_plus_one=True,
    ),
    "gpt2": MappedArchitecture(
        model_type="gpt2",
        numbers={
            "context_length": "n_positions",
            "block_count": "n_layer",
            "embedding_length": "n_embd",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        rotary=False,
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "qwen2moe": MappedArchitecture(
        model_type="qwen2_moe",
        numbers=_SIZES | _RMS_NORM | _EXPERTS,
        defaults={"expert_weights_norm": ("norm_topk_prob", False)},
        shapes={
            "moe_intermediate_size": _EXPERT_WIDTH,
            "shared_expert_intermediate_size": ("blk.0.ffn_down_shexp.weight", 1),
        },
        ignored=("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    ),
    "qwen3moe": MappedArchitecture(
        model_type="qwen3_moe",
        numbers=_SIZES | _RMS_NORM | _EXPERTS,
        defaults={"expert_weights_norm": ("norm_topk_prob", True)},
        shapes={"moe_intermediate_size": _EXPERT_WIDTH},
        ignored=("expert_feed_forward_length",),
        bias_field="attention_bias",
    ),
    "minimax-m2": MappedArchitecture(
        model_type="minimax_m2",
        numbers=_WITHOUT_MLP | _RMS_NORM | _LOCAL_EXPERTS,
        shapes={"intermediate_size": _EXPERT_WIDTH},
        required_values={"expert_gating_func": 2},  # sigmoid
        ignored=("feed_forward_length", "expert_feed_forward_length"),
        partial_rotary=True,
        aliases={"e_score_correction_bias": ("e_score_correction.bias",)},
    ),
    "gpt-oss": MappedArchitecture(
        model_type="gpt_oss",
        numbers=_WITHOUT_MLP | _RMS_NORM | _LOCAL_EXPERTS,
        defaults={"attention.sliding_window": ("sliding_window", 128)},
        shapes={"intermediate_size": _EXPERT_WIDTH},
        derive=_untruncated_yarn,
        ignored=("feed_forward_length", "expert_feed_forward_length"),
        transposed=("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
        aliases={
            "self_attn.sinks": ("self_attn.sinks.weight",),
            "experts.gate_up_proj": ("experts.gate_proj.weight", "experts.up_proj.weight"),
            "experts.gate_up_proj_bias": ("experts.gate_proj.bias", "experts.up_proj.bias"),
            "experts.down_proj": ("experts.down_proj.weight",),
            "experts.down_proj_bias": ("experts.down_proj.bias",),
        },
    ),
}
