"""Gemma 3, text only."""

from __future__ import annotations

from ringcore.families.gemma3 import GEMMA3
from ringcore.model_executor.models.decoder import DenseDecoder

__all__ = ["Gemma3ForCausalLM"]


class Gemma3ForCausalLM(DenseDecoder):
    """Sliding-window layers interleaved with full-attention layers, each kind with its own rotary embedding; both
    contributions of a layer are normalised again before the residual add (post-norms)."""

    family = GEMMA3
