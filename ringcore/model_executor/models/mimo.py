"""MiMo, dense; its layers of multi-token prediction are a head (`mtp_head.py`)."""

from __future__ import annotations

from ringcore.families.mimo import MIMO
from ringcore.model_executor.models.decoder import DenseDecoder

__all__ = ["MiMoForCausalLM"]


class MiMoForCausalLM(DenseDecoder):
    """Llama with biases on q, k and v."""

    family = MIMO
