"""Qwen3 with a mixture of experts in the place of the MLP of most layers."""

from __future__ import annotations

from ringcore.checkpoint.family import Family
from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.model_spec import MAX_SIZES, ExpertsSpec
from ringcore.checkpoint.sliding_windows import FULL, SLIDING

__all__ = ["QWEN3_MOE"]


def _read_experts(config: Metadata, num_layers: int) -> ExpertsSpec:
    """transformers reads and writes the number of experts by two names."""
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    num_experts = config.integer(name, 128, high=MAX_SIZES["num_experts"])
    num_chosen = config.integer("num_experts_per_tok", 8)
    if num_chosen > num_experts:
        raise config.error("num_experts_per_tok", f"is {num_chosen}, of {num_experts} experts")
    period = config.integer("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(one) is int for one in dense):
        raise config.error("mlp_only_layers", f"is {dense!r}, a list of layers is needed")
    return ExpertsSpec(
        num_experts=num_experts,
        num_experts_per_tok=num_chosen,
        intermediate_size=config.integer("moe_intermediate_size", 768, high=MAX_SIZES["intermediate_size"]),
        norm_topk_prob=config.flag("norm_topk_prob", False),
        dense_layers=[layer for layer in range(num_layers) if layer in dense or (layer + 1) % period],
    )


def _layer_kinds(config: Metadata, num_layers: int, given: list[str] | None) -> list[str]:
    """The window is that of all layers."""
    return [SLIDING if config.flag("use_sliding_window", False) else FULL] * num_layers


QWEN3_MOE = Family(
    architectures=("Qwen3MoeForCausalLM",),
    model="ringcore.model_executor.models.qwen3_moe:Qwen3MoeForCausalLM",
    defaults={"sliding_window": 4096},
    layer_kinds=_layer_kinds,
    read_experts=_read_experts,
    head_norm=True,
)
