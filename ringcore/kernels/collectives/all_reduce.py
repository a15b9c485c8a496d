"""One-shot collectives over peer GPU memory: all-reduce, and all-gather along the last dimension.

A rank stores its message into its buffers of all other ranks (`peer_buffers`), then receives theirs and reduces: a
message crosses the link once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ringcore.kernels.collectives.peer_buffers import (
    ALIGNMENT,
    PeerBuffers,
    load_words,
    numbers_of_words,
    peer_words,
    receive_words,
)
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options

__all__ = [
    "all_gather_last_dim",
    "all_gather_last_dim_reference",
    "all_reduce",
    "all_reduce_reference",
]

# (words, warps) of a tile: the smallest with which one tile per program covers the message
_TILES = ((128, 1), (512, 4), (2048, 16), (4096, 16))


@triton.jit
def _sum(words, more, number: tl.constexpr, has_more: tl.constexpr):
    """The sum over the first dimension of words [ranks, tile], plus `more` [tile]; accumulated in float32, rounded
    once."""
    if number.primitive_bitwidth == 32:
        total = tl.sum(words.to(tl.float32, bitcast=True), axis=0)
        if has_more:
            total += more.to(tl.float32, bitcast=True)
        result = total.to(tl.int32, bitcast=True)
    else:
        first, second = numbers_of_words(words, number)
        first, second = tl.sum(first, axis=0), tl.sum(second, axis=0)
        if has_more:
            more_first, more_second = numbers_of_words(more, number)
            first, second = first + more_first, second + more_second
        low = first.to(number).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = second.to(number).to(tl.int16, bitcast=True).to(tl.int32) << 16
        result = low | high
    return result


@triton.jit
def _sum_in_float32(words, pairs, number: tl.constexpr):
    """As `_sum` of 16-bit numbers, plus `pairs` [tile] int64, each of two float32 numbers; the result stays float32."""
    first, second = numbers_of_words(words, number)
    first = tl.sum(first, axis=0) + pairs.to(tl.int32).to(tl.float32, bitcast=True)
    second = tl.sum(second, axis=0) + (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    low = first.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return low | (second.to(tl.int32, bitcast=True).to(tl.int64) << 32)


@triton.jit
def _tile_of(index, row_words, tile: tl.constexpr):
    """(row, columns [tile], column mask) of tile number `index` of a message."""
    row_tiles = tl.cdiv(row_words, tile)
    columns = index % row_tiles * tile + tl.arange(0, tile)
    return index // row_tiles, columns, columns < row_words


@triton.jit(do_not_specialize=["rank", "num_rows", "row_quads"])
def _collective_kernel(
    message,  # [num_rows, row_quads * 16 bytes]
    residual,  # read where has_residual; as many numbers as message, of its dtype or float32
    out,  # gathers: [num_rows, size, row_quads * 16 bytes]; else as residual or message, and may be it
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
    peers = peer_words(addresses, sender, is_other)  # constant since start-up: may be read before the wait
    own = peer_words(addresses, rank, True)
    sender, is_other = sender[:, None], is_other[:, None]
    if pdl:
        gdc_wait()
    call = tl.load(calls + program)
    to = peers[:, None] + ((call & 1) * size + rank) * capacity
    at = own + ((call & 1) * size + sender) * capacity
    number: tl.constexpr = message.dtype.element_ty
    widens: tl.constexpr = number.primitive_bitwidth < out.dtype.element_ty.primitive_bitwidth
    result: tl.constexpr = tl.int64 if widens else tl.int32  # holds as many numbers as a word
    source, target = message.to(tl.pointer_type(tl.int32)), out.to(tl.pointer_type(result))
    row_words = row_quads * 4
    num_tiles = num_rows * tl.cdiv(row_words, tile)
    for index in range(program, num_tiles, tl.num_programs(0)):
        row, columns, mask = _tile_of(index, row_words, tile)
        offsets = tl.broadcast_to((row * row_words + columns)[None, :], (ranks, tile))
        words = load_words(source, offsets, mask[None, :] & (sender < size))
        tl.store(to + offsets, words, mask=mask[None, :] & is_other)
    for index in range(program, num_tiles, tl.num_programs(0)):
        row, columns, mask = _tile_of(index, row_words, tile)
        offsets = tl.broadcast_to((row * row_words + columns)[None, :], (ranks, tile))
        words = load_words(source, offsets, mask[None, :] & (sender == rank))  # zeros elsewhere
        more = columns  # unused without a residual
        if has_residual:
            more = tl.load(residual.to(tl.pointer_type(result)) + columns, mask=mask, other=0)  # in flight meanwhile
        words |= receive_words(at + offsets, mask[None, :] & is_other)
        if gathers:
            slots = (row * size + sender) * row_words + columns[None, :]
            tl.store(target + slots, words, mask=mask[None, :] & (sender < size))
        elif widens:
            tl.store(target + columns, _sum_in_float32(words, more, number), mask=mask)
        else:
            tl.store(target + columns, _sum(words, more, number, has_residual), mask=mask)
    tl.store(calls + program, call + 1)


def all_reduce(
    partial: torch.Tensor,
    buffers: PeerBuffers,
    *,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """out = the sum over ranks of `partial`, plus `residual` where given, which is equal on every rank.

    All of one shape and dtype (float32, bfloat16, float16), contiguous, such that `buffers.fits(partial)`; or
    `residual` and `out` float32 and `partial` of 16 bits. `out` may be `partial` or `residual`. Accumulated in float32
    in the same order on every rank and rounded once, to the dtype of `out`: the same bits on every rank.
    """
    assert buffers.fits(partial), (partial.shape, partial.dtype, buffers.capacity_bytes)
    added = out if residual is None else residual
    dtypes = (partial.dtype,) if residual is None else (partial.dtype, torch.float32)
    assert out.dtype in dtypes, (partial.dtype, out.dtype)
    assert out.dtype == added.dtype, (out.dtype, added.dtype)
    for tensor in (partial, out, added):
        assert tensor.shape == partial.shape, (tensor.shape, partial.shape)
        _check_layout(tensor)
    _launch(partial, residual, out, buffers, num_rows=1, gathers=False, pdl=pdl)
    return out


def all_reduce_reference(partials: Sequence[torch.Tensor], residual: torch.Tensor | None = None) -> torch.Tensor:
    """`all_reduce` in plain torch, of all ranks' partial sums in rank order."""
    total = torch.stack([partial.float() for partial in partials]).sum(0)
    if residual is None:
        return total.to(partials[0].dtype)
    return (total + residual.float()).to(residual.dtype)


