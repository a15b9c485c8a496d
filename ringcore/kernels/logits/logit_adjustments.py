"""Biases, penalties and token bitmasks on rows of logits, on the device: one pass, per-row parameters.

The grid is static, one program per row and tile, and all parameters are read on the device. Every operation is rounded
as IEEE 754 has it, and none is fused with another. So the result equals the reference,
`ringcore.model_executor.logit_adjustments`, bit by bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.logits.adjustment_inputs import IN_PROMPT, LogitAdjustments, reset_counts

__all__ = ["IN_PROMPT", "LogitAdjustments", "adjust_logits", "count_tokens", "reset_counts"]

_TILE_WORDS = 64  # bitmask words per program: 2048 logits, and 75 programs for a row of 151,936
_BIAS_BLOCK = 1024  # biases per iteration: mostly all of a row's
_COUNT_BLOCK = 128  # rows per program of `count_tokens`

_GENERATED = tl.constexpr(IN_PROMPT - 1)
_BEYOND = tl.constexpr(2**31 - 1)  # above every token id


@triton.jit
def _biases_within(
    bias_ids: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    first: tl.tensor,
    past: tl.tensor,
    block: tl.constexpr,
):
    """The sub-range [low, high) of the ascending bias_ids[start:end] whose ids lie in [first, past)."""
    low = start
    high = start
    for at in range(start, end, block):
        places = at + tl.arange(0, block)
        ids = tl.load(bias_ids + places, mask=places < end, other=_BEYOND)
        low += tl.sum((ids < first).to(tl.int32), axis=0)
        high += tl.sum((ids < past).to(tl.int32), axis=0)
    return low, high


@triton.jit
def _biased(
    x: tl.tensor,
    columns: tl.tensor,  # int32, the shape of x
    bias_ids: tl.tensor,
    bias_values: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
) -> tl.tensor:
    """x plus the biases [low, high), looked up by binary search per column."""
    if low < high:
        place = columns * 0 + low
        size = high - low
        while size > 1:  # a column with a bias is among the `size` ids from `place` on
            half = size // 2
            place = tl.where(tl.load(bias_ids + place + half) <= columns, place + half, place)
            size = size - half
        found = tl.load(bias_ids + place) == columns
        x = tl.where(found, x + tl.load(bias_values + place, mask=found, other=0.0), x)
    return x


@triton.jit
def _penalized(
    x: tl.tensor,
    columns: tl.tensor,
    is_counted: tl.tensor,
    counts: tl.tensor,  # pointer to the row's
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
) -> tl.tensor:
    seen = tl.load(counts + columns, mask=is_counted, other=0)
    times = (seen & _GENERATED).to(tl.float32)
    x = tl.where(seen != 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    return tl.where(times > 0, x - frequency * times - presence, x)


@triton.jit
def _masked(x: tl.tensor, words: tl.tensor, is_word: tl.tensor, masks: tl.tensor) -> tl.tensor:
    """x [words, 32], and -inf where the row's bit is not set; NaN stays, so that a broken row is detected."""
    word = tl.load(masks + words, mask=is_word, other=-1)
    allowed = ((word[:, None] >> tl.arange(0, 32)[None, :]) & 1) != 0
    return tl.where(allowed | (x != x), x, -float("inf"))


