"""In-place weight updates: new contents for the tensors of a model, by a checkpoint's names, fused and sharded for one
rank.

No tensor moves: CUDA graphs that hold their addresses stay valid.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ringcore.checkpoint.expected_tensors import and_more, is_dispensable
from ringcore.checkpoint.quantization import GgufFormat
from ringcore.errors import InvalidRequestError
from ringcore.kernels.dtypes import TORCH_DTYPES
from ringcore.model_executor.loader import Readers
from ringcore.model_executor.tensor_source import TensorSource
from ringcore.model_executor.weight import Arrangement, Uniform, Weight, WeightPart, is_readable

__all__ = ["WeightUpdate", "row_pieces"]

_PIECE_BYTES = 64 << 20  # of a tensor that are sliced, converted and reordered at a time


def row_pieces(shape: Sequence[int], itemsize: int, max_bytes: int = _PIECE_BYTES) -> Iterator[tuple[int, int]]:
    """(first row, end row) of pieces of a tensor of at most `max_bytes`, or of one row."""
    num_rows = max(1, max_bytes // max(1, math.prod(shape[1:]) * itemsize))
    for first in range(0, shape[0], num_rows):
        yield first, min(first + num_rows, shape[0])


@dataclass(slots=True)
class _Target:
    """The places that one checkpoint tensor fills on this rank."""

    shape: tuple[int, ...]  # of the whole checkpoint tensor
    dtype: torch.dtype  # that it must be convertible to
    blocks: GgufFormat | None  # in which it must be
    places: list[tuple[WeightPart, torch.Tensor, Uniform]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(out.nbytes for _, out, _ in self.places)


class WeightUpdate:
    """One update of one rank's weights: any number of tensors, in any order, by their names in a checkpoint.

    Only this rank's slices of a tensor are read. A tensor that does not fit the model is refused before anything of it
    is written; earlier tensors stay written.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        tensors: Mapping[str, torch.Tensor],
        elsewhere: Sequence[Weight] = (),
        abandoned: WeightUpdate | None = None,
    ) -> None:
        """tensors: the model's own, by `Weight.name`. Entries that no checkpoint tensor fills are zeroed. elsewhere:
        those of other stages: every rank refuses the same tensors, and waits for the same ones. abandoned: the update
        before, where `finish` was not called."""
        self._device = next(iter(tensors.values())).device
        self._targets: dict[str, _Target] = {}
        self._restored: list[tuple[Arrangement, torch.Tensor]] = []
        for weight in weights:
            arrangement = weight.arrangement_on(self._device)
            if arrangement is not None:
                self._restored.append((arrangement, tensors[weight.name]))
                if abandoned is None:
                    arrangement.restore(tensors[weight.name])
        for weight in weights:
            padding = slice(weight.num_filled, None)
            tensors[weight.name].movedim(weight.parts[0].dim, 0)[padding].zero_()  # sleep discards the contents
            for part in weight.parts:
                self._targets.setdefault(part.checkpoint_name, _target_of(part, weight))
            for part, out in weight.places(tensors[weight.name]):
                self._targets[part.checkpoint_name].places.append((part, out, weight.init))
        for weight in elsewhere:
            for part in weight.parts:
                self._targets.setdefault(part.checkpoint_name, _target_of(part, weight))
        self._taken: set[str] = set()

    @property
    def names(self) -> Collection[str]:
        """Of the checkpoint's tensors that the model has."""
        return self._targets.keys()

    @property
    def num_taken(self) -> int:
        """Checkpoint tensors received so far."""
        return len(self._taken)

    def check(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, kind: str | None = None) -> bool:
        """Whether the model uses this tensor; False for one that no model needs. dtype: None if not known. kind: its
        GGML type in a GGUF file.

        Raises `InvalidRequestError` for a name, a shape or a dtype that does not fit the model.
        """
        target = self._targets.get(name)
        if target is None:
            if is_dispensable(name):
                return False
            raise _refused(name, "has no place in the model; give the tensors of a checkpoint of this very model")
        if target.blocks is not None and kind != target.blocks.kind:
            raise _refused(
                name,
                f"is held as {target.blocks.kind} of a GGUF file, and comes as {kind or 'numbers'}; start with "
                "gguf_weights='expanded' for updates",
            )
        if tuple(shape) != target.shape:
            raise _refused(
                name,
                f"has the shape {list(shape)}, the model's is {list(target.shape)}; give it whole, as in a checkpoint",
            )
        if dtype is not None and not is_readable(dtype, target.dtype):
            fitting = [key for key, given in TORCH_DTYPES.items() if is_readable(given, target.dtype)]
            raise _refused(name, f"is {str(dtype).removeprefix('torch.')}; give it in {', '.join(fitting)}")
        return True

    def take(self, name: str, tensor: torch.Tensor) -> int:
        """Copies this rank's slices out of a whole tensor, on any device; -> the bytes written.

        On a GPU, on the current stream. Raises as `check`.
        """
        if not self.check(name, tensor.shape, tensor.dtype):
            return 0
        pieces = row_pieces(tensor.shape, tensor.itemsize)
        return self.take_rows(name, ((first, tensor[first:end]) for first, end in pieces))

    def take_rows(self, name: str, pieces: Iterator[tuple[int, torch.Tensor]]) -> int:
        """As `take`, of a tensor that passed `check` and arrives in pieces: (index of the first row, rows), all of
        them.

        A piece is copied, on the current stream, before the next one is requested.
        """
        target = self._targets[name]
        for first, rows in pieces:
            for part, out, _ in target.places:
                _write(part, out, first, rows)
        self._taken.add(name)
        return target.nbytes

    def read(self, source: TensorSource) -> tuple[int, int]:
        """Reads this rank's slices of all tensors of a source, in several threads; -> (tensors, bytes written).

        On a GPU the writes are ordered before what is launched on the current stream afterwards. Raises as `check`,
        before anything is read, and `ModelLoadError` if a file does not hold what its header says.
        """
        assert source.shapes is not None, "a source of any tensor has no end"
        names = [name for name, shape in source.shapes.items() if self.check(name, shape, kind=source.kinds.get(name))]
        readers = Readers(source, self._device)
        try:
            targets = [self._targets[name] for name in names]
            reads = [
                read
                for target in targets
                for part, out, init in target.places
                for read in readers.read([(part, out)], init)
            ]
            for read in reads:
                read.result().wait()
        finally:
            readers.close()
        self._taken.update(names)
        return len(names), sum(target.nbytes for target in targets)

    def finish(self) -> None:
        """Gives the tensors the arrangements back that they had before this update: the last call."""
        for arrangement, tensor in self._restored:
            arrangement.arrange(tensor)

    def check_complete(self) -> None:
        """Raises `InvalidRequestError` naming the tensors that were not received."""
        missing = [name for name in self._targets if name not in self._taken]
        if missing:
            raise _refused(missing[0], f"has not come{and_more(missing)}; every tensor of the model is needed")


