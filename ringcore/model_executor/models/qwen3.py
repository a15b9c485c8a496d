"""Qwen3, dense."""

from __future__ import annotations

from ringcore.families.qwen3 import QWEN3
from ringcore.model_executor.models.decoder import DenseDecoder

__all__ = ["Qwen3ForCausalLM"]


class Qwen3ForCausalLM(DenseDecoder):
    """No biases; q and k heads are normalised before the rotary embedding (QK norm)."""

    family = QWEN3
