"""The first and last kernels of a step, on the device: a decode step's inputs from the row state, and the update of
that state with the sampled tokens.

`write_words` applies the host's updates of the rows (`step_state`), `prepare_decode` gathers a decode step's inputs
from them, `finish_rows` appends the step's tokens and notifies the host. So one step follows another without a host
round trip.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl
from ringcore.kernels.steps.step_end import end_step
from ringcore.kernels.steps.step_state import (
    BAD_HIDDEN,
    BAD_LOGITS,
    LAST_TOKEN,
    NUM_CACHED,
    NUM_COMPUTED,
    NUM_PROMPT,
    NUM_STOPS,
    OFFSET_SHIFT,
    PARAMETERS,
    RING_HEAD,
    ROW_MASK,
    STEP_COUNT,
    STOPPED,
    DecodeInputs,
    StateLayout,
)

__all__ = ["RaggedRows", "fill_last_tokens", "finish_rows", "prepare_decode", "write_words"]

_RING_HEAD = tl.constexpr(RING_HEAD)
_BAD_LOGITS = tl.constexpr(BAD_LOGITS)
_BAD_HIDDEN = tl.constexpr(BAD_HIDDEN)

_WORDS = 1024  # per program of `write_words`
_TABLE_BLOCK = 128  # block table entries copied per iteration
_FINITE_BLOCK = 256  # tokens of a row whose `finite` is read per iteration


@triton.jit(do_not_specialize=["num_words"])
def _write_words(state, places, words, num_words, block: tl.constexpr):
    index = tl.program_id(0) * block + tl.arange(0, block)
    mask = index < num_words
    place = tl.load(places + index, mask=mask, other=0)
    tl.store(state + place, tl.load(words + index, mask=mask, other=0), mask=mask)


def write_words(state: torch.Tensor, places: torch.Tensor, words: torch.Tensor, num_words: int) -> None:
    """Scatters: state[places[i]] = words[i] for the first `num_words`; of several words for one place any may win.

    places and words: [num_words or more] int32, on the device or in pinned host memory, which the kernel reads over the
    bus.
    """
    assert state.dtype == places.dtype == words.dtype == torch.int32
    assert num_words <= len(places)
    assert num_words <= len(words)
    if num_words:
        _write_words[(triton.cdiv(num_words, _WORDS),)](state, places, words, num_words, block=_WORDS)


@triton.jit
def _prepare_decode(
    state,
    input_ids,
    positions,
    seq_lens,
    slots,
    block_table,
    parameters,  # [max_seqs, parameter_words]
    position,
    masked_start,
    masked_end,
    batch_at: tl.constexpr,
    drafts_at: tl.constexpr,
    records_at: tl.constexpr,
    record_words: tl.constexpr,
    stops_at: tl.constexpr,
    min_tokens_at: tl.constexpr,
    parameter_words: tl.constexpr,
    parameter_block: tl.constexpr,  # a power of two, parameter_words or more
    table_at: tl.constexpr,
    table_stride: tl.constexpr,
    out_stride: tl.constexpr,
    block_size: tl.constexpr,
    table_block: tl.constexpr,
    is_first: tl.constexpr,  # this launch also writes what all KV cache groups share
    pdl: tl.constexpr,
):
    """One program per place."""
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    place = tl.load(state + batch_at + i)
    offset = tl.maximum(place, 0) >> OFFSET_SHIFT
    known = (tl.maximum(place, 0) & ROW_MASK).to(tl.int64)
    at = records_at + known * record_words
    record = state + at
    is_live = (place >= 0) & (tl.load(record + STOPPED) == 0)
    computed = tl.load(record + NUM_COMPUTED) + offset
    here = tl.where(is_live, computed, 0)
    seq_len = tl.where(is_live, computed + 1, 0)
    table = state + table_at + known * table_stride
    # The slot is in the null block for padding and for a token whose keys are cached already.
    is_written = is_live & (here >= tl.load(record + NUM_CACHED))
    block = tl.where(is_written, tl.load(table + here // block_size), 0)
    tl.store(slots + i, block.to(tl.int64) * block_size + here % block_size)
    num_blocks = tl.cdiv(seq_len, block_size)
    for begin in range(0, num_blocks, table_block):
        index = begin + tl.arange(0, table_block)
        mask = index < num_blocks
        tl.store(block_table + i.to(tl.int64) * out_stride + index, tl.load(table + index, mask=mask), mask=mask)
    if is_first:
        token = tl.load(record + LAST_TOKEN)
        token = tl.where(offset > 0, tl.load(state + drafts_at + i, mask=offset > 0, other=0), token)
        tl.store(input_ids + i, tl.where(is_live, token, 0).to(tl.int64))
        tl.store(positions + i, here.to(tl.int64))
        tl.store(seq_lens + i, seq_len)
        word = tl.arange(0, parameter_block)
        is_word = word < parameter_words
        # Zeros for padding: a greedy row, which reads nothing else.
        words = tl.load(record + PARAMETERS + word, mask=is_word & is_live, other=0)
        tl.store(parameters + i * parameter_words + word, words, mask=is_word)
        tl.store(position + i, seq_len.to(tl.int64))
        is_early = is_live & (seq_len - tl.load(record + NUM_PROMPT) < tl.load(record + min_tokens_at))
        first_masked = (at + stops_at).to(tl.int32)
        tl.store(masked_start + i, first_masked)
        tl.store(masked_end + i, first_masked + tl.where(is_early, tl.load(record + NUM_STOPS), 0))


def prepare_decode(state: torch.Tensor, layout: StateLayout, inputs: DecodeInputs, num_seqs: int) -> None:
    """The inputs of a decode step, for the first `num_seqs` places of the persistent batch: a row's last token, and its
    drafts as further sequences, each one token longer than the one before, of the same block table.

    A place without a row, or with a stopped one, becomes padding: an empty sequence whose slot is in the null block. A
    block table row is filled up to its sequence's last block; the entries after it are stale.
    """
    assert num_seqs <= len(inputs.input_ids)
    to = inputs.sampling
    num_words = to.parameters.shape[1]
    pdl = supports_pdl(state.device)
    for group, (slots, table) in enumerate(zip(inputs.slots, inputs.block_tables, strict=True)):
        _prepare_decode[(num_seqs,)](
            state,
            inputs.input_ids,
            inputs.positions,
            inputs.seq_lens,
            slots,
            table,
            to.parameters,
            to.position,
            to.masked_start,
            to.masked_end,
            batch_at=layout.batch_at,
            drafts_at=layout.drafts_at,
            records_at=layout.records_at,
            record_words=layout.record_words,
            stops_at=layout.stops_at,
            min_tokens_at=layout.parameter_at("min_tokens"),
            parameter_words=num_words,
            parameter_block=triton.next_power_of_2(num_words),
            table_at=layout.table_at(group),
            table_stride=layout.table_stride(group),
            out_stride=table.stride(0),
            block_size=layout.block_sizes[group],
            table_block=_TABLE_BLOCK,
            is_first=group == 0,
            pdl=pdl,
            num_warps=1,
            **launch_options(pdl),
        )


@triton.jit
def _fill_last_tokens(state, input_ids, rows, records_at: tl.constexpr, record_words: tl.constexpr):
    i = tl.program_id(0)
    row = tl.load(rows + i).to(tl.int64)
    tl.store(input_ids + i, tl.load(state + records_at + row * record_words + LAST_TOKEN).to(tl.int64))


def fill_last_tokens(
    state: torch.Tensor, layout: StateLayout, input_ids: torch.Tensor, rows: torch.Tensor, num_seqs: int
) -> None:
    """input_ids [n] int64: the first `num_seqs` become the last tokens of rows [num_seqs or more] int32."""
    if num_seqs:
        _fill_last_tokens[(num_seqs,)](
            state, input_ids, rows, records_at=layout.records_at, record_words=layout.record_words, num_warps=1
        )


class RaggedRows(NamedTuple):
    """Per-row input of `finish_rows` for steps in which rows have several tokens, or do not sample."""

    starts: torch.Tensor  # [num_rows] int32: the first token of each in the step
    counts: torch.Tensor  # [num_rows] int32: its tokens, all of them computed now
    samples: torch.Tensor  # [num_rows] int32: its index in token_ids; -1: it does not sample
    finite: torch.Tensor  # [num_tokens] bool: whether the token's hidden state is finite


@triton.jit
def _finish_rows(
    state,
    rows,
    token_ids,
    ok,
    starts,
    counts,
    samples,
    finite,
    ring,
    records_at: tl.constexpr,
    record_words: tl.constexpr,
    stops_at: tl.constexpr,
    stops: tl.constexpr,  # a power of two, layout.max_stops or more
    ring_slots: tl.constexpr,  # a power of two
    ring_stride: tl.constexpr,
    is_decode: tl.constexpr,  # each row has one token and samples: `counts`, `samples` and `finite` are not read
    finite_block: tl.constexpr,  # tokens whose `finite` is read per iteration
    is_compiled: tl.constexpr,  # False in the interpreter, which has no fences
    pdl: tl.constexpr,
):
    """One program per row; the last one to arrive publishes the step to the host."""
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    step = tl.load(state + STEP_COUNT)
    row = tl.load(rows + i)
    slot = ring + (step & (ring_slots - 1)) * ring_stride
    if row >= 0:
        record = state + records_at + row.to(tl.int64) * record_words
        count = 1
        sample = i
        token = row * 0
        flags = row * 0
        if not is_decode:
            count = tl.load(counts + i)
            sample = tl.load(samples + i)
            begin = tl.load(starts + i)
            for at in range(0, count, finite_block):
                index = at + tl.arange(0, finite_block)
                good = tl.load(finite + begin + index, mask=index < count, other=1).to(tl.int32)
                flags |= tl.where(tl.min(good, axis=0) == 0, _BAD_HIDDEN, 0)
        if sample >= 0:
            token = tl.load(token_ids + sample).to(tl.int32)
            flags |= tl.where(tl.load(ok + sample).to(tl.int32) == 0, _BAD_LOGITS, 0)
        is_live = tl.load(record + STOPPED) == 0
        # A stopped row is padding: its flags have no meaning.
        tl.store(slot + _RING_HEAD + i, tl.where(is_live, token | flags, tl.load(record + LAST_TOKEN)))
        if is_live:
            tl.store(record + NUM_COMPUTED, tl.load(record + NUM_COMPUTED) + count)
            if sample >= 0:
                index = tl.arange(0, stops)
                is_stop = tl.load(record + stops_at + index, mask=index < tl.load(record + NUM_STOPS), other=-1)
                tl.store(record + LAST_TOKEN, token)
                tl.store(record + STOPPED, tl.max((is_stop == token).to(tl.int32), axis=0))
    end_step(state, slot, step, is_compiled)


def finish_rows(
    state: torch.Tensor,
    layout: StateLayout,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    ok: torch.Tensor,
    ring: torch.Tensor,
    num_rows: int,
    ragged: RaggedRows | None = None,
) -> None:
    """Appends a step's tokens to the rows and ends the step: writes them to the next slot of the result ring, then its
    step number.

    rows: [num_rows or more] int32, -1 is padding. token_ids: [n] int64 and ok: [n] bool, as sampled. ring: [slots,
    RING_HEAD + max_rows] int32, pinned; slots a power of two. Without `ragged`, row i computed one token and sampled
    token i. A row that samples one of its stop tokens is stopped: this and later launches do not change it.
    """
    assert num_rows > 0
    assert ring.shape[0] & (ring.shape[0] - 1) == 0, ring.shape
    assert ring.shape[1] >= RING_HEAD + num_rows, (ring.shape, num_rows)
    columns = (rows, rows, rows, rows) if ragged is None else ragged
    pdl = supports_pdl(state.device)
    _finish_rows[(num_rows,)](
        state, rows, token_ids, ok, *columns, ring, records_at=layout.records_at, record_words=layout.record_words,
        stops_at=layout.stops_at, stops=triton.next_power_of_2(max(1, layout.max_stops)), ring_slots=ring.shape[0],
        ring_stride=ring.stride(0), is_decode=ragged is None, finite_block=_FINITE_BLOCK, is_compiled=state.is_cuda,
        pdl=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip
