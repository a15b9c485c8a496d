"""Tensor parallelism by the model's own plan: its linears are replaced by this rank's share of them, and so are the
embedding and the head where they are split alike.

What the plan names in a way that is not a linear's (experts), what does not divide, and what it does not name is whole
on every rank, and computed by every rank alike. Where only one of two linears that need each other could be split,
their sizes do not fit, and the recorded pass over the split model fails.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel

from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.models.transformers.checkpoint_layout import TensorLayout
from ringcore.model_executor.models.transformers.construction import module_of
from ringcore.model_executor.weight import Weight

__all__ = ["ShardedEmbedding", "ShardedLinear", "Share", "shard", "weights_of"]

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

    @property
    def dim(self) -> int:
        """Of the weight, that along which it is split."""
        return 0 if self.split == "outputs" else 1


class ShardedEmbedding(nn.Module):
    """An embedding split by its vocabulary: an equal, contiguous range of the ids on each rank."""

    dim = 0

    def __init__(self, embedding: nn.Embedding, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        rows, width = embedding.weight.shape
        self.weight = nn.Parameter(embedding.weight.new_empty(rows // tp.size, width), requires_grad=False)
        self.register_parameter("bias", None)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [...] int64 -> [..., hidden_size]. Each id belongs to one rank; the others add zeros."""
        rows = input_ids - self.tp.rank * len(self.weight)
        elsewhere = (rows < 0) | (rows >= len(self.weight))
        hidden = nn.functional.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self.tp.all_reduce(hidden.masked_fill(elsewhere.unsqueeze(-1), 0))


Share = ShardedLinear | ShardedEmbedding


def weights_of(share: Share, weight: TensorLayout, bias: TensorLayout | None) -> list[Weight]:
    """This rank's slices; a bias over what is not split is whole, and added after the sum over ranks."""
    rank, length = share.tp.rank, share.weight.shape[share.dim]
    slices = [weight.slice(share.dim, rank * length, length)]
    if bias is not None:
        slices.append(bias.slice(0, rank * length, length) if share.dim == 0 else bias.weight())
    return slices


def shard(model: PreTrainedModel, layouts: Mapping[str, TensorLayout], tp: TensorParallel) -> dict[str, Share]:
    """Replaces the modules that can be split, with `tp`; -> the shares by the module's name."""
    plan = {re.compile(key.replace(".", r"\.").replace("*", r"\d+")): style for key, style in model.tp_plan.items()}
    shares: dict[str, Share] = {}
    for name, module in list(model.named_modules()):
        style = next((style for pattern, style in plan.items() if pattern.fullmatch(name)), "")
        layout = layouts.get(f"{name}.weight")
        if layout is None or not layout.is_whole or _is_tied(model, name):
            continue
        if type(module) is nn.Linear and style in _STYLES:
            split, whole = _STYLES[style]
            size = module.out_features if split == "outputs" else module.in_features
            if size % tp.size == 0:
                shares[name] = ShardedLinear(module, split, whole, tp)
        elif module is model.get_input_embeddings() and _can_split(module, tp):
            shares[name] = ShardedEmbedding(module, tp)
    head = _tied_vocabulary(model, layouts, tp, shares)
    for name, share in (shares | head).items():
        parent, leaf = module_of(model, name)
        setattr(parent, leaf, share)
    return shares


def _tied_vocabulary(
    model: PreTrainedModel, layouts: Mapping[str, TensorLayout], tp: TensorParallel, shares: dict[str, Share]
) -> dict[str, Share]:
    """Embedding and head that share one table, if both can be split: the embedding is added to `shares`, the head,
    which has no tensor of its own, is returned."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    if not _can_split(embedding, tp) or type(head) is not nn.Linear or head.bias is not None:
        return {}
    pair = {f"{names[head]}.weight": f"{names[embedding]}.weight"}
    layout = layouts.get(f"{names[embedding]}.weight")
    if dict(model.all_tied_weights_keys) != pair or layout is None or not layout.is_whole:
        return {}
    shares[names[embedding]] = ShardedEmbedding(embedding, tp)
    return {names[head]: ShardedLinear(head, "outputs", True, tp)}


def _can_split(module: nn.Module, tp: TensorParallel) -> TypeGuard[nn.Embedding]:
    """A subclass may compute something else than an embedding."""
    return type(module) is nn.Embedding and module.num_embeddings % tp.size == 0


def _is_tied(model: PreTrainedModel, name: str) -> bool:
    pairs = model.all_tied_weights_keys
    return f"{name}.weight" in {*pairs.keys(), *pairs.values()}
