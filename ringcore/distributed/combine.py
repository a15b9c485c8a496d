"""The combine of expert parallelism: when it sends less than an all-reduce, and how over peer memory.

Attention leaves every token on every rank, so nothing is sent to experts: a rank takes the pairs of its own experts.
What they add must reach all ranks again. An all-reduce adds up every row of every rank. A combine sends a row only from
ranks that have an expert of its token to the rank that owns the token, and the sum from there to all.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ringcore.distributed.peer_memory import CudaPeerDriver, PeerMemory

__all__ = ["PeerCombine", "combine_bytes", "saves_bytes"]

_PARTIAL_BYTES = 4  # of a number of a partial sum
# What must be saved: about what an NVLink carries while a second exchange, of the sums, waits for the first. And the
# share of an all-reduce's bytes that may be sent: with 3/4 of them, on two H200s, a combine took 0.83 to 1.21 times as
# long.
_LEAST_SAVED_BYTES, _LARGEST_SHARE = 1 << 20, 0.5


def combine_bytes(num_tokens: int, hidden_size: int, k: int, num_ranks: int, itemsize: int) -> float:
    """What a rank sends for a combine on average, where a token's k experts are on any ranks alike; itemsize: of the
    sums."""
    share_with_experts = 1 - (1 - 1 / num_ranks) ** k
    numbers = num_tokens * hidden_size * (num_ranks - 1) / num_ranks
    return numbers * (_PARTIAL_BYTES * share_with_experts + itemsize)


def saves_bytes(num_tokens: int, hidden_size: int, k: int, num_ranks: int, itemsize: int, *, is_one_shot: bool) -> bool:
    """Whether a combine is to take the place of an all-reduce of float32. is_one_shot: in which a rank sends its whole
    message to every other one; else it is a ring's, a reduce-scatter and an all-gather."""
    if num_tokens < num_ranks:
        return False
    message = num_tokens * hidden_size * _PARTIAL_BYTES
    sent = message * (num_ranks - 1) * (1 if is_one_shot else 2 / num_ranks)
    combined = combine_bytes(num_tokens, hidden_size, k, num_ranks, itemsize)
    return sent - combined >= _LEAST_SAVED_BYTES and combined <= _LARGEST_SHARE * sent


class PeerCombine:
    """Over the memory of GPUs that reach each other, in one launch; more tokens than fit the buffers in several."""

    _ROWS_BYTES = 16 << 20  # of the partial sums of one launch, of all owners; the memory is four times that

    def __init__(self, memory: PeerMemory, rank: int, device: torch.device) -> None:
        from ringcore.kernels.collectives import combine  # needs Triton, as all kernels
        from ringcore.kernels.collectives.peer_buffers import PeerBuffers
        from ringcore.kernels.launch.dependent_launch import supports_pdl

        self._memory, self._kernel = memory, combine
        size = len(memory.addresses)
        self._buffers = PeerBuffers.at(memory.addresses, rank, self.capacity_bytes(size), device)
        self._pdl = supports_pdl(device)

    @classmethod
    def capacity_bytes(cls, size: int) -> int:
        """Of a sender's buffer: its partial sums, and its sums."""
        return 2 * cls._ROWS_BYTES // size // 32 * 32

    @classmethod
    def connect(cls, rank: int, size: int, store: PrefixStore, device: torch.device) -> PeerCombine | None:
        """As `PeerCollectives.connect`."""
        from ringcore.kernels.collectives.peer_buffers import MAX_RANKS, SENTINEL_BYTE, PeerBuffers

        if size > MAX_RANKS:
            return None
        num_bytes = PeerBuffers.num_bytes(size, cls.capacity_bytes(size))
        driver = CudaPeerDriver(device, device.index - rank)
        memory = PeerMemory.connect(rank, size, PrefixStore("combine", store), num_bytes, SENTINEL_BYTE, driver)
        return None if memory is None else cls(memory, rank, device)

    def detached(self) -> PeerCombine:
        """The same with kernels that are compiled or intercepted, not launched."""
        detached = copy.copy(self)
        detached._buffers = replace(self._buffers, launches=False)
        return detached

    def fits(self, hidden_size: int) -> bool:
        return hidden_size % 8 == 0 and self._most(hidden_size) >= self._buffers.size

    def _most(self, hidden_size: int) -> int:
        return self._kernel.max_combined_tokens(self._buffers, hidden_size)

    def __call__(
        self, partial: torch.Tensor, ranks_of: torch.Tensor, out: torch.Tensor, rounds_to: torch.dtype, adds: bool
    ) -> None:
        """As `TensorParallel.combine`."""
        num_tokens, hidden_size = partial.shape
        num_calls = -(-num_tokens // self._most(hidden_size))
        for call in range(num_calls):
            own = slice(call * num_tokens // num_calls, (call + 1) * num_tokens // num_calls)
            rows = partial[own], ranks_of[own], out[own]
            self._kernel.combine(*rows, self._buffers, rounds_to=rounds_to, adds=adds, pdl=self._pdl)

    def close(self) -> None:
        self._memory.close()
