"""The interface of a store of KV beyond the device."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ringcore.protocol.stored_kv import KVTransfers, LevelCounts

__all__ = ["KVConnector"]

_POLL_S = 1e-4


class KVConnector(ABC):
    """One rank's store of blocks by name. The engine keeps the books (`kv_cache/block_store.py`): it says what to drop,
    and never has more saved than was agreed at the start. No method waits for a copy. All are called by the thread that
    launches the steps, in the order of the messages.

    A store may lose a block at any time, and never gives another one: a load then answers False for it, and the engine
    computes it again.
    """

    @abstractmethod
    def held(self) -> list[bytes]:
        """The names of what it has at the start, the least recently used first."""

    @abstractmethod
    def drop(self, names: Sequence[bytes]) -> None:
        """Forgets these, whether it has them or not."""

    @abstractmethod
    def save(self, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Reads these blocks before the next step writes to them."""

    @abstractmethod
    def load(self, number: int, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Begins to write these blocks, after the steps launched so far. No step uses them before `result` is known."""

    @abstractmethod
    def result(self, number: int) -> list[bool] | None:
        """Of a load, in the order of its names, which blocks have their contents; None while it is in progress. It does
        not change any more."""

    @abstractmethod
    def forget_results(self, before: int) -> None:
        """The results of loads with lower numbers are not asked for again."""

    @abstractmethod
    def counts(self) -> LevelCounts:
        """What came of loads and saves since the start, by level."""

    @abstractmethod
    def close(self) -> None:
        """Waits for copies, never for long for anything else, and frees everything. Idempotent."""

    @torch.inference_mode()
    def transfer(self, transfers: KVTransfers) -> None:
        """What a message says, before its step is launched."""
        if transfers.drops:
            self.drop(transfers.drops)
        if transfers.save_names:
            self.save(transfers.save_names, transfers.save_block_ids.tolist())
        for load in transfers.loads:
            self.load(load.number, load.names, load.block_ids.tolist())

    @torch.inference_mode()
    def results(self, numbers: Sequence[int], wait_s: float) -> list[list[bool] | None]:
        """`result` of each, of all that are in flight. Waits up to wait_s seconds for one to end."""
        self.forget_results(min(numbers, default=0))
        deadline = time.monotonic() + wait_s
        while not any(results := [self.result(number) for number in numbers]) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return results
