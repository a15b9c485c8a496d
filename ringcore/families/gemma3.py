"""Gemma 3, text only: sliding-window layers between full-attention layers, with a rotary embedding each; four norms a
layer, by 1 + weight; scaled embeddings."""

from __future__ import annotations

from typing import Any

from ringcore.checkpoint.family import Family, GGUFFormat, LayerNorms
from ringcore.checkpoint.gguf_fields import shortest
from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.model_spec import RopeSpec
from ringcore.checkpoint.rope import DEFAULT_THETA, rope_from
from ringcore.checkpoint.sliding_windows import FULL, SLIDING, full_every, read_gguf_windows

__all__ = ["GEMMA3"]

_PATTERN_KEYS = ("sliding_window_pattern", "_sliding_window_pattern")
_PATTERN = 6  # every sixth layer has full attention
_FULL_THETA = 1_000_000.0  # of full-attention layers
# A GGUF file does not record that the 27B model scales its scores by hidden_size / num_heads: GGML recognizes it by its
# number of layers.
_LAYERS_OF_27B = 62


def _full_by_pattern(config: Metadata, num_layers: int, given: list[str] | None) -> list[str]:
    key = next((key for key in _PATTERN_KEYS if key in config), _PATTERN_KEYS[0])
    return given or full_every(config.integer(key, _PATTERN), num_layers)


def _read_ropes(config: Metadata, max_position_embeddings: int) -> tuple[RopeSpec, RopeSpec]:
    """transformers 5 has `rope_parameters` per layer type. Earlier, `rope_theta` and `rope_scaling` applied to
    full-attention layers and `rope_local_base_freq` was the base of sliding-window layers, which is never scaled.
    """
    parameters = config.child("rope_parameters") or Metadata({}, config.path)
    for key in parameters.values:
        if key not in (FULL, SLIDING):
            raise parameters.error(key, f"is not known; Gemma 3 has parameters of {FULL}, {SLIDING}")
    full, sliding = parameters.child(FULL), parameters.child(SLIDING)
    theta = config.number("rope_theta", _FULL_THETA)
    if full is not None:
        theta = full.number("rope_theta", theta)
    local_theta = config.number("rope_local_base_freq", DEFAULT_THETA)
    return (
        rope_from(config, config.child("rope_scaling") or full, theta, max_position_embeddings),
        rope_from(config, sliding, local_theta, max_position_embeddings),
    )


def _gguf_attention(meta: Metadata, num_layers: int, hidden_size_per_head: int) -> dict[str, Any]:
    """`ModelSpec.rope` is that of the full-attention layers. A file may omit the base of the others."""
    is_27b = num_layers == _LAYERS_OF_27B
    return {
        "sliding_windows": read_gguf_windows(meta, "gemma3", num_layers, _PATTERN),
        "sliding_rope": RopeSpec(shortest(meta.number("gemma3.rope.freq_base_swa", DEFAULT_THETA))),
        "query_pre_attn_scalar": float(hidden_size_per_head) if is_27b else None,
    }


GEMMA3 = Family(
    architectures=("Gemma3ForCausalLM",),
    model="ringcore.model_executor.models.gemma3:Gemma3ForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    not_computed=("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    activation_field="hidden_activation",
    attention_scale_field="query_pre_attn_scalar",
    read_ropes=_read_ropes,
    layer_kinds=_full_by_pattern,
    norms=LayerNorms(
        attention_out="post_attention_layernorm", mlp="pre_feedforward_layernorm", mlp_out="post_feedforward_layernorm"
    ),
    gguf=GGUFFormat(name="gemma3", model_type="gemma3_text", attention=_gguf_attention),
    head_norm=True,
    norm_plus_one=True,
    activation="gelu_tanh",
    scaled_embeddings=True,
)
