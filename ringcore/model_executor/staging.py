"""Staging of weight reads: the buffers between file and tensor, and the order of the H2D copies on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ringcore.model_executor.weight import WeightPart

__all__ = ["CopyEvent", "ReaderStreams", "Staging"]


class Staging:
    """Buffers that the host fills and that are copied to `device`, in turn.

    A CPU has one, small enough to stay in its cache. A GPU has two of pinned memory (double-buffered): one is filled
    while the other is being copied; a buffer is reused only after its copy has ended.
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
        """Copies a view of the last `buffer`, rows of `part`, into `out`, those of the final tensor, on the device."""
        if not self._is_pinned:
            out.copy_(part.final(source))
            return
        # Converted, reordered and encoded on the device: on the host that would take a second, pageable buffer.
        if source.dtype != out.dtype or part.order is not None or part.encoding is not None:
            source = source.to(out.device, non_blocking=True)
        out.copy_(part.final(source), non_blocking=True)
        event = self._copied[self._turn] or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(out.device))
        self._copied[self._turn] = event


class ReaderStreams:
    """One CUDA stream per reader thread, so that the copies of one need not wait for another's. A CPU has none.

    All copies are ordered after what was launched on the current stream at construction.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._begin = _event(device) if self._is_cuda else None
        self._local = threading.local()

    @contextmanager
    def of_thread(self) -> Iterator[ReaderStream]:
        """The calling thread's stream; on a GPU it is the current stream inside the context."""
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
    """The stream of a reader thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self) -> CopyEvent:
        """An event after all copies given to the stream so far."""
        return CopyEvent(_event(self._device) if self._device.type == "cuda" else None)


class CopyEvent:
    """The end of the copies that a stream was given up to some point."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        """Orders what the calling thread launches on its current stream after these copies."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


def _event(device: torch.device) -> torch.cuda.Event:
    """Recorded on the current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
