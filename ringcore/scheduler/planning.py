"""Token-budget shares, blocks and preemption victims of a step: pure arithmetic on the columns of the running batch."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from ringcore.kv_cache.manager import CachedPrefix, KVCacheManager
from ringcore.scheduler.request import Request
from ringcore.scheduler.running_table import RunningTable
from ringcore.scheduler.step import StepPlan

__all__ = ["is_worth_starting", "num_victims_needed", "share_budget", "steps_at_once", "take_blocks", "victims"]


_LEAST_SHARE = 8  # the first chunk of a prompt that does not fit has at least 1/8 of the token budget


def share_budget(plan: StepPlan, running: RunningTable, long_prefill_token_threshold: int | None) -> None:
    """Splits `plan.token_budget` over the running requests, oldest first: decodes one token, prefills a chunk."""
    if not running.has_prefill and running.num <= plan.token_budget and running.room() > 0:
        plan.positions = plan.counts = None
        return
    counts = running.total - running.computed
    counts[running.total >= running.max_total] = 0  # the tokens in flight are its last ones
    if long_prefill_token_threshold is not None:
        np.minimum(counts, long_prefill_token_threshold, out=counts)
    taken_before = np.cumsum(counts) - counts
    counts = np.clip(plan.token_budget - taken_before, 0, counts)
    plan.positions = np.flatnonzero(counts)
    plan.counts = counts[plan.positions]


def is_worth_starting(plan: StepPlan, num_tokens: int, max_num_batched_tokens: int) -> bool:
    """Whether a request with `num_tokens` to compute should start its prefill in this step: if it fits whole, if at
    least 1/8 of the budget is left (chunked prefill), or if the step has no other prefill.

    A tiny chunk in the tokens that other prompts leave does not pay: attention has a faster path for whole prompts, and
    the remaining chunk would make the next step as long.
    """
    fits = num_tokens <= plan.token_budget
    return fits or plan.token_budget * _LEAST_SHARE >= max_num_batched_tokens or not plan.computes_prompts


def take_blocks(plan: StepPlan, running: RunningTable, kv_cache: KVCacheManager) -> bool:
    """Allocates the blocks for every share; False, with no change, if too few are free."""
    if plan.positions is None or plan.counts is None:
        lacking = (running.computed >= running.capacity).nonzero()[0]
        if not len(lacking):
            return True
        rows = running.row_ids[lacking]
        # Fast path: a decode lacks at most one block per group; if so many are free, the exact count is not needed.
        if len(rows) * len(kv_cache.config.groups) <= kv_cache.num_free_blocks:
            plan.append_blocks(kv_cache.extend_by_one(rows))
            running.capacity[lacking] = kv_cache.capacity[rows]
            return True
        num_tokens = running.computed[lacking] + 1
    else:
        after = running.computed[plan.positions] + plan.counts
        short = after > running.capacity[plan.positions]
        lacking, num_tokens = plan.positions[short], after[short]
        rows = running.row_ids[lacking]
    if kv_cache.blocks_missing(rows, num_tokens) > kv_cache.num_free_blocks:
        return False
    if len(rows):
        plan.append_blocks(kv_cache.extend(rows, num_tokens))
        running.capacity[lacking] = kv_cache.capacity[rows]
    return True


def steps_at_once(
    plan: StepPlan, max_steps: int, running: RunningTable, kv_cache: KVCacheManager, steps_in_flight: int
) -> int:
    """How many decode steps can be scheduled as one (multi-step), at most `max_steps`; allocates their blocks."""
    most = min(max_steps, running.room())
    if kv_cache.has_windows:  # a window group has blocks for max_tokens_in_flight; later steps in flight need one each
        most = min(most, kv_cache.config.max_tokens_in_flight - (steps_in_flight - 1))

    def too_many(num_steps: int) -> bool:
        missing: int = kv_cache.blocks_missing(running.row, running.computed + num_steps)
        return missing > kv_cache.num_free_blocks

    num_steps = most
    if too_many(most):
        num_steps = bisect.bisect_left(range(2, most), True, key=too_many) + 1
    if kv_cache.blocks_missing(running.row, running.computed + num_steps):
        plan.append_blocks(kv_cache.extend(running.row, running.computed + num_steps))
        running.capacity[:] = kv_cache.capacity[running.row]
    return num_steps


def victims(running: RunningTable, by_priority: bool) -> np.ndarray:
    """The positions of the running requests, in the order of preemption (by recompute).

    By the worst priority under the policy "priority"; then the fewest computed tokens (the cheapest recompute); then
    the latest arrival.
    """
    keys = [-running.sequence, running.computed]
    if by_priority:
        keys.append(-running.priority)
    return np.lexsort(keys)


def num_victims_needed(
    request: Request, prefix: CachedPrefix, rows: Sequence[int], has_row: bool, kv_cache: KVCacheManager
) -> int:
    """How many of `rows`, in order, must be preempted for the request to start; 0 also if preempting all is not enough.

    has_row: whether a row is free. A victim frees its unshared blocks (reference count 1) that are not in `prefix`:
    the request needs the blocks of its prefix itself.
    """
    num_free = kv_cache.num_free_blocks
    needed = kv_cache.blocks_to_start(request.num_tokens_to_hold, prefix)
    for num_victims in range(len(rows) + 1):
        if has_row and needed <= num_free:
            return num_victims
        if num_victims < len(rows):
            num_free += kv_cache.num_unshared_blocks(rows[num_victims], prefix)
            has_row = True
    return 0
