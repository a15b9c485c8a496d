"""A model's tensors in terms of the checkpoint's: names and layouts by transformers' own conversion mapping.

transformers converts a checkpoint when it loads it (experts of a layer stacked into one tensor, gate and up
concatenated, names changed), and back when it saves one. The way back is taken here, on meta, with copies replaced by
views: a checkpoint's tensor is then a view of the model's, and its offset and strides say which slice it fills.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from ringcore.checkpoint.quantization import GgufFormat
from ringcore.model_executor.linear_schemes.gguf_scheme import in_blocks
from ringcore.model_executor.models.transformers.operation_mode import OperationMode
from ringcore.model_executor.models.transformers.refusal import Refused
from ringcore.model_executor.weight import Arrangement, Uniform, Weight, WeightPart

__all__ = ["CheckpointNames", "Ranges", "TensorLayout", "read_layouts"]


@dataclass(frozen=True, slots=True)
class Ranges:
    """What a rank has of a tensor: ranges of entries along one dimension, (start, length), one after the other."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        length = sum(length for _, length in self.ranges)
        return (*whole[: self.dim], length, *whole[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class _Piece:
    checkpoint_name: str
    shape: tuple[int, ...]
    offset: int  # of its first row in the model's tensor, in rows of `TensorLayout.row_shape`


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor of the model: the checkpoint's tensors that it consists of, each a run of its rows."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[_Piece, ...]
    share: Ranges | None = None  # where a rank has only that
    dummy: tuple[float, float] | None = None  # range of dummy weights; None: that of a dense tensor of its name
    arrangement: Arrangement | None = None  # of a tensor that is one of the checkpoint's as it is: see `Weight`
    blocks: GgufFormat | None = None  # in which a GGUF file has all pieces, whose rows stay so

    @classmethod
    def of_one(
        cls,
        name: str,
        checkpoint_name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        dummy: tuple[float, float] | None = None,
        arrangement: Arrangement | None = None,
    ) -> Self:
        """A tensor that is one of the checkpoint's as it is."""
        return cls(name, shape, dtype, (_Piece(checkpoint_name, shape, 0),), dummy=dummy, arrangement=arrangement)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the checkpoint's tensors that it consists of."""
        return {piece.checkpoint_name: piece.shape for piece in self.pieces}

    @property
    def is_whole(self) -> bool:
        """Whether it is one tensor of the checkpoint as it is, so that a slice of it can be read."""
        return len(self.pieces) == 1 and self.pieces[0].shape == self.shape

    def weight(self) -> Weight:
        """All of it, or the rank's share."""
        return self._stored(self._dense())

    def _stored(self, dense: Weight) -> Weight:
        return dense if self.blocks is None else in_blocks(dense, self.blocks)

    def _dense(self) -> Weight:
        if self.share is not None:
            return self._sliced(self.share) if self.is_whole else self._stacked(self.share)
        if not self.shape:  # a number, which is read as one row
            name = self.pieces[0].checkpoint_name
            return Weight(self.name, (1,), self.dtype, (WeightPart(name, (), 0, 0, 1),), self._init)
        if self.is_whole:
            return self.slice(0, 0, self.shape[0])
        last = self.pieces[0].shape[1:]
        rows = math.prod(self.shape) // math.prod(last)
        parts = tuple(
            WeightPart(piece.checkpoint_name, piece.shape, 0, 0, piece.shape[0], piece.offset) for piece in self.pieces
        )
        return Weight(self.name, (rows, *last), self.dtype, parts, self._init)

    def elsewhere(self) -> list[Weight]:
        """The checkpoint's tensors that it consists of, where the rank has a share: of some it may have nothing."""
        if self.share is None:
            return []
        parts = tuple(WeightPart(one.checkpoint_name, one.shape, 0, 0, one.shape[0]) for one in self.pieces)
        return [self._stored(Weight(self.name, self.shape, self.dtype, parts, self._init))]

    def slice(self, dim: int, start: int, length: int) -> Weight:
        """Entries `start` to `start` + `length` along dim; of a whole tensor only."""
        return self._sliced(Ranges(dim, ((start, length),)))

    def _sliced(self, share: Ranges) -> Weight:
        assert self.is_whole, self
        name, parts, offset = self.pieces[0].checkpoint_name, [], 0
        for start, length in share.ranges:
            parts.append(WeightPart(name, self.shape, share.dim, start, length, offset))
            offset += length
        return Weight(self.name, share.shape(self.shape), self.dtype, tuple(parts), self._init, self.arrangement)

    def _stacked(self, share: Ranges) -> Weight:
        """Of a tensor that stacks pieces of its entries (experts): as rows, [the rank's, ...]."""
        own, inner = share.shape(self.shape), self.pieces[0].shape[1:]
        dim = len(self.shape) - len(inner) - 1  # along which the pieces are: theirs are the dimensions from it on
        parts: list[WeightPart] = []
        for piece in self.pieces:
            name, shape, (num_rows, *_) = piece.checkpoint_name, piece.shape, piece.shape
            entry, first = divmod(piece.offset, self.shape[dim])
            offset = 0  # of a range, in the rank's share
            for start, length in share.ranges:
                if share.dim > dim:
                    parts.append(WeightPart(name, shape, share.dim - dim, start, length, offset, row=piece.offset))
                elif share.dim < dim and start <= entry < start + length:
                    row = (offset + entry - start) * own[dim] + first
                    parts.append(WeightPart(name, shape, 0, 0, num_rows, row))
                elif share.dim == dim and (both := range(max(start, first), min(start + length, first + num_rows))):
                    row = entry * own[dim] + offset + both.start - start
                    parts.append(WeightPart(name, shape, 0, both.start - first, len(both), row))
                offset += length
        last = own[dim + 1 :]
        return Weight(self.name, (math.prod(own) // math.prod(last), *last), self.dtype, tuple(parts), self._init)

    @property
    def _init(self) -> Uniform:
        if self.dummy is not None:
            return Uniform(*self.dummy)
        if len(self.shape) > 1:
            return Uniform.of_fan_in(self.shape[-1])
        return Uniform(-0.05, 0.05) if self.name.endswith("bias") else Uniform(0.8, 1.2)


def read_layouts(model: PreTrainedModel, found: Collection[str] = ()) -> dict[str, TensorLayout]:
    """By name, of every tensor of a model on meta that a checkpoint has: not of those tied to another one.

    found: the names in the checkpoint. Where it has other ones than transformers would save (without the name of the
    body, or older ones), those are taken that transformers would load. Raises `Refused`.
    """
    tied = set(model.all_tied_weights_keys)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise Refused(f"its tensor {name!r} is of {tensor.dtype}, which is not loaded")
    with _ViewsForCopies():  # type: ignore[no-untyped-call]
        saved = revert_weight_conversion(model, dict(tensors))
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
    pieces: dict[str, list[_Piece]] = {name: [] for name in tensors}
    for checkpoint_name, view in saved.items():
        owner = owners.get(view.untyped_storage()._cdata)
        if owner is None or not view.is_contiguous() or not _has_rows_of(view, tensors[owner]):
            raise Refused(f"the checkpoint's tensor {checkpoint_name!r} has another layout than a slice of the model's")
        rows = view.storage_offset() // math.prod(view.shape[1:])
        pieces[owner].append(_Piece(checkpoint_name, tuple(view.shape), rows))
    layouts = {name: _checked(name, tensor, pieces[name]) for name, tensor in tensors.items()}
    if not found or all(name in found for name in saved):
        return layouts
    return layouts | _under_found_names(model, layouts, found)


class CheckpointNames:
    """The names that transformers gives the tensors of a checkpoint when it loads them into a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        self._converters = [one for one in mapping if isinstance(one, WeightConverter)]
        self._prefix, self._state = model.base_model_prefix, model.state_dict()

    def in_model(self, checkpoint_name: str) -> str:
        return self._renamed(checkpoint_name)[0]

    def of_whole(self, checkpoint_name: str) -> str | None:
        """None for a tensor that is converted, with others perhaps, before it is one of the model's."""
        name, pattern = self._renamed(checkpoint_name)
        return name if pattern is None else None

    def _renamed(self, checkpoint_name: str) -> tuple[str, str | None]:
        found: tuple[str, str | None] = rename_source_key(
            checkpoint_name, self._renamings, self._converters, self._prefix, self._state
        )
        return found


def _under_found_names(
    model: PreTrainedModel, layouts: Mapping[str, TensorLayout], found: Collection[str]
) -> dict[str, TensorLayout]:
    """The layouts of whole tensors that the checkpoint has under another name."""
    names, renamed = CheckpointNames(model), {}
    for other in found:
        layout = layouts.get(names.of_whole(other) or "")
        if layout is not None and layout.is_whole and layout.pieces[0].checkpoint_name not in found:
            renamed[layout.name] = replace(layout, pieces=(replace(layout.pieces[0], checkpoint_name=other),))
    return renamed


def _has_rows_of(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether the view consists of rows of the tensor: its last dimensions but the first are the tensor's."""
    num_inner = max(0, view.dim() - 1)
    return view.shape[view.dim() - num_inner :] == tensor.shape[tensor.dim() - num_inner :]


def _checked(name: str, tensor: torch.Tensor, pieces: Iterable[_Piece]) -> TensorLayout:
    """Its pieces in order; they must fill it."""
    ordered = tuple(sorted(pieces, key=lambda piece: piece.offset))
    same_rows = len({piece.shape[1:] for piece in ordered}) == 1
    end = 0
    for piece in ordered:
        same_rows = same_rows and piece.offset == end
        end += math.prod(piece.shape[:1])
    if not same_rows or end * math.prod(ordered[0].shape[1:]) != tensor.numel():
        raise Refused(f"the checkpoint's tensors do not fill the model's {name!r}")
    return TensorLayout(name, tuple(tensor.shape), tensor.dtype, ordered)


class _ViewsForCopies(OperationMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """A copy (of `contiguous`) is the tensor itself: nothing here has values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket is torch.ops.aten.clone:
            return torch.ops.aten.alias(args[0])
        return func(*args, **(kwargs or {}))
