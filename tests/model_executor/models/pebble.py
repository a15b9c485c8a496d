"""The record of a family that only the tests know: Qwen3's computation under other names, with fixed biases."""

from __future__ import annotations

from ringcore.checkpoint.family import Family, GGUFFormat, LayerNorms

PEBBLE = Family(
    architectures=("PebbleForCausalLM",),
    model="pebble_model:PebbleForCausalLM",
    defaults={"head_dim": 16, "num_key_value_heads": 2},
    not_computed=("router_bias",),
    activation_field="act",
    attention_bias=True,
    attention_out_bias=True,
    norms=LayerNorms(input="ln_attn", mlp="ln_mlp", query="self_attn.query_ln", key="self_attn.key_ln"),
    gguf=GGUFFormat(name="pebble", interleaved_rope=True),
    head_norm=True,
)
