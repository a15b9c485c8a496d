"""Host memory in places of one block each."""

from __future__ import annotations

import os

import torch

from ringcore.errors import CapacityError
from ringcore.host.byte_sizes import format_bytes
from ringcore.host.resources import Host
from ringcore.worker.memory.block_link import BlockLink
from ringcore.worker.memory.host_memory import HugePages

__all__ = ["HostBlocks"]

_PIECE_BYTES, _MAX_THREADS = 64 << 20, 16


class HostBlocks:
    """`num_blocks` places, uint8 [block_bytes] each, registered where the link wants that; the free ones are a stack.

    Memory that is not registered is allocated on write.
    """

    def __init__(self, num_blocks: int, link: BlockLink, num_ranks: int) -> None:
        """num_ranks: of this host. Raises `CapacityError`."""
        self._link, num_bytes = link, num_blocks * link.pages.block_bytes
        free_bytes = Host().free_memory_bytes() // num_ranks
        if num_bytes > free_bytes:
            raise CapacityError(
                f"host_kv_cache_bytes: {format_bytes(num_bytes, exact=True)} of host memory asked on each of "
                f"{num_ranks} ranks, {format_bytes(free_bytes, exact=True)} are free for each; lower "
                "host_kv_cache_bytes",
                needed_bytes=num_bytes,
                available_bytes=free_bytes,
            )
        pages = HugePages(num_bytes)
        if link.wants_registered:
            num_threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // num_ranks))
            pages.populate(num_threads, _PIECE_BYTES, lambda left: True)
            link.register(pages.tensor)
        self._memory: torch.Tensor | None = pages.tensor
        self._places = pages.tensor.view(num_blocks, -1)
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free place, of which there is one."""
        return self._free.pop()

    def give_back(self, place: int) -> None:
        self._free.append(place)

    def __getitem__(self, place: int) -> torch.Tensor:
        return self._places[place]

    def close(self) -> None:
        """Idempotent. No copy may be in progress."""
        memory, self._memory = self._memory, None
        if memory is not None and self._link.wants_registered:
            self._link.unregister(memory)