@triton.jit(
    do_not_specialize_on_alignment=[
        "repetition_penalty", "frequency_penalty", "presence_penalty", "counts_slot", "bias_start", "bias_end",
        "bias_ids", "bias_values", "mask_slot",
    ]
)  # fmt: skip
def _adjust_kernel(
    logits: tl.tensor,  # [n, vocab_size]
    row_stride: int,
    out: tl.tensor,  # [n, vocab_size] float32
    out_stride: int,
    repetition_penalty: tl.tensor,  # as in LogitAdjustments
    frequency_penalty: tl.tensor,
    presence_penalty: tl.tensor,
    counts_slot: tl.tensor,
    counts: tl.tensor,
    bias_start: tl.tensor,
    bias_end: tl.tensor,
    bias_ids: tl.tensor,
    bias_values: tl.tensor,
    mask_slot: tl.tensor,
    masks: tl.tensor,
    vocab_size: int,
    num_words: int,
    num_tiles: int,
    in_place: tl.constexpr,
    has_bias: tl.constexpr,
    has_penalties: tl.constexpr,
    has_masks: tl.constexpr,
    tile_words: tl.constexpr,
    bias_block: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    first_word = tl.program_id(0) % num_tiles * tile_words
    has_work = row < 0 if in_place else row >= 0  # out of place, unadjusted rows are copied
    if has_bias:
        first_bias = tl.load(bias_start + row)
        end_bias = tl.load(bias_end + row)
        has_work = has_work | (first_bias < end_bias)
    if has_penalties:
        count_row = tl.load(counts_slot + row).to(tl.int64)
        has_work = has_work | (count_row >= 0)
    if has_masks:
        mask_row = tl.load(mask_slot + row).to(tl.int64)
        has_work = has_work | (mask_row >= 0)
    if not has_work:
        return
    words = first_word + tl.arange(0, tile_words)
    columns = words[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_token = columns < vocab_size
    x = tl.load(logits + row * row_stride + columns, mask=is_token, other=0.0).to(tl.float32)
    if has_bias:
        first = first_word * 32
        low, high = _biases_within(bias_ids, first_bias, end_bias, first, first + tile_words * 32, bias_block)
        x = _biased(x, columns, bias_ids, bias_values, low, high)
    if has_penalties:
        is_counted = is_token & (count_row >= 0)
        repetition = tl.load(repetition_penalty + row)
        frequency = tl.load(frequency_penalty + row)
        presence = tl.load(presence_penalty + row)
        x = _penalized(x, columns, is_counted, counts + count_row * vocab_size, repetition, frequency, presence)
    if has_masks:
        x = _masked(x, words, (words < num_words) & (mask_row >= 0), masks + mask_row * num_words)
    tl.store(out + row * out_stride + columns, x, mask=is_token)


def adjust_logits(
    logits: torch.Tensor,
    adjustments: LogitAdjustments,
    *,
    out: torch.Tensor | None = None,
    bias: bool = True,
    penalties: bool = True,
    masks: bool = True,
) -> torch.Tensor:
    """logits + biases, with penalties, and -inf where a bitmask masks a token: [n, vocab_size] float32.

    Of a row x: x + bias; then, of tokens in the prompt or generated, x / r where it is above 0 and x * r elsewhere, r
    being the repetition penalty; then, of tokens generated, x - frequency_penalty * count - presence_penalty; then -inf
    for masked tokens. `bias`, `penalties` and `masks` select which of the three are applied. NaN stays NaN.

    logits: [n, vocab_size] of any float dtype, contiguous columns; computed in float32. `adjustments` has n rows or
    more. The result is in `out`, contiguous columns, where given. That may be `logits` itself, and rows without
    adjustments are then not touched; otherwise the two must not overlap, and such rows are copied. Does not synchronise
    with the device.
    """
    n, vocab_size = logits.shape
    if out is None:
        out = torch.empty(n, vocab_size, dtype=torch.float32, device=logits.device)
    assert (out.shape, out.dtype) == (logits.shape, torch.float32), (out.shape, out.dtype, logits.shape)
    for rows in (logits, out):
        assert rows.stride(1) == 1 or vocab_size == 1, "a row's logits must be contiguous"
    adjustments.check(n, vocab_size)
    in_place = out.data_ptr() == logits.data_ptr()
    assert not in_place or (out.dtype, out.stride()) == (logits.dtype, logits.stride()), "out overlaps logits"
    if not n or (in_place and not (bias or penalties or masks)):
        return out
    num_words = triton.cdiv(vocab_size, 32)
    num_tiles = triton.cdiv(num_words, _TILE_WORDS)
    a = adjustments
    _adjust_kernel[(n * num_tiles,)](
        logits, logits.stride(0), out, out.stride(0), a.repetition_penalty, a.frequency_penalty, a.presence_penalty,
        a.counts_slot, a.counts, a.bias_start, a.bias_end, a.bias_ids, a.bias_values, a.mask_slot, a.masks,
        vocab_size, num_words, num_tiles,
        in_place=in_place, has_bias=bias, has_penalties=penalties, has_masks=masks, tile_words=_TILE_WORDS,
        bias_block=_BIAS_BLOCK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["counts_slot", "token_ids"])
def _count_kernel(
    counts: tl.tensor,
    counts_slot: tl.tensor,
    token_ids: tl.tensor,
    num_rows: int,
    vocab_size: int,
    block: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * block + tl.arange(0, block)
    mask = rows < num_rows
    slots = tl.load(counts_slot + rows, mask=mask, other=-1).to(tl.int64)
    places = counts + slots * vocab_size + tl.load(token_ids + rows, mask=mask, other=0)
    is_counted = slots >= 0
    tl.store(places, tl.load(places, mask=is_counted, other=0) + 1, mask=is_counted)


def count_tokens(counts: torch.Tensor, counts_slot: torch.Tensor, token_ids: torch.Tensor) -> None:
    """counts[counts_slot[i], token_ids[i]] += 1 for every row i with a slot; does not synchronise with the device.

    counts: [slots, vocab_size] int32; counts_slot: [n] int32, -1 for none, no slot twice; token_ids: [n] int64.
    """
    n = len(token_ids)
    assert (token_ids.dim(), token_ids.dtype) == (1, torch.int64), (token_ids.shape, token_ids.dtype)
    assert (counts_slot.shape, counts_slot.dtype) == ((n,), torch.int32), (counts_slot.shape, counts_slot.dtype, n)
    assert token_ids.is_contiguous()
    assert counts_slot.is_contiguous()
    assert (counts.dim(), counts.dtype) == (2, torch.int32), (counts.shape, counts.dtype)
    assert counts.is_contiguous()
    if n:
        grid = (triton.cdiv(n, _COUNT_BLOCK),)
        _count_kernel[grid](counts, counts_slot, token_ids, n, counts.shape[1], block=_COUNT_BLOCK, num_warps=4)
