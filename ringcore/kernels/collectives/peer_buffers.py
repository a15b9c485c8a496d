"""Receive buffers in peer GPU memory, in which the data is its own flag: what the collectives' kernels share.

Every rank has a receive buffer in the memory of every GPU, and every word of a buffer holds a sentinel (all bits set)
until the sender's word arrives. A rank stores its words into the buffers of the other ranks, then polls its own until
no sentinel is left, reduces, and resets what it has read to the sentinel. So the data is its own flag, there is no
fence, and no program waits for another one of its GPU: a message crosses the link once. All bits set is a NaN in every
format; a payload NaN with these bits is sent as another NaN. (A sentinel for "not arrived yet" is the idea of the
one-shot all-reduce in NVIDIA's TensorRT-LLM, there called Lamport's.)

Buffers are double-buffered: a call uses the one or the other by the parity of its number, which is counted on the
device, so that CUDA graph replays count too. Why two are enough: let rank A begin call n + 2. It has ended call n + 1,
so words of every rank B for call n + 1 have arrived, so B has begun that call, so B has ended call n: it has read, and
reset, what A overwrites now. This needs the calls of one rank to be serialised: on one stream, each after the whole of
the one before it (with dependent launch: no store before the wait). Message lengths may differ between calls: the
offset of a buffer does not depend on them, and a call resets all that it reads.

All ranks must make the same calls with the same shapes in the same order, eagerly or in graphs. A rank whose peer died
polls forever; the process supervisor has to end it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

__all__ = [
    "ALIGNMENT",
    "MAX_RANKS",
    "SENTINEL_BYTE",
    "PeerBuffers",
    "load_words",
    "numbers_of_words",
    "peer_words",
    "receive_words",
    "without_sentinel",
]

SENTINEL_BYTE = 0xFF  # buffers are filled with it before the first call
MAX_RANKS = 8
_SENTINEL = tl.constexpr(-1)
_OTHER_NAN = tl.constexpr(0x7FFFFFFF)  # also as two 16-bit numbers

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 16  # bytes per thread and access
# The same grid in every call, whatever its size: each program counts the calls for itself, so all counts agree. On an
# H200 all programs are resident. Elsewhere the resident ones wait for the same ones of the other ranks, which are
# scheduled first too.
_PROGRAMS = 128


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """This rank's view of all ranks' receive buffers. Collectives that use it must be serialised on one stream."""

    rank: int
    size: int  # ranks: 2 to `MAX_RANKS`
    capacity_bytes: int  # of the longest message; a multiple of 16
    addresses: torch.Tensor  # [size] int64: of each rank's buffers, as mapped on this rank's GPU
    calls: torch.Tensor  # [programs] int32: the number of calls so far, counted by each program
    launches: bool = True  # False: kernels are compiled or intercepted, not launched: see `precompile`

    @staticmethod
    def num_bytes(size: int, capacity_bytes: int) -> int:
        """What each rank allocates, and fills with `SENTINEL_BYTE`: [2, sender, capacity]."""
        return 2 * size * capacity_bytes

    @classmethod
    def at(
        cls,
        addresses: Sequence[int],
        rank: int,
        capacity_bytes: int,
        device: torch.device,
        programs: int = _PROGRAMS,
    ) -> PeerBuffers:
        """`addresses`: of the ranks' memory, in rank order, multiples of 16. `programs`: the same on every rank."""
        size = len(addresses)
        assert 2 <= size <= MAX_RANKS, size
        assert capacity_bytes % ALIGNMENT == 0, capacity_bytes
        assert all(address % ALIGNMENT == 0 for address in addresses), addresses
        table = torch.tensor(addresses, dtype=torch.int64, device=device)
        return cls(rank, size, capacity_bytes, table, torch.zeros(programs, dtype=torch.int32, device=device))

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` can be a message. Only shape and dtype decide, so all ranks decide alike."""
        num_bytes = tensor.numel() * tensor.itemsize
        return tensor.dtype in _DTYPES and 0 < num_bytes <= self.capacity_bytes and num_bytes % ALIGNMENT == 0

    def fits_rows(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` can be a message that is split into rows along its last dimension."""
        return self.fits(tensor) and tensor.shape[-1] * tensor.itemsize % ALIGNMENT == 0


@triton.jit
def peer_words(addresses, index, mask):
    """Pointers to the memory of ranks `index`: one, or several [n]."""
    address = tl.load(addresses + index, mask=mask, other=0)
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def without_sentinel(words):
    return tl.where(words == _SENTINEL, _OTHER_NAN, words)


@triton.jit
def load_words(source, offsets, mask):
    """Words of this rank's message, with the sentinel replaced."""
    return without_sentinel(tl.load(source + offsets, mask=mask, other=0))


@triton.jit
def receive_words(slots, mask):
    """Polls `slots` until no sentinel is left, then resets them to the sentinel."""
    words = tl.load(slots, mask=mask, other=0, volatile=True)
    while tl.max(tl.max((words == _SENTINEL).to(tl.int32), axis=1), axis=0) != 0:
        words = tl.load(slots, mask=mask, other=0, volatile=True)
    tl.store(slots, tl.full(words.shape, _SENTINEL, tl.int32), mask=mask)
    return words


@triton.jit
def numbers_of_words(words, number: tl.constexpr):
    """The two 16-bit numbers of each word, in float32; the first is the lower half."""
    first = words.to(tl.int16).to(number, bitcast=True).to(tl.float32)
    second = (words >> 16).to(tl.int16).to(number, bitcast=True).to(tl.float32)
    return first, second
