"""Qwen3 with mixtures of experts."""

from __future__ import annotations

from ringcore.families.qwen3_moe import QWEN3_MOE
from ringcore.model_executor.models.decoder import DenseDecoder

__all__ = ["Qwen3MoeForCausalLM"]


class Qwen3MoeForCausalLM(DenseDecoder):
    """Attention is that of Qwen3; which layers have experts its configuration says."""

    family = QWEN3_MOE
