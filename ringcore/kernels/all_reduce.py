"""Collectives in one shot between GPUs that write into each other's memory: sums over the ranks, and rows side by side.

Every rank has a mailbox in the memory of every GPU, and every place of a mailbox is empty (all bits set) until the word
that belongs there arrives. A rank writes its words into the others' mailboxes, then looks at its own until no place is
empty, adds, and empties what it has read. So the data is its own signal, nothing is fenced, and no program waits for
another one of its GPU: a message takes one way over the link. All bits set is a NaN in every format; a NaN that looks
so is sent as another one. (The idea of a value that stands for "not there yet" is that of the one-shot all-reduce in
NVIDIA's TensorRT-LLM, there called Lamport's.)

Mailboxes are two deep, and a call takes the one or the other by the parity of its number, which is counted on the
device, so that a replayed graph counts too. Why two are enough: let rank A begin call n + 2. It has ended call n + 1,
so words of every rank B for call n + 1 have arrived, so B has begun that call, so B has ended call n: it has read, and
emptied, what A overwrites now. This needs that calls of one rank follow each other: they must be on one stream, each
behind the whole of the one before it (with dependent launch: nothing is written before the wait). How long the calls'
messages are does not matter: a mailbox lies where it lies whatever is in it, and a call empties all that it reads.

All ranks must make the same calls with the same shapes in the same order, eagerly or in graphs. A rank whose peer died
waits for ever; whoever watches the processes has to end it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ringcore.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options

__all__ = [
    "EMPTY_BYTE",
    "MAX_RANKS",
    "Mailboxes",
    "all_gather_last_dim",
    "all_gather_last_dim_reference",
    "all_reduce",
    "all_reduce_reference",
]

EMPTY_BYTE = 0xFF  # mailboxes are filled with it before the first call
MAX_RANKS = 8
_EMPTY = tl.constexpr(-1)
_OTHER_NAN = tl.constexpr(0x7FFFFFFF)  # also as two numbers of 16 bits

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes that a thread moves at once
# The same number in every call, whatever its size: a program counts the calls for itself, and so all count the same.
# On an H200 all run at once. Elsewhere those that do wait for the same ones of the other ranks, which run first too.
_PROGRAMS = 128
# (words, warps): the smallest with which one tile a program is enough
_TILES = ((128, 1), (512, 4), (2048, 16), (4096, 16))


@dataclass(frozen=True, slots=True)
class Mailboxes:
    """This rank's view of all mailboxes. Collectives that use it must follow each other on one stream."""

    rank: int
    size: int  # ranks: 2 to `MAX_RANKS`
    capacity_bytes: int  # of the longest message; a multiple of 16
    addresses: torch.Tensor  # [size] int64: where each rank's `num_bytes` lie, as this rank's GPU finds them
    calls: torch.Tensor  # [programs] int32: how many there were, counted by each program
    launches: bool = True  # False: kernels are compiled, or caught, and never run: see `precompile`

    @staticmethod
    def num_bytes(size: int, capacity_bytes: int) -> int:
        """What each rank allocates, and fills with `EMPTY_BYTE`: [2, sender, capacity]."""
        return 2 * size * capacity_bytes

    @classmethod
    def at(
        cls,
        addresses: Sequence[int],
        rank: int,
        capacity_bytes: int,
        device: torch.device,
        programs: int = _PROGRAMS,
    ) -> Mailboxes:
        """`addresses`: of the ranks' memory, in rank order, multiples of 16. `programs`: the same on every rank."""
        size = len(addresses)
        assert 2 <= size <= MAX_RANKS, size
        assert capacity_bytes % _ALIGNMENT == 0, capacity_bytes
        assert all(address % _ALIGNMENT == 0 for address in addresses), addresses
        table = torch.tensor(addresses, dtype=torch.int64, device=device)
        return cls(rank, size, capacity_bytes, table, torch.zeros(programs, dtype=torch.int32, device=device))

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` can be a message. Its shape and dtype decide, so all ranks decide alike."""
        num_bytes = tensor.numel() * tensor.itemsize
        return tensor.dtype in _DTYPES and 0 < num_bytes <= self.capacity_bytes and num_bytes % _ALIGNMENT == 0

    def takes_rows(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` can be a message whose rows, its last dimension, are taken apart."""
        return self.takes(tensor) and tensor.shape[-1] * tensor.itemsize % _ALIGNMENT == 0


@triton.jit
def _mailbox(addresses, index, mask):
    """Pointers to the memory of ranks `index`: one, or several [n]."""
    address = tl.load(addresses + index, mask=mask, other=0)
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _read(source, offsets, mask):
    """Words of this rank, as they are sent."""
    words = tl.load(source + offsets, mask=mask, other=0)
    return tl.where(words == _EMPTY, _OTHER_NAN, words)


@triton.jit
def _take(places, mask):
    """The words that arrive at `places`, which are empty again then."""
    words = tl.load(places, mask=mask, other=0, volatile=True)
    while tl.max(tl.max((words == _EMPTY).to(tl.int32), axis=1), axis=0) != 0:
        words = tl.load(places, mask=mask, other=0, volatile=True)
    tl.store(places, tl.full(words.shape, _EMPTY, tl.int32), mask=mask)
    return words


@triton.jit
def _numbers(words, number: tl.constexpr):
    """The two numbers of 16 bits in each word, in float32; the first is the lower half."""
    first = words.to(tl.int16).to(number, bitcast=True).to(tl.float32)
    second = (words >> 16).to(tl.int16).to(number, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def _sum(words, more, number: tl.constexpr, has_more: tl.constexpr):
    """Over the first dimension of words [ranks, tile], and `more` [tile] with them; added in float32, rounded once."""
    if number.primitive_bitwidth == 32:
        total = tl.sum(words.to(tl.float32, bitcast=True), axis=0)
        if has_more:
            total += more.to(tl.float32, bitcast=True)
        result = total.to(tl.int32, bitcast=True)
    else:
        first, second = _numbers(words, number)
        first, second = tl.sum(first, axis=0), tl.sum(second, axis=0)
        if has_more:
            more_first, more_second = _numbers(more, number)
            first, second = first + more_first, second + more_second
        low = first.to(number).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = second.to(number).to(tl.int16, bitcast=True).to(tl.int32) << 16
        result = low | high
    return result


@triton.jit
def _sum_in_float32(words, pairs, number: tl.constexpr):
    """As `_sum` of numbers of 16 bits, with `pairs` [tile] int64, each of two float32 numbers, which it remains."""
    first, second = _numbers(words, number)
    first = tl.sum(first, axis=0) + pairs.to(tl.int32).to(tl.float32, bitcast=True)
    second = tl.sum(second, axis=0) + (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    low = first.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return low | (second.to(tl.int32, bitcast=True).to(tl.int64) << 32)


@triton.jit
def _tile_of(index, row_words, tile: tl.constexpr):
    """(row, columns [tile], which of them are in the row) of tile number `index` of a message."""
    row_tiles = tl.cdiv(row_words, tile)
    columns = index % row_tiles * tile + tl.arange(0, tile)
    return index // row_tiles, columns, columns < row_words


@triton.jit(do_not_specialize=["rank", "num_rows", "row_quads"])
def _collective_kernel(
    part,  # [num_rows, row_quads * 16 bytes]
    residual,  # where has_residual, as many numbers as part has: of its dtype, or float32
    out,  # where it gathers, [num_rows, size, row_quads * 16 bytes]; else as residual, or part without one; may be it
    addresses,
    calls,
    rank,
    num_rows,
    row_quads,
    size: tl.constexpr,
    ranks: tl.constexpr,  # a power of two, size or more
    capacity: tl.constexpr,  # words
    tile: tl.constexpr,  # words
    gathers: tl.constexpr,
    has_residual: tl.constexpr,
    pdl: tl.constexpr,
):
    if pdl:
        gdc_launch_dependents()
    program = tl.program_id(0)
    sender = tl.arange(0, ranks)
    is_other = (sender < size) & (sender != rank)
    peers = _mailbox(addresses, sender, is_other)  # the table is as old as the process
    own = _mailbox(addresses, rank, True)
    sender, is_other = sender[:, None], is_other[:, None]
    if pdl:
        gdc_wait()
    call = tl.load(calls + program)
    to = peers[:, None] + ((call & 1) * size + rank) * capacity
    at = own + ((call & 1) * size + sender) * capacity
    number: tl.constexpr = part.dtype.element_ty
    widens: tl.constexpr = number.primitive_bitwidth < out.dtype.element_ty.primitive_bitwidth
    result: tl.constexpr = tl.int64 if widens else tl.int32  # of as many numbers as a word has
    source, target = part.to(tl.pointer_type(tl.int32)), out.to(tl.pointer_type(result))
    row_words = row_quads * 4
    num_tiles = num_rows * tl.cdiv(row_words, tile)
    for index in range(program, num_tiles, tl.num_programs(0)):
        row, columns, mask = _tile_of(index, row_words, tile)
        offsets = tl.broadcast_to((row * row_words + columns)[None, :], (ranks, tile))
        words = _read(source, offsets, mask[None, :] & (sender < size))
        tl.store(to + offsets, words, mask=mask[None, :] & is_other)
    for index in range(program, num_tiles, tl.num_programs(0)):
        row, columns, mask = _tile_of(index, row_words, tile)
        offsets = tl.broadcast_to((row * row_words + columns)[None, :], (ranks, tile))
        words = _read(source, offsets, mask[None, :] & (sender == rank))  # zeros elsewhere
        more = columns  # anything
        if has_residual:
            more = tl.load(residual.to(tl.pointer_type(result)) + columns, mask=mask, other=0)  # on its way meanwhile
        words |= _take(at + offsets, mask[None, :] & is_other)
        if gathers:
            places = (row * size + sender) * row_words + columns[None, :]
            tl.store(target + places, words, mask=mask[None, :] & (sender < size))
        elif widens:
            tl.store(target + columns, _sum_in_float32(words, more, number), mask=mask)
        else:
            tl.store(target + columns, _sum(words, more, number, has_residual), mask=mask)
    tl.store(calls + program, call + 1)


def all_reduce(
    partial: torch.Tensor,
    mailboxes: Mailboxes,
    *,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """out = the sum of the ranks' `partial`, and of `residual` where it is given, which every rank has the same.

    All of one shape and dtype (float32, bfloat16, float16), contiguous, such that `mailboxes.takes` `partial`; or
    `residual` and `out` float32 and `partial` of 16 bits. `out` may be `partial` or `residual`. Added in float32 in the
    same order on every rank, rounded once, to the dtype of `out`: the same bits everywhere.
    """
    assert mailboxes.takes(partial), (partial.shape, partial.dtype, mailboxes.capacity_bytes)
    added = out if residual is None else residual
    dtypes = (partial.dtype,) if residual is None else (partial.dtype, torch.float32)
    assert out.dtype in dtypes, (partial.dtype, out.dtype)
    assert out.dtype == added.dtype, (out.dtype, added.dtype)
    for tensor in (partial, out, added):
        assert tensor.shape == partial.shape, (tensor.shape, partial.shape)
        _check_place(tensor)
    _launch(partial, residual, out, mailboxes, num_rows=1, gathers=False, pdl=pdl)
    return out


def all_reduce_reference(partials: Sequence[torch.Tensor], residual: torch.Tensor | None = None) -> torch.Tensor:
    """`all_reduce` in plain torch, of all ranks' partial sums in rank order."""
    total = torch.stack([partial.float() for partial in partials]).sum(0)
    if residual is None:
        return total.to(partials[0].dtype)
    return (total + residual.float()).to(residual.dtype)


