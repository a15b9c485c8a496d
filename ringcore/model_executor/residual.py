"""The residual stream, and its deferred add."""

from __future__ import annotations

from typing import Protocol

import torch

from ringcore.kernels.partials import Partials
from ringcore.model_executor import ops

__all__ = ["Norm", "NormedRows", "Residual"]


class Norm(Protocol):
    """x / sqrt(mean(x^2) + eps) * gain of every row, which a product may compute as its prologue, or without a gain
    something else; `partials` are added to x first, in place."""

    eps: float

    @property
    def gain(self) -> torch.Tensor | None: ...  # [size]

    def __call__(self, x: torch.Tensor, partials: Partials | None = None, /) -> torch.Tensor: ...


class Residual:
    """Rows [n, size], to which every layer adds in place.

    A layer may defer its add, of the split-K partials of a product, of their norm, or of the weighted rows of experts:
    the next norm that reads the stream adds them in the same pass over memory, which saves a kernel.
    """

    __slots__ = ("_partials", "_rows")

    def __init__(self, rows: torch.Tensor) -> None:
        """rows: written in place from now on."""
        self._rows = rows
        self._partials: Partials | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> torch.Tensor:
        """[n, size], after any deferred add."""
        rows, partials = self.take()
        return rows if partials is None else ops.add_partials(rows, partials)

    @property
    def adds_norm(self) -> bool:
        """Whether what is deferred is the norm of partials."""
        return self._partials is not None and self._partials.norm is not None

    def defer_add(self, partials: Partials) -> None:
        """rows += the sum of partials, done by the next read of the stream; the caller must not write to them."""
        assert self._partials is None, "an add is already deferred: read the stream first"
        self._partials = partials

    def normed(self, norm: Norm) -> torch.Tensor:
        """The norm of all rows: [n, size], after any deferred add."""
        return norm(*self.take())

    def take(self) -> tuple[torch.Tensor, Partials | None]:
        """All rows before any deferred add, and its partials: the caller adds their sum to the rows, in place."""
        partials, self._partials = self._partials, None
        return self._rows, partials


class NormedRows:
    """The norm of a stream's rows, or rows as they are. A kernel that has the norm as its prologue reads the stream
    instead, and may fill in the rows for the next one; either is to be read before the stream changes."""

    def __init__(self, hidden: Residual, norm: Norm | None = None) -> None:
        self._hidden, self._norm = hidden, norm
        self._computed: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._hidden)

    @property
    def stream(self) -> tuple[torch.Tensor, tuple[torch.Tensor, float] | None]:
        """The rows before the norm, and its gain and eps; after the norm, and None, where it has no gain."""
        if self._norm is None or self._norm.gain is None:
            return self.rows, None
        return self._hidden.rows, (self._norm.gain, self._norm.eps)

    @property
    def rows(self) -> torch.Tensor:
        """[n, size], computed once."""
        if self._computed is None:
            self._computed = self._hidden.rows if self._norm is None else self._hidden.normed(self._norm)
        return self._computed

    def to_fill(self, dtype: torch.dtype) -> torch.Tensor:
        """The `rows` of dtype, which a kernel that reads `stream` is to write."""
        self._computed = torch.empty_like(self._hidden.rows, dtype=dtype)
        return self._computed