def all_gather_last_dim(
    shard: torch.Tensor, buffers: PeerBuffers, *, out: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """[..., n] on each rank -> [..., n * size], in rank order. As `all_reduce`, with `buffers.fits_rows`.

    Every number arrives bit by bit, except that a NaN may become another NaN. `out` must not be `shard`.
    """
    assert buffers.fits_rows(shard), (shard.shape, shard.dtype, buffers.capacity_bytes)
    *before, length = shard.shape
    shape = (*before, length * buffers.size)
    if out is None:
        out = torch.empty(shape, dtype=shard.dtype, device=shard.device)
    assert (out.shape, out.dtype) == (shape, shard.dtype), (out.shape, out.dtype, shape)
    for tensor in (shard, out):
        _check_layout(tensor)
    _launch(shard, None, out, buffers, num_rows=shard.numel() // length, gathers=True, pdl=pdl)
    return out


def all_gather_last_dim_reference(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """`all_gather_last_dim` in plain torch, of all ranks' shards in rank order."""
    return torch.cat(list(shards), dim=-1)


def _launch(
    message: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    buffers: PeerBuffers,
    *,
    num_rows: int,
    gathers: bool,
    pdl: bool,
) -> None:
    num_bytes = message.numel() * message.itemsize
    programs = len(buffers.calls)
    share = -(-num_bytes // (4 * programs))
    tile, num_warps = next((tile for tile in _TILES if share <= tile[0]), _TILES[-1])
    _collective_kernel.run(
        message,
        message if residual is None else residual,
        out,
        buffers.addresses,
        buffers.calls,
        buffers.rank,
        num_rows,
        num_bytes // num_rows // ALIGNMENT,
        size=buffers.size,
        ranks=triton.next_power_of_2(buffers.size),
        capacity=buffers.capacity_bytes // 4,
        tile=tile,
        gathers=gathers,
        has_residual=residual is not None,
        pdl=pdl,
        num_warps=num_warps,
        num_stages=1,
        grid=(programs,),
        warmup=not buffers.launches,
        **launch_options(pdl),
    )


def _check_layout(tensor: torch.Tensor) -> None:
    assert tensor.is_contiguous(), "tensors must be contiguous"
    assert tensor.data_ptr() % ALIGNMENT == 0, "tensors must begin at a multiple of 16 bytes"
