"""Tensor parallelism by the model's own plan: its linears are replaced by this rank's share of them, and so are the
embedding and the head where they are split alike.

What the plan names in a way that is not a linear's, what does not divide, what needs whole rows between two linears
(`between_linears`) and what it does not name is whole on every rank, and computed by every rank alike; experts are
split by `experts.py`. Where only one of two linears that need each other could be split, their sizes do not fit, and
the recorded pass over the split model fails.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import TypeGuard

from torch import nn
from transformers import PreTrainedModel

from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.models.transformers.between_linears import is_share_by_share
from ringcore.model_executor.models.transformers.checkpoint_layout import Ranges, TensorLayout
from ringcore.model_executor.models.transformers.construction import module_of
from ringcore.model_executor.models.transformers.linears import ParallelEmbedding, ParallelLinear
from ringcore.model_executor.weight import Weight

__all__ = ["Share", "shard", "weights_of"]

# By style of a plan: (the dimension of the weight that is split, whether the other side of the linear is whole on every
# rank). The names with "rep" are those of older releases.
_STYLES: Mapping[str, tuple[int, bool]] = {
    "colwise": (0, False),
    "colwise_gather_output": (0, True),
    "colwise_rep": (0, True),
    "rowwise": (1, False),
    "rowwise_split_input": (1, True),
    "rowwise_rep": (1, True),
}


Share = ParallelLinear | ParallelEmbedding


def weights_of(share: Share, weight: TensorLayout, bias: TensorLayout | None) -> list[Weight]:
    """This rank's slices; a bias over what is not split is whole, and added after the sum over ranks."""
    assert share.dim is not None, "it is whole"
    rank, length = share.tp.rank, share.weight.shape[share.dim]
    slices = [weight.slice(share.dim, rank * length, length)]
    if bias is not None:
        slices.append(bias.slice(0, rank * length, length) if share.dim == 0 else bias.weight())
    return slices


def shard(
    model: PreTrainedModel, layouts: dict[str, TensorLayout], tp: TensorParallel, fused: Container[str]
) -> dict[str, Share]:
    """Replaces the modules that can be split, with `tp`; -> the shares by the module's name. fused: names of those that
    our layers replace. Of a vector that the plan splits (attention sinks), the layout becomes that of this rank's
    share."""
    plan = {re.compile(key.replace(".", r"\.").replace("*", r"\d+")): style for key, style in model.tp_plan.items()}
    shares: dict[str, Share] = {}
    for name, module in list(model.named_modules()):
        style = next((style for pattern, style in plan.items() if pattern.fullmatch(name)), "")
        layout = layouts.get(f"{name}.weight")
        if name in fused or layout is None or not layout.is_whole or _is_tied(model, name):
            continue
        if type(module) is nn.Linear and style in _STYLES:
            dim, whole = _STYLES[style]
            if module.weight.shape[dim] % tp.size == 0:
                shares[name] = ParallelLinear(module, tp, dim, whole)
        elif module is model.get_input_embeddings() and _can_split(module, tp):
            shares[name] = ParallelEmbedding(module, tp)
    for name in _needing_whole_rows(model, shares):
        del shares[name]
    head = _tied_vocabulary(model, layouts, tp, fused, shares)
    for name, share in (shares | head).items():
        parent, leaf = module_of(model, name)
        setattr(parent, leaf, share)
    for name, vector in list(model.named_parameters()):
        style = next((style for pattern, style in plan.items() if pattern.fullmatch(name)), "")
        is_split = style in _STYLES and _STYLES[style][0] == 0
        if name not in fused and is_split and vector.dim() == 1 and len(vector) % tp.size == 0:
            length = len(vector) // tp.size
            layouts[name] = replace(layouts[name], share=Ranges(0, ((tp.rank * length, length),)))
            module, leaf = module_of(model, name)
            module._parameters[leaf] = nn.Parameter(vector.new_empty(length), requires_grad=False)
    return shares


def _needing_whole_rows(model: PreTrainedModel, shares: Mapping[str, Share]) -> list[str]:
    """Of the linears, by modules that have some split by outputs and others by inputs."""
    by_parent: dict[str, dict[str, ParallelLinear]] = {}
    for name, share in shares.items():
        if isinstance(share, ParallelLinear) and not share.whole:
            parent, _, leaf = name.rpartition(".")
            by_parent.setdefault(parent, {})[leaf] = share
    found = []
    for parent, linears in by_parent.items():
        column, row = ([leaf for leaf, share in linears.items() if share.dim == dim] for dim in (0, 1))
        size = next(iter(linears.values())).tp.size
        if column and row and not is_share_by_share(model.get_submodule(parent), column, row, size):
            found += [f"{parent}.{leaf}" for leaf in linears]
    return found


def _tied_vocabulary(
    model: PreTrainedModel,
    layouts: Mapping[str, TensorLayout],
    tp: TensorParallel,
    fused: Container[str],
    shares: dict[str, Share],
) -> dict[str, Share]:
    """Embedding and head that share one table, if both can be split: the embedding is added to `shares`, the head,
    which has no tensor of its own, is returned."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    if not _can_split(embedding, tp) or type(head) is not nn.Linear or head.bias is not None:
        return {}
    pair = {f"{names[head]}.weight": f"{names[embedding]}.weight"}
    layout = layouts.get(f"{names[embedding]}.weight")
    is_ours = names[embedding] in fused
    if is_ours or dict(model.all_tied_weights_keys) != pair or layout is None or not layout.is_whole:
        return {}
    shares[names[embedding]] = ParallelEmbedding(embedding, tp)
    return {names[head]: ParallelLinear(head, tp, 0, whole=True)}


def _can_split(module: nn.Module, tp: TensorParallel) -> TypeGuard[nn.Embedding]:
    """A subclass may compute something else than an embedding."""
    return type(module) is nn.Embedding and module.num_embeddings % tp.size == 0


def _is_tied(model: PreTrainedModel, name: str) -> bool:
    pairs = model.all_tied_weights_keys
    return f"{name}.weight" in {*pairs.keys(), *pairs.values()}
