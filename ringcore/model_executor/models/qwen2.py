"""Qwen2 and Qwen2.5, dense."""

from __future__ import annotations

from ringcore.families.qwen2 import QWEN2
from ringcore.model_executor.models.decoder import DenseDecoder

__all__ = ["Qwen2ForCausalLM"]


class Qwen2ForCausalLM(DenseDecoder):
    """Llama with biases on q, k and v, which the family always has: `ModelSpec.attention_bias` says so."""

    family = QWEN2
