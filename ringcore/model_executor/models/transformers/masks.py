"""What a mask lets a token see, read from the rule by which transformers makes it: all before it, a window, a chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ringcore.model_executor.models.transformers.known_values import KnownValues
from ringcore.model_executor.models.transformers.meta_shapes import MetaShapes
from ringcore.model_executor.models.transformers.needs import Need
from ringcore.model_executor.models.transformers.refusal import Refused

__all__ = ["MAX_ROW", "Mask", "Reach"]

MAX_ROW = 1 << 18  # positions that are looked at


class Reach(NamedTuple):
    """Which tokens a token sees beside itself: those before it, within a window or its chunk if there is one."""

    sliding_window: int | None = None
    chunk_size: int | None = None

    def first_seen(self, position: int) -> int:
        if self.chunk_size is not None:
            return position // self.chunk_size * self.chunk_size
        return 0 if self.sliding_window is None else position - self.sliding_window + 1


class Mask:
    """What stands for a mask in a recorded pass. Layers share it."""

    def __init__(self, allows: Callable[..., torch.Tensor], values: KnownValues, carried: Any = None) -> None:
        """allows: (batch, head, query position, key position) -> bool. values: of the tensors that it holds."""
        self.carried = carried  # to a model that hands down its mask alone
        self._allows, self._values = allows, values
        self._reach: Reach | None = None

    def __getitem__(self, index: Any) -> Mask:
        """Of all queries and keys, as Gemma 4 takes it before layers that have keys of others. Raises `Refused` for
        some of them."""
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, slice) and not part.start and part.stop is None for part in parts):
            raise Refused("its attention has a mask of some of its tokens", Need.KNOWN_MASK)
        return self

    def reach(self, num_positions: int) -> Reach:
        """Raises `Refused` for a mask that is not causal, within a window or chunks where it has them."""
        if self._reach is None:
            self._reach = self._find_reach(min(num_positions, MAX_ROW))
        return self._reach

    def _find_reach(self, length: int) -> Reach:
        keys = torch.arange(length)
        edge = int(self._allowed(keys, torch.zeros((), dtype=torch.long), length).sum())  # the first that misses key 0
        if edge == length:
            reach = Reach()
        elif edge > 1 and not self._row(edge, length)[1]:
            reach = Reach(chunk_size=edge)
        else:
            reach = Reach(sliding_window=edge)
        near = {edge * times + more for times in (1, 2, 3) for more in (-1, 0, 1)}
        rows = [row for row in {0, 1, 2, 3 * edge // 2, length // 2, length - 1} | near if 0 <= row < length]
        expected = {row: (keys <= row) & (keys >= reach.first_seen(row)) for row in rows}
        if edge == 0 or not all(torch.equal(self._row(row, length), sees) for row, sees in expected.items()):
            raise Refused(
                "its attention has a mask that is neither causal, nor a sliding window or chunks", Need.KNOWN_MASK
            )
        return reach

    def _row(self, query: int, length: int) -> torch.Tensor:
        return self._allowed(torch.tensor(query), torch.arange(length), length)

    def _allowed(self, query: torch.Tensor, key: torch.Tensor, length: int) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.long)
        try:
            with MetaShapes(), self._values:
                found = self._allows(zero, zero, self._values.known(query), self._values.known(key))
        except Exception as error:  # whatever a rule raises at positions outside of the tensors that it holds
            raise Refused("its attention has a mask that depends on more than positions", Need.KNOWN_MASK) from error
        value = self._values.value_of(torch.as_tensor(found))
        if value is None:
            raise Refused("its attention has a mask that depends on more than positions", Need.KNOWN_MASK)
        return value.expand(length)
