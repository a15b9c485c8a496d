"""A model's weights as data: final tensors, and the checkpoint slices that fill them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np
import torch

from ringcore.checkpoint.quantization import GgufFormat
from ringcore.checkpoint.safetensors_header import DTYPE_NAMES
from ringcore.kernels.dtypes import TORCH_DTYPES
from ringcore.kernels.launch.upload import upload
from ringcore.model_executor import ops

__all__ = [
    "CHECKPOINT_DTYPES",
    "Arrangement",
    "Derived",
    "RowEncoding",
    "SeenTensors",
    "Tensors",
    "Uniform",
    "Weight",
    "WeightPart",
    "WeightedLayer",
    "is_readable",
]

# By their names in safetensors.
CHECKPOINT_DTYPES: Mapping[str, torch.dtype] = {code: TORCH_DTYPES[name] for code, name in DTYPE_NAMES.items()}
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # numbers as they are


def is_readable(stored: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a checkpoint's tensor of dtype `stored` may fill one of `dtype`: plain floats are converted; codes, which
    mean something with their scales alone, are taken as they are."""
    return stored == dtype or (stored in _PLAIN and dtype in _PLAIN)


@dataclass(frozen=True, slots=True)
class Uniform:
    """The distribution of dummy weights, between two numbers; of an integer dtype, rounded towards 0."""

    low: float
    high: float

    @classmethod
    def of_fan_in(cls, num_inputs: int) -> Self:
        """Of a matrix: activations and logits have the magnitude of a trained model."""
        bound = math.sqrt(3 / num_inputs)
        return cls(-bound, bound)


class Tensors(Protocol):
    """Loaded tensors by `Weight.name`, each popped once: a dict, or one that reads a tensor when it is popped."""

    def pop(self, name: str, /) -> torch.Tensor: ...

    def __len__(self) -> int: ...


