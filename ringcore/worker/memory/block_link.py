"""The interface of copies of blocks between the pages and host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ringcore.worker.memory.block_pages import BlockPages

__all__ = ["BlockLink", "LocalBlockLink"]

_AT_ONCE_BYTES = 16 << 20


class BlockLink(ABC):
    """Copies between blocks and places, uint8 [block_bytes] of host memory each, beside the steps of the thread that
    calls it. All methods are called by that thread.

    A save is ordered before the next step, and reads what the steps have written whose output the engine has. A load
    reads what all saves before it have written, overwrites nothing that they still read, and is ordered after all steps
    launched so far; the steps after it do not wait for it.
    """

    wants_registered: ClassVar[bool]  # whether places have to be in registered memory

    def __init__(self, pages: BlockPages) -> None:
        self.pages = pages

    @abstractmethod
    def register(self, memory: torch.Tensor) -> None:
        """Pins host memory. Raises `CapacityError` or RuntimeError."""

    @abstractmethod
    def unregister(self, memory: torch.Tensor) -> None:
        """Undoes one `register`; every copy has ended."""

    @abstractmethod
    def save(self, block_ids: Sequence[int], places: Sequence[torch.Tensor]) -> Any:
        """Starts copies of blocks to places, at least one; -> a token of their end."""

    @abstractmethod
    def load(self, places: Sequence[torch.Tensor], block_ids: Sequence[int]) -> Any:
        """Starts copies of places to blocks, at least one; -> a token of their end."""

    @abstractmethod
    def is_done(self, token: Any) -> bool: ...

    @abstractmethod
    def finish(self) -> None:
        """Waits for all copies."""


class LocalBlockLink(BlockLink):
    """The pages are in host memory: copies are synchronous."""

    wants_registered: ClassVar[bool] = False

    def register(self, memory: torch.Tensor) -> None:
        """A no-op."""

    def unregister(self, memory: torch.Tensor) -> None:
        """A no-op."""

    def save(self, block_ids: Sequence[int], places: Sequence[torch.Tensor]) -> None:
        for begin, end in self._parts(len(places)):
            staging = torch.empty((end - begin, self.pages.block_bytes), dtype=torch.uint8)
            self.pages.gather(torch.tensor(block_ids[begin:end]), staging)
            for place, block in zip(places[begin:end], staging, strict=True):
                place.copy_(block)

    def load(self, places: Sequence[torch.Tensor], block_ids: Sequence[int]) -> None:
        for begin, end in self._parts(len(places)):
            self.pages.scatter(torch.tensor(block_ids[begin:end]), torch.stack(list(places[begin:end])))

    def _parts(self, count: int) -> list[tuple[int, int]]:
        size = max(1, _AT_ONCE_BYTES // self.pages.block_bytes)
        return [(at, min(at + size, count)) for at in range(0, count, size)]

    def is_done(self, token: Any) -> bool:
        return True

    def finish(self) -> None:
        """A no-op."""
