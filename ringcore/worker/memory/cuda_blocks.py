"""Copies of blocks between a GPU's pages and pinned host memory: one stream for each direction.

                       step N                    step N + 1                     N + 2
    compute  ──────────────────────────┬──wait─▶ overwrites the saved blocks ──────────────▶ reads the loaded blocks
    out        gather, D2H ────────────╯
    in                H2D, after step N: scatter ─────────────────────────▶ polled, reported

A save does not wait for step N: no step in flight writes to a published block, and those that did have ended, since the
engine has their output. With several ranks that is the output of one; it depends on the others' last layer, which is
computed after their last write. A load waits for step N: a row that was stopped may still write to its old block.

Both directions of the bus are used at once. A load waits for a save in flight only where it reads a place that the save
fills, or overwrites a block that the save has not gathered yet: the blocks of an evicted prefix are often those that a
stored one gets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import torch

from ringcore.kernels.launch.upload import upload
from ringcore.worker.memory.block_link import BlockLink
from ringcore.worker.memory.block_pages import BlockPages
from ringcore.worker.memory.host_link import HostLink

__all__ = ["CudaBlockLink"]

_STAGING_BYTES = 32 << 20  # of device memory for each direction


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Blocks that are copied together, in the order of their places' addresses."""

    block_ids: list[int]
    places: list[torch.Tensor]  # uint8 [block_bytes] each
    addresses: list[int]

    def runs(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Places beside each other in one allocation: their indices, and all of them, uint8 [n, block_bytes]."""
        begin, size = 0, self.places[0].nbytes
        allocations = [place.untyped_storage().data_ptr() for place in self.places]
        expected = [(of, address + size) for of, address in zip(allocations, self.addresses, strict=True)]
        for end in range(1, len(self.places) + 1):
            if end == len(self.places) or expected[end - 1] != (allocations[end], self.addresses[end]):
                yield slice(begin, end), self.places[begin].as_strided((end - begin, size), (size, 1))
                begin = end


@dataclass(frozen=True, slots=True)
class _Saving:
    """A chunk whose save is in flight."""

    block_ids: frozenset[int]
    addresses: frozenset[int]
    gathered: Any  # events
    copied: Any


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
        self._saving: list[_Saving] = []  # until they are seen to have ended

    def register(self, memory: torch.Tensor) -> None:
        self._host.register(memory)

    def unregister(self, memory: torch.Tensor) -> None:
        self._host.unregister(memory)

    def save(self, block_ids: Sequence[int], places: Sequence[torch.Tensor]) -> Any:
        self._forget_saved()
        with self._cuda.stream(self._out):
            for chunk, ids in self._uploaded(block_ids, places):
                staging = self._out_staging[: len(ids)]
                self.pages.gather(ids, staging)
                gathered = self._record(self._out)
                for rows, run in chunk.runs():
                    run.copy_(staging[rows], non_blocking=True)
                saved = self._record(self._out)
                self._saving.append(_Saving(frozenset(chunk.block_ids), frozenset(chunk.addresses), gathered, saved))
        self._cuda.current_stream(self._device).wait_event(saved)
        return saved

    def load(self, places: Sequence[torch.Tensor], block_ids: Sequence[int]) -> Any:
        launched = self._record(self._cuda.current_stream(self._device))
        self._forget_saved()
        with self._cuda.stream(self._in):
            for chunk, ids in self._uploaded(block_ids, places):
                staging = self._in_staging[: len(ids)]
                self._wait_for([one.copied for one in self._saving if not one.addresses.isdisjoint(chunk.addresses)])
                for rows, run in chunk.runs():
                    staging[rows].copy_(run, non_blocking=True)
                self._wait_for([one.gathered for one in self._saving if not one.block_ids.isdisjoint(chunk.block_ids)])
                self._in.wait_event(launched)
                self.pages.scatter(ids, staging)
            return self._record(self._in)

    def _forget_saved(self) -> None:
        self._saving = [one for one in self._saving if not one.copied.query()]

    def _wait_for(self, events: list[Any]) -> None:
        """Of the stream `out`, where the last one ends last."""
        if events:
            self._in.wait_event(events[-1])

    def _uploaded(
        self, block_ids: Sequence[int], places: Sequence[torch.Tensor]
    ) -> Iterator[tuple[_Chunk, torch.Tensor]]:
        """The chunks, and their ids on the device: of all at once, as a later upload would wait for the other stream's
        copies of blocks."""
        chunks = list(self._chunks(block_ids, places))
        ids = upload(np.array([id_ for chunk in chunks for id_ in chunk.block_ids], np.int64), self._device)
        return zip(chunks, torch.split(ids, len(self._out_staging)), strict=True)

    def _chunks(self, block_ids: Sequence[int], places: Sequence[torch.Tensor]) -> Iterator[_Chunk]:
        size = len(self._out_staging)
        by_block = list(zip([place.data_ptr() for place in places], block_ids, places, strict=True))
        for at in range(0, len(by_block), size):
            addresses, ids, chunk = zip(*sorted(by_block[at : at + size], key=itemgetter(0)), strict=True)
            yield _Chunk(list(ids), list(chunk), list(addresses))

    def _record(self, stream: Any) -> Any:
        event = self._cuda.Event()
        event.record(stream)
        return event

    def is_done(self, token: Any) -> bool:
        return bool(token.query())

    def finish(self) -> None:
        self._out.synchronize()
        self._in.synchronize()