class SeenTensors:
    """Tensors that tell the device of those that were popped."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.device: torch.device

    def __len__(self) -> int:
        return len(self._tensors)

    def pop(self, name: str, /) -> torch.Tensor:
        tensor = self._tensors.pop(name)
        self.device = tensor.device
        return tensor


class RowEncoding(Protocol):
    """Turns rows of the checkpoint's numbers into those of the final tensor, each by itself."""

    @property
    def dtype(self) -> torch.dtype:
        """That the checkpoint's numbers must be convertible to."""

    def __call__(self, rows: torch.Tensor, /) -> torch.Tensor:
        """[n, numbers] -> [n, entries], of the final tensor's dtype."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A slice of one checkpoint tensor and its place in the final one.

    Entries `start` to `start + length` along `dim` of the checkpoint tensor become entries `offset` to `offset +
    length` along `dim` of the final one. `length` is 0 if the rank has no share of the tensor.

    `order`, if given, is a permutation along `dim`, applied to every run of len(order) entries: entry i of a run is
    entry order[i] of that run in the checkpoint.

    `encoding`, if given, computes a final row from the slice of a row of the checkpoint: the part is of whole rows of
    the final tensor.

    `blocks`, if given, is the format of a GGUF file's rows: a final row is the bytes of the slice as that file has
    them. The slice is of whole blocks.

    `row`, if given, is where the slice begins along the first dimension of a final tensor that stacks several
    checkpoint tensors there, while `dim` is another one.
    """

    checkpoint_name: str
    checkpoint_shape: tuple[int, ...]  # whole: [out] or [out, in]
    dim: int
    start: int
    length: int
    offset: int = 0
    order: tuple[int, ...] | None = None
    encoding: RowEncoding | None = None
    row: int | None = None
    blocks: GgufFormat | None = None

    def __post_init__(self) -> None:
        assert self.row is None or self.dim > 0, self
        if self.order is not None:
            assert self.length % len(self.order) == 0, self
            assert sorted(self.order) == list(range(len(self.order))), self

    @property
    def has_other_rows(self) -> bool:
        """Whether a final row has another length than the slice of the checkpoint's."""
        return self.encoding is not None or self.blocks is not None

    @property
    def run(self) -> int:
        """Rows that must be read together."""
        return 1 if self.order is None or self.dim != 0 else len(self.order)

    def dtype_for(self, out: torch.Tensor) -> torch.dtype:
        """That the checkpoint's tensor must be convertible to, to fill `out`."""
        return out.dtype if self.encoding is None else self.encoding.dtype

    def shape_for(self, out: torch.Tensor) -> tuple[int, ...]:
        """Of the slice of the checkpoint's tensor that fills `out`, rows of the final one."""
        if self.encoding is None:
            return tuple(out.shape)
        return len(out), self.checkpoint_shape[1] if self.dim == 0 else self.length

    def final(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the part as the checkpoint has them -> as the final tensor does. Their number is a multiple of
        `run`."""
        return self.encoded(self.ordered(rows))

    def encoded(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.encoding is None else self.encoding(rows)

    def ordered(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, ...] of the part in checkpoint order -> in that of the final tensor. n is a multiple of `run`."""
        if self.order is None:
            return rows
        dim, shape = self.dim, rows.shape
        runs = rows.reshape(*shape[:dim], -1, len(self.order), *shape[dim + 1 :])
        return runs.index_select(dim + 1, _index(self.order, rows.device)).flatten(dim, dim + 1)

    def pieces(self, out: torch.Tensor, max_bytes: int) -> Iterator[tuple[WeightPart, torch.Tensor]]:
        """The part as several of about `max_bytes`, each with its rows of `out`, the part's place in the final tensor.

        A column slice stays whole: a WeightPart cannot describe a subset of its rows.
        """
        if self.dim != 0:
            yield self, out
            return
        num_rows = max(1, max_bytes * len(out) // max(1, out.nbytes))
        num_rows = -(-num_rows // self.run) * self.run
        for first in range(0, len(out), num_rows):
            rows = out[first : first + num_rows]
            yield replace(self, start=self.start + first, length=len(rows)), rows


def _index(order: Sequence[int], device: torch.device) -> torch.Tensor:
    """[n] int64. To a GPU from pinned memory, so that the host does not wait for earlier work of the device."""
    return upload(np.array(order), device)


class Arrangement(ABC):
    """Another order of a tensor's bytes than the checkpoint's, for kernels."""

    def is_used_on(self, device: torch.device) -> bool:
        """Whether tensors on `device` have it, except while an update writes to them."""
        return ops.has_kernels(device)

    @abstractmethod
    def arrange(self, tensor: torch.Tensor) -> None:
        """In place, once the tensor is complete."""

    @abstractmethod
    def restore(self, tensor: torch.Tensor) -> None:
        """In place: as before `arrange`, of what means something."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the model on this rank. Entries that no part fills (vocabulary padding) are zero.

    arrangement: that it has on a device where it is used.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[WeightPart, ...]
    init: Uniform
    arrangement: Arrangement | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def num_filled(self) -> int:
        """Leading entries that the parts fill along their dimension; the rest is zero."""
        first = self.parts[0]
        if first.row is not None or (first.has_other_rows and first.dim != 0):
            return self.shape[self.parts[0].dim]
        return sum(part.length for part in self.parts)

    @property
    def is_filled(self) -> bool:
        return self.num_filled == self.shape[self.parts[0].dim]

    @property
    def checkpoint_dtype(self) -> torch.dtype:
        """That the checkpoint's tensors must be convertible to."""
        encoding = self.parts[0].encoding
        return self.dtype if encoding is None else encoding.dtype

    def arrangement_on(self, device: torch.device) -> Arrangement | None:
        return self.arrangement if self.arrangement is not None and self.arrangement.is_used_on(device) else None

    def places(self, tensor: torch.Tensor) -> Iterator[tuple[WeightPart, torch.Tensor]]:
        """Each non-empty part with its place in `tensor`, the final one."""
        for part in self.parts:
            if not part.length:
                continue
            rows = tensor if part.row is None else tensor.narrow(0, part.row, part.checkpoint_shape[0])
            is_whole = part.has_other_rows and part.dim != 0  # of as many entries as its rows have
            yield part, rows if is_whole else rows.narrow(part.dim, part.offset, part.length)


class WeightedLayer(ABC):
    """A layer with weights: declares them, binds them, and recomputes what it derives from them."""

    @abstractmethod
    def weights(self) -> Sequence[Weight]: ...

    def elsewhere(self) -> Sequence[Weight]:
        """Tensors of the checkpoint that belong to the layer and of which this rank has nothing."""
        return []

    @abstractmethod
    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        """Pops its tensors from `tensors`. updatable: they keep their addresses for the life of the model and their
        contents may be updated in place: the layer computes from them, not from a packed copy."""

    def refresh(self) -> None:  # noqa: B027 - most derive nothing
        """The contents of the bound tensors have changed: recomputes what was derived from them, at the same
        addresses."""


class Derived:
    """Tensors that a layer computes from its weights, in the order of their creation."""

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []

    def make(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of `compute` now; `refresh` copies its result of then into the same tensor."""
        tensor = compute()
        self._made.append((tensor, compute))
        return tensor

    def refresh(self) -> None:
        for tensor, compute in self._made:
            tensor.copy_(compute())
