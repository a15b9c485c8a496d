"""How pieces of a file reach a tensor: the memory on the way, and the order of the copies on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ringcore.model_executor.weight import WeightPart

__all__ = ["Copied", "ReaderStreams", "Staging"]


class Staging:
    """Buffers that are filled by the host and copied to `device`, one after the other.

    A CPU has one, small enough to updatable in its cache. A GPU has two of pinned memory, of which one is filled while the
    other is on its way; a buffer is handed out again only when its copy has ended.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._num_bytes = num_bytes
        self._buffers = [self._allocate(num_bytes) for _ in range(2 if self._is_pinned else 1)]
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._buffers)
        self._turn = 0

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8, to be filled; the next `copy` is from it."""
        self._turn = (self._turn + 1) % len(self._buffers)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        if num_bytes > len(self._buffers[self._turn]):
            self._buffers[self._turn] = self._allocate(num_bytes)
        return self._buffers[self._turn][:num_bytes]

    def copy(self, source: torch.Tensor, out: torch.Tensor, part: WeightPart) -> None:
        """Copies a view of the last `buffer`, rows of `part`, into `out`, of its shape and any dtype, on the device."""
        if not self._is_pinned:
            out.copy_(part.ordered(source))
            return
        # Converted and put in order there: here it would take a second, pageable buffer.
        if source.dtype != out.dtype or part.order is not None:
            source = source.to(out.device, non_blocking=True)
        out.copy_(part.ordered(source), non_blocking=True)
        event = self._copied[self._turn] or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(out.device))
        self._copied[self._turn] = event


class ReaderStreams:
    """A stream for each thread that reads, so that the copies of one need not wait for another's. A CPU has none.

    What was launched on the stream that is current at construction comes before all that they copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._begin = _event(device) if self._is_cuda else None
        self._local = threading.local()

    @contextmanager
    def of_thread(self) -> Iterator[ReaderStream]:
        """The calling thread's; on a GPU it is the current one within."""
        if not self._is_cuda:
            yield ReaderStream(self._device)
            return
        torch.cuda.set_device(self._device)
        stream: torch.cuda.Stream | None = vars(self._local).get("stream")
        if stream is None:
            stream = self._local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            assert self._begin is not None
            stream.wait_event(self._begin)
        with torch.cuda.stream(stream):
            yield ReaderStream(self._device)


class ReaderStream:
    """What a thread does its copies on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Copied:
        """All that it was given so far."""
        return Copied(_event(self._device) if self._device.type == "cuda" else None)


class Copied:
    """Copies that were given to a stream, up to one of them."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        """What the calling thread launches on its current stream from now on comes after them."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


def _event(device: torch.device) -> torch.cuda.Event:
    """Recorded on the current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
