"""Qwen3, dense."""

from __future__ import annotations

from ringcore.model_executor.models.decoder import DenseDecoder, Family

__all__ = ["Qwen3ForCausalLM"]


class Qwen3ForCausalLM(DenseDecoder):
    """No biases; each head of q and k is normalised before it is turned."""

    family = Family(head_norm=True)
