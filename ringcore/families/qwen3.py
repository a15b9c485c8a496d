"""Qwen3, dense: q and k heads are normalised (QK norm), windows in the later layers."""

from __future__ import annotations

from ringcore.checkpoint.family import Family, GGUFFormat
from ringcore.checkpoint.sliding_windows import sliding_later_layers

__all__ = ["QWEN3"]

QWEN3 = Family(
    architectures=("Qwen3ForCausalLM",),
    model="ringcore.model_executor.models.qwen3:Qwen3ForCausalLM",
    defaults={"head_dim": 128},
    layer_kinds=sliding_later_layers,
    gguf=GGUFFormat(name="qwen3", model_type="qwen3"),
    head_norm=True,
)
