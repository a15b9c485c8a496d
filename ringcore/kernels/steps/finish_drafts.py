"""The end of a decode step with drafts: which of them the model accepts, on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.steps.step_end import end_step
from ringcore.kernels.steps.step_state import (
    BAD_LOGITS,
    LAST_TOKEN,
    NOT_GAINED,
    NOT_GAINED_BAD,
    NUM_COMPUTED,
    NUM_STOPS,
    OFFSET_SHIFT,
    RING_HEAD,
    ROW_MASK,
    STEP_COUNT,
    STOPPED,
    StateLayout,
)

__all__ = ["finish_drafts"]

_RING_HEAD = tl.constexpr(RING_HEAD)
_BAD_LOGITS = tl.constexpr(BAD_LOGITS)
_NOT_GAINED = tl.constexpr(NOT_GAINED)
_NOT_GAINED_BAD = tl.constexpr(NOT_GAINED_BAD)


@triton.jit(do_not_specialize=["num_places", "masked_token"])
def _finish_drafts(
    state,
    token_ids,
    ok,
    gained,
    ring,
    num_places,
    masked_token,
    batch_at: tl.constexpr,
    drafts_at: tl.constexpr,
    records_at: tl.constexpr,
    record_words: tl.constexpr,
    stops_at: tl.constexpr,
    stops: tl.constexpr,  # a power of two, layout.max_stops or more
    most: tl.constexpr,  # a power of two, the most places of a row or more
    ring_slots: tl.constexpr,  # a power of two
    ring_stride: tl.constexpr,
    is_compiled: tl.constexpr,
):
    """One program per place; that of a row's first place serves the row."""
    i = tl.program_id(0)
    step = tl.load(state + STEP_COUNT)
    slot = ring + (step & (ring_slots - 1)) * ring_stride
    row = tl.load(state + batch_at + i)
    if (row >= 0) & (row <= ROW_MASK):
        record = state + records_at + row.to(tl.int64) * record_words
        is_live = tl.load(record + STOPPED) == 0
        j = tl.arange(0, most)
        place = tl.load(state + batch_at + i + j, mask=i + j < num_places, other=-1)
        is_own = place == (row | (j << OFFSET_SHIFT))
        count = tl.sum(is_own.to(tl.int32), axis=0)
        token = tl.load(token_ids + i + j, mask=is_own, other=0).to(tl.int32)
        good = tl.load(ok + i + j, mask=is_own, other=1).to(tl.int32) != 0
        has_next = j + 1 < count
        draft = tl.load(state + drafts_at + i + j + 1, mask=has_next, other=0)
        is_right = has_next & good & (token == draft)
        last = tl.min(tl.where(is_right, most, j), axis=0)  # the first whose draft is wrong, or that has none
        is_gained = (j <= last) & is_live
        lost = tl.where(good | (token == masked_token) | (j <= last), _NOT_GAINED, _NOT_GAINED_BAD)
        word = tl.where(is_gained, token | tl.where(good, 0, _BAD_LOGITS), lost)
        # A stopped row is padding: its word has no meaning.
        word = tl.where((j == 0) & (is_live == 0), tl.load(record + LAST_TOKEN), word)
        word = tl.where((j > 0) & (is_live == 0), _NOT_GAINED, word)
        tl.store(slot + _RING_HEAD + i + j, word, mask=is_own)
        tl.store(gained + i + j, is_gained.to(tl.int32), mask=is_own)
        if is_live:
            index = tl.arange(0, stops)
            stop = tl.load(record + stops_at + index, mask=index < tl.load(record + NUM_STOPS), other=-1)
            is_stop = is_gained[:, None] & (token[:, None] == stop[None, :])
            tl.store(record + NUM_COMPUTED, tl.load(record + NUM_COMPUTED) + last + 1)
            tl.store(record + LAST_TOKEN, tl.sum(tl.where(j == last, token, 0), axis=0))
            tl.store(record + STOPPED, tl.max(tl.max(is_stop.to(tl.int32), axis=1), axis=0))
    end_step(state, slot, step, is_compiled)


def finish_drafts(
    state: torch.Tensor,
    layout: StateLayout,
    token_ids: torch.Tensor,
    ok: torch.Tensor,
    gained: torch.Tensor,
    ring: torch.Tensor,
    num_places: int,
    max_drafts: int,
    masked_token: int = -1,
) -> None:
    """Ends a decode step whose batch has drafts: of each row the token that it sampled after its last one and those
    after drafts that were sampled before, up to the first that was not. The others are written over by later steps.

    token_ids: [num_places] int64 and ok: [num_places] bool, as sampled after each place. gained: [num_places] int32, on
    return 1 where the row gained the token. ring: as of `finish_rows`, a word per place; `NOT_GAINED` of the others,
    and `NOT_GAINED_BAD` where they are not ok and not masked_token. A row that gains one of its stop tokens is stopped.
    """
    assert num_places > 0
    assert ring.shape[0] & (ring.shape[0] - 1) == 0, ring.shape
    assert ring.shape[1] >= RING_HEAD + num_places, (ring.shape, num_places)
    _finish_drafts[(num_places,)](
        state, token_ids, ok, gained, ring, num_places, masked_token, batch_at=layout.batch_at,
        drafts_at=layout.drafts_at, records_at=layout.records_at, record_words=layout.record_words,
        stops_at=layout.stops_at, stops=triton.next_power_of_2(max(1, layout.max_stops)),
        most=triton.next_power_of_2(1 + max_drafts), ring_slots=ring.shape[0], ring_stride=ring.stride(0),
        is_compiled=state.is_cuda, num_warps=1,
    )  # fmt: skip
