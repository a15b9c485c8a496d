"""Llama 2, 3 and derivatives: SmolLM2, TinyLlama, and others published as LlamaForCausalLM."""

from __future__ import annotations

from ringcore.families.llama import LLAMA
from ringcore.model_executor.models.decoder import DenseDecoder

__all__ = ["LlamaForCausalLM"]


class LlamaForCausalLM(DenseDecoder):
    """The dense decoder without changes; biases, head size and tying come from the configuration."""

    family = LLAMA
