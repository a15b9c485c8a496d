"""The host stores, which hold the contents of device memory during sleep.

    empty --save--> kept --restore--> kept --drop--> empty        a store holds one tensor, and is reusable

The copies that `save` and `restore` start are complete after `finish`. Allocating a store's memory takes longer than a
copy, so it is allocated once, in the background; a failure there is retried, and raised, when the store is needed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from ringcore.errors import CapacityError
from ringcore.host.byte_sizes import format_bytes
from ringcore.worker.memory.host_link import HostLink
from ringcore.worker.memory.host_memory import HugePages

__all__ = ["HostBudget", "HostStore", "MemoryStore"]

_log = logging.getLogger(__name__)

_TIMEOUT_S = 300.0  # longer means that it hangs: 16 GiB take a second
_PIECE_BYTES = 64 << 20  # populated at once
_COPY_BYTES = 256 << 20  # copies above 64 MiB reach the link's bandwidth
_MAX_THREADS = 16
_BACKGROUND_SHARE = 4  # 1/4 of the cores: the others compile kernels and read weights at the same time


@dataclass(frozen=True, slots=True)
class HostBudget:
    """The host memory that one of the ranks of a host may allocate."""

    free_bytes: Callable[[], int]  # now, for this process
    num_ranks: int  # ranks that allocate at the same time

    def check(self, num_bytes: int, left: int, in_flight: int) -> None:
        """Raises `CapacityError` where the remaining `left` of `num_bytes` exceed the free memory less what every rank
        may be allocating concurrently, at most `in_flight` each: the kernel overcommits, and kills a process later."""
        free = self.free_bytes()
        needed = left + self.num_ranks * min(in_flight, num_bytes)
        if needed > free:
            raise CapacityError(
                f"sleep: {format_bytes(num_bytes)} of weights have to be kept in host memory; that needs "
                f"{format_bytes(needed)}, {format_bytes(free)} are free; end what else uses this host's memory, "
                "give sleep_directory, a directory with room for them, or sleep with level=2",
                needed_bytes=needed,
                available_bytes=free,
            )


class HostStore(ABC):
    """A store of `num_bytes`. All methods are called by one thread."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._making: Future[None] | None = None
        self._is_closing = threading.Event()

    def allocate_in_background(self) -> None:
        """Starts a thread that allocates what `save` needs. A failure is logged."""
        self._begin(is_awaited=False)

    def _begin(self, *, is_awaited: bool) -> Future[None]:
        assert self._making is None, "the allocation is already in progress"
        making = self._making = Future()
        # The CUDA runtime keeps the last error per thread: in a thread of its own it does not affect others.
        threading.Thread(target=self._run, args=(making, is_awaited), name="host store", daemon=True).start()
        return making

    def _run(self, making: Future[None], is_awaited: bool) -> None:
        started = time.monotonic()
        try:
            self._allocate(is_awaited)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # their locals hold memory, and the error may outlive this call
            if not self._is_closing.is_set():
                _log.warning("no room to keep weights in while the engine sleeps: %s; sleep tries again", error)
            making.set_exception(error)
        else:
            _log.info("host store of %.2f GiB allocated in %.2f s", self.num_bytes / 2**30, time.monotonic() - started)
            making.set_result(None)

    def ready(self) -> None:
        """Waits until `save` can start; a failed background allocation is retried once.

        Raises `CapacityError` where memory is short, RuntimeError where it takes too long.
        """
        making = self._making
        if making is None or (making.done() and making.exception() is not None):
            self._making = None
            making = self._begin(is_awaited=True)
        self._await(making)

    def _await(self, making: Future[None]) -> None:
        try:
            making.result(_TIMEOUT_S)
        except TimeoutError as error:
            if making.done():
                raise  # raised by the allocation itself
            raise RuntimeError(f"the memory to keep weights in is not allocated after {_TIMEOUT_S:.0f} s") from error

    @abstractmethod
    def _allocate(self, is_awaited: bool) -> None:
        """Allocates all that `save` needs, or nothing. Stops early, with any error, once `_is_closing`. is_awaited:
        `ready` waits for it, so that it may use all cores."""

    @abstractmethod
    def save(self, contents: torch.Tensor) -> None:
        """Starts to copy `contents`, uint8 [num_bytes] on the device, which must not change until `finish`.

        Raises `CapacityError`; then the store stays empty.
        """

    @abstractmethod
    def restore(self, out: torch.Tensor, at: int) -> None:
        """Starts to copy the kept bytes from `at` on to `out`, uint8 on the device: all of them or a part."""

    @abstractmethod
    def finish(self) -> None:
        """Waits for the copies that were started."""

    @abstractmethod
    def drop(self) -> None:
        """Discards the kept contents."""

    def close(self) -> None:
        """Frees everything. Idempotent."""
        self._is_closing.set()
        making, self._making = self._making, None
        if making is not None:
            making.exception(_TIMEOUT_S)
        self._close()

    @abstractmethod
    def _close(self) -> None: ...


class MemoryStore(HostStore):
    """In one allocation of host memory. Where the link wants it pinned, it stays allocated for the life of the store.
    Otherwise pages are allocated on write, and returned to the host by `drop`."""

    def __init__(self, num_bytes: int, link: HostLink, budget: HostBudget) -> None:
        super().__init__(num_bytes)
        self._link, self._budget = link, budget
        self._pages: HugePages | None = None

    def _allocate(self, is_awaited: bool) -> None:
        pages = HugePages(self.num_bytes)
        if self._link.wants_registered:
            cores = len(os.sched_getaffinity(0)) // self._budget.num_ranks
            num_threads = min(_MAX_THREADS, max(1, cores if is_awaited else cores // _BACKGROUND_SHARE))

            def may_take(left: int) -> bool:
                self._budget.check(self.num_bytes, left, num_threads * _PIECE_BYTES)
                return not self._is_closing.is_set()

            if not pages.populate(num_threads, _PIECE_BYTES, may_take):
                raise RuntimeError("the store is closed")
            self._link.register(pages.tensor)
        self._pages = pages

    def _memory(self) -> torch.Tensor:
        assert self._pages is not None, "the store is not ready"
        return self._pages.tensor

    def save(self, contents: torch.Tensor) -> None:
        assert len(contents) == self.num_bytes, (len(contents), self.num_bytes)
        self._copy(contents, self._memory(), is_new=not self._link.wants_registered)

    def restore(self, out: torch.Tensor, at: int) -> None:
        assert 0 <= at <= at + len(out) <= self.num_bytes, (at, len(out), self.num_bytes)
        self._copy(self._memory()[at : at + len(out)], out, is_new=False)

    def _copy(self, source: torch.Tensor, out: torch.Tensor, *, is_new: bool) -> None:
        """is_new: the copy allocates the pages of `out`."""
        size = _PIECE_BYTES if is_new else _COPY_BYTES
        try:
            for at in range(0, len(source), size):
                if is_new:
                    self._budget.check(self.num_bytes, self.num_bytes - at, size)
                self._link.copy(source[at : at + size], out[at : at + size])
        except CapacityError:
            self.drop()
            raise

    def finish(self) -> None:
        self._link.finish()

    def drop(self) -> None:
        if self._pages is not None and not self._link.wants_registered:
            self._pages.give_back()

    def _close(self) -> None:
        pages, self._pages = self._pages, None
        if pages is not None and self._link.wants_registered:
            self._link.finish()
            self._link.unregister(pages.tensor)
