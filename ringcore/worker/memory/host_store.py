"""Where the contents of device memory are kept while the device has no memory for them.

    empty --save--> kept --restore--> kept --drop--> empty        a store has room for one tensor, again and again

What `save` and `restore` begin has ended after `finish`. To make a store's memory takes longer than a copy, so it is
made in the background, once, and stays; what fails there is tried again, and raised, when it is needed.
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

_TIMEOUT_S = 300.0  # by then something is broken: 16 GiB take a second
_PIECE_BYTES = 64 << 20  # of memory that is taken at once
_COPY_BYTES = 256 << 20  # above 64 MiB a copy is as fast as the link
_MAX_THREADS = 16
_BACKGROUND_SHARE = 4  # this part of the cores: the others compile kernels and read weights meanwhile


@dataclass(frozen=True, slots=True)
class HostBudget:
    """Host memory, as one of the ranks of a host may take it."""

    free_bytes: Callable[[], int]  # now, for this process
    num_ranks: int  # which take theirs at the same time

    def check(self, num_bytes: int, left: int, in_flight: int) -> None:
        """Raises `CapacityError` where `left` bytes, of `num_bytes` in all, are more than what is free less what every
        rank may be taking at this moment, `in_flight` at most: the kernel would not refuse, but end a process."""
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
    """Of `num_bytes`. All methods are called by one thread."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._making: Future[None] | None = None
        self._is_closing = threading.Event()

    def allocate_in_background(self) -> None:
        """Begins to make what `save` needs, in a thread, beside what else has to be done. A failure goes to the log."""
        self._begin(is_awaited=False)

    def _begin(self, *, is_awaited: bool) -> Future[None]:
        assert self._making is None, "it is being made"
        making = self._making = Future()
        # A failed call of the device's runtime is remembered by the thread that made it: so it is none of ours.
        threading.Thread(target=self._run, args=(making, is_awaited), name="host store", daemon=True).start()
        return making

    def _run(self, making: Future[None], is_awaited: bool) -> None:
        started = time.monotonic()
        try:
            self._make(is_awaited)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold what was taken, and the error may be kept
            if not self._is_closing.is_set():
                _log.warning("no room to keep weights in while the engine sleeps: %s; sleep tries again", error)
            making.set_exception(error)
        else:
            _log.info("room for %.2f GiB of weights made in %.2f s", self.num_bytes / 2**30, time.monotonic() - started)
            making.set_result(None)

    def ready(self) -> None:
        """Returns when `save` can begin; what could not be made ahead is tried once more.

        Raises `CapacityError` where there is no room, RuntimeError where it takes too long.
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
                raise  # its own
            raise RuntimeError(f"the room for weights is not made after {_TIMEOUT_S:.0f} s") from error

    @abstractmethod
    def _make(self, is_awaited: bool) -> None:
        """Makes all that `save` needs, or nothing. Ends early, by any error, where `_is_closing`. is_awaited: somebody
        waits for it, and has nothing else to do."""

    @abstractmethod
    def save(self, contents: torch.Tensor) -> None:
        """Begins to keep `contents`, uint8 [num_bytes] on the device, which stay as they are until `finish`.

        Raises `CapacityError`; then nothing is kept.
        """

    @abstractmethod
    def restore(self, out: torch.Tensor, at: int) -> None:
        """Begins to write what is kept, from byte `at` on, to `out`: uint8 on the device, all of it or a part."""

    @abstractmethod
    def finish(self) -> None:
        """Returns when what was begun has ended."""

    @abstractmethod
    def drop(self) -> None:
        """What is kept is not needed any more."""

    def close(self) -> None:
        """Gives everything back. Idempotent."""
        self._is_closing.set()
        making, self._making = self._making, None
        if making is not None:
            making.exception(_TIMEOUT_S)
        self._close()

    @abstractmethod
    def _close(self) -> None: ...


class MemoryStore(HostStore):
    """In one piece of host memory. A device that wants it registered has it for good. Otherwise pages are taken as they
    are written, and given back when they are not needed."""

    def __init__(self, num_bytes: int, link: HostLink, budget: HostBudget) -> None:
        super().__init__(num_bytes)
        self._link, self._budget = link, budget
        self._pages: HugePages | None = None

    def _make(self, is_awaited: bool) -> None:
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
        """is_new: pages of `out` are taken by the copy."""
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
