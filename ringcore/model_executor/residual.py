"""The residual stream, and what is still to be added to it."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Norm", "Residual"]


class Norm(Protocol):
    """x / sqrt(mean(x^2) + eps) * gain of every row, to which the sum of partials is added first, in place."""

    eps: float

    @property
    def gain(self) -> torch.Tensor: ...  # [size]

    def __call__(self, x: torch.Tensor, partials: torch.Tensor | None = None, /) -> torch.Tensor: ...


class Residual:
    """Rows [n, size], to which every layer adds in place.

    A matrix product may leave its result in partials instead: the norm that reads the stream next adds them up in the
    same pass over memory, and a kernel that does nothing else is saved.
    """

    __slots__ = ("_partials", "_rows")

    def __init__(self, rows: torch.Tensor) -> None:
        """rows: written to from now on."""
        self._rows = rows
        self._partials: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> torch.Tensor:
        """[n, size], all in it."""
        if self._partials is not None:
            self._rows.add_(self._partials.sum(0))
            self._partials = None
        return self._rows

    def defer_add(self, partials: torch.Tensor) -> None:
        """rows += the sum of partials [p, n, size], by whoever reads them next; nobody else may write to partials."""
        assert self._partials is None, "read before it is added to again"
        self._partials = partials

    def normed(self, norm: Norm) -> torch.Tensor:
        """The norm of all rows: [n, size]."""
        partials, self._partials = self._partials, None
        return norm(self._rows, partials)
