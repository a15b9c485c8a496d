"""MiMo: Qwen2 with layers of multi-token prediction, which draft and change nothing of what the model writes."""

from __future__ import annotations

from ringcore.checkpoint.family import Family
from ringcore.checkpoint.sliding_windows import sliding_later_layers

__all__ = ["MIMO"]

MIMO = Family(
    architectures=("MiMoForCausalLM",),
    model="ringcore.model_executor.models.mimo:MiMoForCausalLM",
    attention_bias=True,
    attention_out_bias=False,
    layer_kinds=sliding_later_layers,
    mtp_layers="model.mtp_layers",
)
