"""The memory through which pieces of a file reach a tensor."""

from __future__ import annotations

import torch

__all__ = ["Staging"]


class Staging:
    """Buffers that are filled by the host and copied to `device`, one after the other.

    A CPU has one, small enough to stay in its cache. A GPU has two of pinned memory, of which one is filled while the
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

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """Copies a view of the last `buffer` into `out`, of its shape and any dtype, on the device."""
        if not self._is_pinned:
            out.copy_(source)
            return
        if source.dtype != out.dtype:  # converted there: here it would take a second, pageable buffer
            source = source.to(out.device, non_blocking=True)
        out.copy_(source, non_blocking=True)
        event = self._copied[self._turn] or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(out.device))
        self._copied[self._turn] = event
