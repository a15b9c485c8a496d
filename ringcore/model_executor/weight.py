"""What a model needs loaded, as data: final tensors, and the checkpoint slices that fill them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

__all__ = ["Init", "Tensors", "Weight", "WeightPart"]

# What dummy weights look like: a matrix, small biases, or norm weights near 1.
Init = Literal["matrix", "bias", "norm"]


class Tensors(Protocol):
    """Loaded tensors by `Weight.name`, to be taken out once each: a dict, or one that reads what is taken."""

    def pop(self, name: str, /) -> torch.Tensor: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A slice of one checkpoint tensor and its place in the final one.

    Entries `start` to `start + length` along `dim` of the checkpoint tensor become entries `offset` to
    `offset + length` along `dim` of the final one. `length` is 0 where a rank has nothing of a tensor.
    """

    checkpoint_name: str
    checkpoint_shape: tuple[int, ...]  # whole: [out] or [out, in]
    dim: int
    start: int
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the model on this rank. What its parts leave out (padding of the vocabulary) is zero."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[WeightPart, ...]
    init: Init

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize
