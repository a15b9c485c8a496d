"""Qwen2 and Qwen2.5, dense: biases on q, k and v whatever the configuration says, windows in the later layers."""

from __future__ import annotations

from ringcore.checkpoint.family import Family, GGUFFormat
from ringcore.checkpoint.sliding_windows import sliding_later_layers

__all__ = ["QWEN2"]

QWEN2 = Family(
    architectures=("Qwen2ForCausalLM",),
    model="ringcore.model_executor.models.qwen2:Qwen2ForCausalLM",
    attention_bias=True,
    attention_out_bias=False,
    layer_kinds=sliding_later_layers,
    gguf=GGUFFormat(name="qwen2", model_type="qwen2"),
)
