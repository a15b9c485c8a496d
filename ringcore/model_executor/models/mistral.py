"""Mistral, dense."""

from __future__ import annotations

from ringcore.families.mistral import MISTRAL
from ringcore.model_executor.models.decoder import DenseDecoder

__all__ = ["MistralForCausalLM"]


class MistralForCausalLM(DenseDecoder):
    """Llama without biases, and with one sliding window for all layers where `ModelSpec.sliding_windows` says so."""

    family = MISTRAL
