"""Tensor parallelism by the model's own plan: its linears are replaced by this rank's share of them.

What the plan names in a way that is not a linear's (experts), what does not divide, and what it does not name is whole
on every rank, and computed by every rank alike. Where only one of two linears that need each other could be split,
their sizes do not fit, and the recorded pass over the split model fails.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.models.transformers.checkpoint_layout import TensorLayout
from ringcore.model_executor.models.transformers.construction import module_of
from ringcore.model_executor.weight import Weight

__all__ = ["ShardedLinear", "shard"]

Split = Literal["outputs", "inputs"]
# By style of a plan: (what is split, whether the other side of the linear is whole on every rank). The names with "rep"
# are those of older releases.
_STYLES: Mapping[str, tuple[Split, bool]] = {
    "colwise": ("outputs", False),
    "colwise_gather_output": ("outputs", True),
    "colwise_rep": ("outputs", True),
    "rowwise": ("inputs", False),
    "rowwise_split_input": ("inputs", True),
    "rowwise_rep": ("inputs", True),
}


class ShardedLinear(nn.Module):
    """A linear split by its outputs or its inputs. Of another one with `whole`, the gathered outputs or the unsplit
    inputs are the same on every rank."""

    def __init__(self, linear: nn.Linear, split: Split, whole: bool, tp: TensorParallel) -> None:
        super().__init__()
        self.split, self.whole, self.tp = split, whole, tp
        dim = 0 if split == "outputs" else 1
        shape = [size // tp.size if dim == i else size for i, size in enumerate(linear.weight.shape)]
        self.weight = nn.Parameter(linear.weight.new_empty(shape), requires_grad=False)
        self.register_parameter("bias", None)
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.new_empty(shape[0]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in], or this rank's share of it -> [..., out], or this rank's share of it."""
        if self.split == "outputs":
            out = nn.functional.linear(x, self.weight, self.bias)
            return self.tp.all_gather_last_dim(out) if self.whole else out
        if self.whole:
            x = x.chunk(self.tp.size, -1)[self.tp.rank]
        out = self.tp.all_reduce(nn.functional.linear(x, self.weight))
        return out if self.bias is None else out + self.bias

    def weights(self, weight: TensorLayout, bias: TensorLayout | None) -> list[Weight]:
        rank, dim = self.tp.rank, 0 if self.split == "outputs" else 1
        length = self.weight.shape[dim]
        shares = [weight.slice(dim, rank * length, length)]
        if bias is not None:
            shares.append(bias.slice(0, rank * length, length) if dim == 0 else bias.weight())
        return shares


def shard(model: PreTrainedModel, layouts: Mapping[str, TensorLayout], tp: TensorParallel) -> dict[str, ShardedLinear]:
    """Replaces the linears that can be split, with `tp`; -> the shares by the linear's name."""
    plan = {re.compile(key.replace(".", r"\.").replace("*", r"\d+")): style for key, style in model.tp_plan.items()}
    shares: dict[str, ShardedLinear] = {}
    for name, module in list(model.named_modules()):
        style = next((style for pattern, style in plan.items() if pattern.fullmatch(name)), "")
        if type(module) is not nn.Linear or style not in _STYLES:
            continue
        split, whole = _STYLES[style]
        size = module.out_features if split == "outputs" else module.in_features
        layout = layouts.get(f"{name}.weight")  # none where it is tied: the other one is whole
        if layout is not None and layout.is_whole and size % tp.size == 0 and not _is_tied(model, name):
            shares[name] = ShardedLinear(module, split, whole, tp)
    for name, share in shares.items():
        parent, leaf = module_of(model, name)
        setattr(parent, leaf, share)
    return shares


def _is_tied(model: PreTrainedModel, name: str) -> bool:
    pairs = model.all_tied_weights_keys
    return f"{name}.weight" in {*pairs.keys(), *pairs.values()}
