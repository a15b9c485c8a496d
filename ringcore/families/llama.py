"""Llama 2, 3 and derivatives: SmolLM2, TinyLlama, and others published as LlamaForCausalLM."""

from __future__ import annotations

from ringcore.checkpoint.family import Family, GGUFFormat

__all__ = ["LLAMA"]

LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    model="ringcore.model_executor.models.llama:LlamaForCausalLM",
    defaults={"bos_token_id": 1, "eos_token_id": 2},
    mlp_bias="mlp_bias",
    gguf=GGUFFormat(name="llama", model_type="llama", interleaved_rope=True),
)
