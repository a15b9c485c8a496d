"""Copies of blocks between a GPU's pages and pinned host memory: one stream for each direction.

                       step N                    step N + 1                     N + 2
    compute  ──────────────────────────┬──wait─▶ overwrites the saved blocks ──────────────▶ reads the loaded blocks
    out        gather, D2H ────────────╯
    in                     H2D, after step N: scatter ────────────────────▶ polled, reported

A save does not wait for step N: no step in flight writes to a published block, and those that did have ended, since the
engine has their output. With several ranks that is the output of one; it depends on the others' last layer, which is
computed after their last write. A load waits for step N: a row that was stopped may still write to its old block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ringcore.kernels.upload import upload
from ringcore.worker.memory.block_link import BlockLink
from ringcore.worker.memory.block_pages import BlockPages
from ringcore.worker.memory.host_link import HostLink

__all__ = ["CudaBlockLink"]

_STAGING_BYTES = 32 << 20  # of device memory for each direction


class CudaBlockLink(BlockLink):
    """cuda: torch.cuda. host: pins memory."""

    wants_registered: ClassVar[bool] = True

    def __init__(self, pages: BlockPages, host: HostLink, cuda: Any = torch.cuda) -> None:
        super().__init__(pages)
        self._host, self._cuda, self._device = host, cuda, pages.device
        self._out, self._in = cuda.Stream(self._device), cuda.Stream(self._device)
        num_blocks = max(1, _STAGING_BYTES // pages.block_bytes)
        staging = torch.empty((2, num_blocks, pages.block_bytes), dtype=torch.uint8, device=self._device)
        self._out_staging, self._in_staging = staging

    def register(self, memory: torch.Tensor) -> None:
        self._host.register(memory)

    def unregister(self, memory: torch.Tensor) -> None:
        self._host.unregister(memory)

    def save(self, block_ids: Sequence[int], places: Sequence[torch.Tensor]) -> Any:
        with self._cuda.stream(self._out):
            for part in self._parts(len(places)):
                staging = self._out_staging[: part.stop - part.start]
                self.pages.gather(self._upload(block_ids[part]), staging)
                for place, block in zip(places[part], staging, strict=True):
                    place.copy_(block, non_blocking=True)
            saved = self._record(self._out)
        self._cuda.current_stream(self._device).wait_event(saved)
        return saved

    def load(self, places: Sequence[torch.Tensor], block_ids: Sequence[int]) -> Any:
        launched = self._record(self._cuda.current_stream(self._device))
        self._in.wait_stream(self._out)
        with self._cuda.stream(self._in):
            for part in self._parts(len(places)):
                staging = self._in_staging[: part.stop - part.start]
                for place, block in zip(places[part], staging, strict=True):
                    block.copy_(place, non_blocking=True)
                self._in.wait_event(launched)
                self.pages.scatter(self._upload(block_ids[part]), staging)
            return self._record(self._in)

    def _parts(self, count: int) -> Iterator[slice]:
        size = len(self._out_staging)
        return (slice(at, min(at + size, count)) for at in range(0, count, size))

    def _upload(self, block_ids: Sequence[int]) -> torch.Tensor:
        return upload(np.array(block_ids, np.int64), self._device)

    def _record(self, stream: Any) -> Any:
        event = self._cuda.Event()
        event.record(stream)
        return event

    def is_done(self, token: Any) -> bool:
        return bool(token.query())

    def finish(self) -> None:
        self._out.synchronize()
        self._in.synchronize()
