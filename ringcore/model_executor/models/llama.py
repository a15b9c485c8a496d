"""Llama 2, 3 and their kin: SmolLM2, TinyLlama, and others that publish as LlamaForCausalLM."""

from __future__ import annotations

from ringcore.model_executor.models.decoder import DenseDecoder

__all__ = ["LlamaForCausalLM"]


class LlamaForCausalLM(DenseDecoder):
    """The dense decoder as it is; biases, head size and tying are the configuration's."""
