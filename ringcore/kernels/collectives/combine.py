"""The combine of expert parallelism over peer GPU memory: each token's sum over the ranks that have experts of it.

Every rank has every token, and a partial sum of those of which it has an expert. In one launch

    1. a rank stores the partial sums of other ranks' tokens, each into the memory of the token's owner, and only of
       tokens of which it has an expert: an all-to-all whose rows have fixed places, so nothing is counted or packed
    2. the owner of a token adds up what came, in the order of the ranks, rounds the sum, and stores it into the memory
       of every other rank
    3. a rank receives the sums of the tokens that others own

Tokens are owned in runs of equal length, in the order of the ranks. All ranks know which ranks have experts of which
token, since all computed the same routing: an owner knows how many rows to wait for.

Buffers, sentinels, and why two buffers are enough, are those of `peer_buffers`: every rank owns a token at least, so a
call receives words of every other rank. A buffer of a sender has its partial sums first, then its sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ringcore.kernels.collectives.peer_buffers import (
    PeerBuffers,
    load_words,
    numbers_of_words,
    peer_words,
    receive_words,
    without_sentinel,
)
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options

__all__ = ["combine", "combine_reference", "max_combined_tokens", "owned_tokens"]

_TILE = 1024  # float32 numbers
_NUM_WARPS = 8


def owned_tokens(num_tokens: int, rank: int, size: int) -> range:
    return range(rank * num_tokens // size, (rank + 1) * num_tokens // size)


def max_combined_tokens(buffers: PeerBuffers, hidden_size: int) -> int:
    """Of one call: a rank's partial sums and sums take half of a sender's buffer each."""
    return buffers.capacity_bytes // (2 * 4 * hidden_size) * buffers.size


@triton.jit
def _packed(total, number: tl.constexpr):
    """Float32 numbers [1, tile], rounded to `number` -> words, [1, tile], or [1, tile / 2] of two 16-bit numbers."""
    if number.primitive_bitwidth == 32:
        words = total.to(tl.int32, bitcast=True)
    else:
        pairs = tl.reshape(total, [1, total.shape[1] // 2, 2])
        first, second = tl.split(pairs)
        low = first.to(number).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = low | (second.to(number).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return without_sentinel(words)


@triton.jit
def _unpacked(words, number: tl.constexpr):
    """The opposite of `_packed`: [1, tile] float32."""
    if number.primitive_bitwidth == 32:
        numbers = words.to(tl.float32, bitcast=True)
    else:
        first, second = numbers_of_words(words, number)
        numbers = tl.reshape(tl.join(first, second), [1, 2 * words.shape[1]])
    return numbers


@triton.jit
def _finish(total, out, offsets, mask, adds: tl.constexpr):
    if adds:
        total += tl.load(out + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _owner_of(token, num_tokens, size: tl.constexpr):
    """(the rank that owns it, its first token): see `owned_tokens`."""
    owner = ((token + 1) * size - 1) // num_tokens
    return owner, owner * num_tokens // size


@triton.jit(do_not_specialize=["rank", "num_tokens"], do_not_specialize_on_alignment=["ranks_of"])
def _combine_kernel(
    partial,  # [num_tokens, hidden_size] float32
    ranks_of,  # [num_tokens] int32: bit r is set where rank r has an expert of the token
    out,  # [num_tokens, hidden_size]
    rounded,  # not read: of the dtype of the sums that are sent
    addresses,
    calls,
    rank,
    num_tokens,
    hidden_size: tl.constexpr,
    size: tl.constexpr,
    ranks: tl.constexpr,  # a power of two, size or more
    capacity: tl.constexpr,  # words
    tile: tl.constexpr,
    adds: tl.constexpr,
    pdl: tl.constexpr,
):
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    number: tl.constexpr = rounded.dtype.element_ty
    per_word: tl.constexpr = 32 // number.primitive_bitwidth
    row_tiles: tl.constexpr = (hidden_size + tile - 1) // tile
    row_words: tl.constexpr = hidden_size // per_word
    call = tl.load(calls + program)
    source = partial.to(tl.pointer_type(tl.int32))
    sender = tl.arange(0, ranks)[:, None]
    from_here = ((call & 1) * size + rank) * capacity
    own = peer_words(addresses, rank, True)
    peers = peer_words(addresses, tl.arange(0, ranks), (tl.arange(0, ranks) < size))
    num_tiles = num_tokens * row_tiles
    for index in range(program, num_tiles, num_programs):
        token = index // row_tiles
        owner, first = _owner_of(token, num_tokens, size)
        if (owner != rank) & (((tl.load(ranks_of + token) >> rank) & 1) != 0):
            columns = index % row_tiles * tile + tl.arange(0, tile)
            words = load_words(source + token.to(tl.int64) * hidden_size, columns, columns < hidden_size)
            to = peer_words(addresses, owner, True) + from_here + (token - first) * hidden_size
            tl.store(to + columns, words, mask=columns < hidden_size)
    first = rank * num_tokens // size
    begin, end = first * row_tiles, (rank + 1) * num_tokens // size * row_tiles
    # A tile is the same program's in all three parts, so that a program waits for those of its number alone.
    for index in range(begin + (program + num_programs - begin % num_programs) % num_programs, end, num_programs):
        row = index // row_tiles - first
        here = (tl.load(ranks_of + first + row) >> sender) & 1
        columns = (index % row_tiles * tile + tl.arange(0, tile))[None, :]
        mask = (here != 0) & (sender < size) & (columns < hidden_size)
        offsets = (first + row).to(tl.int64) * hidden_size + columns
        words = load_words(source, offsets + sender * 0, mask & (sender == rank))
        at = own + ((call & 1) * size + sender) * capacity + row * hidden_size + columns
        words |= receive_words(at, mask & (sender != rank))
        packed = _packed(tl.sum(words.to(tl.float32, bitcast=True), axis=0)[None, :], number)
        in_row = index % row_tiles * (tile // per_word) + tl.arange(0, tile // per_word)[None, :]
        to = peers[:, None] + from_here + capacity // 2 + row * row_words + in_row
        is_other = (sender < size) & (sender != rank) & (in_row < row_words)
        tl.store(to, tl.broadcast_to(packed, (ranks, tile // per_word)), mask=is_other)
        _finish(_unpacked(packed, number), out, offsets, columns < hidden_size, adds)
    for index in range(program, num_tiles, num_programs):
        token = index // row_tiles
        owner, first = _owner_of(token, num_tokens, size)
        if owner != rank:
            in_row = index % row_tiles * (tile // per_word) + tl.arange(0, tile // per_word)[None, :]
            at = own + ((call & 1) * size + owner) * capacity + capacity // 2 + (token - first) * row_words + in_row
            received = _unpacked(receive_words(at, in_row < row_words), number)
            columns = (index % row_tiles * tile + tl.arange(0, tile))[None, :]
            offsets = token.to(tl.int64) * hidden_size + columns
            _finish(received, out, offsets, columns < hidden_size, adds)
    tl.store(calls + program, call + 1)


def combine(
    partial: torch.Tensor,
    ranks_of: torch.Tensor,
    out: torch.Tensor,
    buffers: PeerBuffers,
    *,
    rounds_to: torch.dtype,
    adds: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """out, or where `adds` out +, = the sum over ranks of `partial`, of the ranks that have experts of a token; returns
    `out`.

    partial: [num_tokens, hidden_size] float32, contiguous, whose rows are not read where the rank has no expert of the
    token; num_tokens from the number of ranks to `max_combined_tokens`. ranks_of: [num_tokens] int32, the same on every
    rank: bit r is set where rank r has one. rounds_to: float32, bfloat16 or float16, of the sums before `out` is added;
    out: float32, or of rounds_to. The same bits on every rank. hidden_size is a multiple of 8.
    """
    num_tokens, hidden_size = partial.shape
    assert partial.dtype == torch.float32, partial.dtype
    assert buffers.size <= num_tokens <= max_combined_tokens(buffers, hidden_size), (partial.shape, buffers)
    assert hidden_size % 8 == 0, hidden_size
    assert out.dtype in (torch.float32, rounds_to), (out.dtype, rounds_to)
    assert (out.shape, ranks_of.shape, ranks_of.dtype) == (partial.shape, (num_tokens,), torch.int32)
    for tensor in (partial, out, ranks_of):
        assert tensor.is_contiguous(), "tensors must be contiguous"
    _combine_kernel.run(
        *(partial, ranks_of, out, torch.empty(0, dtype=rounds_to, device=out.device)),
        *(buffers.addresses, buffers.calls, buffers.rank, num_tokens),
        hidden_size=hidden_size,
        size=buffers.size,
        ranks=triton.next_power_of_2(buffers.size),
        capacity=buffers.capacity_bytes // 4,
        tile=min(_TILE, triton.next_power_of_2(hidden_size)),
        adds=adds,
        pdl=pdl,
        num_warps=_NUM_WARPS,
        num_stages=1,
        grid=(len(buffers.calls),),
        warmup=not buffers.launches,
        **launch_options(pdl),
    )
    return out


def combine_reference(
    partials: Sequence[torch.Tensor], ranks_of: torch.Tensor, rounds_to: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`combine` in plain torch, of all ranks' partial sums; out: to which they are added."""
    total = torch.zeros_like(partials[0])
    for rank, partial in enumerate(partials):
        total += partial.masked_fill(((ranks_of >> rank) & 1 == 0)[:, None], 0)
    rounded = total.to(rounds_to)
    return rounded if out is None else (out.float() + rounded.float()).to(out.dtype)
