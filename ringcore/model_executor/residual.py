"""The residual stream, and what is still to be added to it."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Norm", "Residual"]


class Norm(Protocol):
    """x / sqrt(mean(x^2) + eps) * gain of every row, to which the sum of parts is added first, in place."""

    eps: float

    @property
    def gain(self) -> torch.Tensor: ...  # [size]

    def __call__(self, x: torch.Tensor, parts: torch.Tensor | None = None, /) -> torch.Tensor: ...


class Residual:
    """Rows [n, size], to which every layer adds in place.

    A matrix product may leave its result in parts instead: the norm that reads the stream next adds them up in the
    same pass over memory, and a kernel that does nothing else is saved.
    """

    __slots__ = ("_parts", "_rows")

    def __init__(self, rows: torch.Tensor) -> None:
        """rows: written to from now on."""
        self._rows = rows
        self._parts: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> torch.Tensor:
        """[n, size], all in it."""
        if self._parts is not None:
            self._rows.add_(self._parts.sum(0))
            self._parts = None
        return self._rows

    def leave(self, parts: torch.Tensor) -> None:
        """rows += the sum of parts [p, n, size], by whoever reads them next; nobody else may write to parts."""
        assert self._parts is None, "read before it is added to again"
        self._parts = parts

    def normed(self, norm: Norm) -> torch.Tensor:
        """The norm of all rows: [n, size]."""
        parts, self._parts = self._parts, None
        return norm(self._rows, parts)