def all_gather_last_dim(
    part: torch.Tensor, mailboxes: Mailboxes, *, out: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """[..., n] on each rank -> [..., n * size], in rank order. As `all_reduce`, with `mailboxes.takes_rows`.

    Every number arrives as it is, but that a NaN may become another NaN. `out` must not be `part`.
    """
    assert mailboxes.takes_rows(part), (part.shape, part.dtype, mailboxes.capacity_bytes)
    *before, length = part.shape
    shape = (*before, length * mailboxes.size)
    if out is None:
        out = torch.empty(shape, dtype=part.dtype, device=part.device)
    assert (out.shape, out.dtype) == (shape, part.dtype), (out.shape, out.dtype, shape)
    for tensor in (part, out):
        _check_place(tensor)
    _launch(part, None, out, mailboxes, num_rows=part.numel() // length, gathers=True, pdl=pdl)
    return out


def all_gather_last_dim_reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """`all_gather_last_dim` in plain torch, of all ranks' parts in rank order."""
    return torch.cat(list(parts), dim=-1)


def _launch(
    part: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    mailboxes: Mailboxes,
    *,
    num_rows: int,
    gathers: bool,
    pdl: bool,
) -> None:
    num_bytes = part.numel() * part.itemsize
    programs = len(mailboxes.calls)
    share = -(-num_bytes // (4 * programs))
    tile, num_warps = next((tile for tile in _TILES if share <= tile[0]), _TILES[-1])
    _collective_kernel.run(
        part,
        part if residual is None else residual,
        out,
        mailboxes.addresses,
        mailboxes.calls,
        mailboxes.rank,
        num_rows,
        num_bytes // num_rows // _ALIGNMENT,
        size=mailboxes.size,
        ranks=triton.next_power_of_2(mailboxes.size),
        capacity=mailboxes.capacity_bytes // 4,
        tile=tile,
        gathers=gathers,
        has_residual=residual is not None,
        pdl=pdl,
        num_warps=num_warps,
        num_stages=1,
        grid=(programs,),
        warmup=not mailboxes.launches,
        **launch_options(pdl),
    )


def _check_place(tensor: torch.Tensor) -> None:
    assert tensor.is_contiguous(), "numbers must lie side by side"
    assert tensor.data_ptr() % _ALIGNMENT == 0, "numbers must begin at a multiple of 16 bytes"