def _target_of(part: WeightPart, weight: Weight) -> _Target:
    return _Target(part.checkpoint_shape, weight.checkpoint_dtype, part.blocks)


def _write(part: WeightPart, out: torch.Tensor, first: int, rows: torch.Tensor) -> None:
    """Copies a part's share of rows `first`, `first` + 1, ... of the checkpoint tensor into the part's place."""
    if part.dim != 0:
        out[first : first + len(rows)].copy_(part.final(rows.narrow(part.dim, part.start, part.length)))
        return
    begin, end = max(first, part.start), min(first + len(rows), part.start + part.length)
    if begin >= end:
        return
    rows = rows[begin - first : end - first]
    at = begin - part.start
    if part.encoding is not None:
        rows = part.encoded(rows.to(out.device))
    if part.order is None:
        out[at : at + len(rows)].copy_(rows)
        return
    # Pieces may end within a run, so the permutation is applied row by row.
    place_in_run = torch.tensor(part.order).argsort()
    numbers = torch.arange(at, at + len(rows))
    places = numbers - numbers % part.run + place_in_run[numbers % part.run]
    rows = rows.to(out.device, out.dtype)
    if out.itemsize == 1:  # torch copies no FP8 by an index
        out, rows = out.view(torch.uint8), rows.view(torch.uint8)
    out.index_copy_(0, places.to(out.device), rows)


def _refused(name: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"tensor {name!r} {reason}", field="tensor", value=name)
