"""The residual stream, and its deferred split-K partials."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Norm", "Residual"]


class Norm(Protocol):
    """x / sqrt(mean(x^2) + eps) * gain of every row, which a product may compute as its prologue, or without a gain
    something else; the sum of `partials` is added to x first, in place."""

    eps: float

    @property
    def gain(self) -> torch.Tensor | None: ...  # [size]

    def __call__(self, x: torch.Tensor, partials: torch.Tensor | None = None, /) -> torch.Tensor: ...


class Residual:
    """Rows [n, size], to which every layer adds in place.

    A linear may defer the add of its split-K partials: the next norm that reads the stream reduces them in the same
    pass over memory, which saves a reduction kernel.
    """

    __slots__ = ("_partials", "_rows")

    def __init__(self, rows: torch.Tensor) -> None:
        """rows: written in place from now on."""
        self._rows = rows
        self._partials: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> torch.Tensor:
        """[n, size], after any deferred add."""
        if self._partials is not None:
            self._rows.add_(self._partials.sum(0))
            self._partials = None
        return self._rows

    def defer_add(self, partials: torch.Tensor) -> None:
        """rows += the sum of partials [p, n, size], done by the next read of the stream; the caller must not write to
        partials."""
        assert self._partials is None, "an add is already deferred: read the stream first"
        self._partials = partials

    def normed(self, norm: Norm) -> torch.Tensor:
        """The norm of all rows: [n, size], after any deferred add."""
        partials, self._partials = self._partials, None
        return norm(self._rows, partials)
