"""Divides a step's token budget among the running requests and allocates their KV cache blocks; orders preemption
victims. Pure arithmetic on the columns of the running table and on the number of free blocks.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import numpy as np

from ringcore.kv_cache.manager import CachedPrefix, KVCacheManager
from ringcore.scheduler.request import Request
from ringcore.scheduler.running_table import RunningTable
from ringcore.scheduler.step import StepPlan

__all__ = [
    "add_drafts",
    "allocate_blocks",
    "divide_token_budget",
    "is_worth_starting",
    "num_victims_needed",
    "preemption_order",
    "steps_at_once",
]


LeftOut = Callable[[RunningTable, np.ndarray], np.ndarray]  # see `Turns.left_out`
_LEAST_SHARE = 8  # the first chunk of a prompt takes at least an eighth of the step's token budget


def divide_token_budget(
    plan: StepPlan, running: RunningTable, long_prefill_token_threshold: int | None, left_out: LeftOut | None = None
) -> None:
    """Divides `plan.token_budget` among the running requests, oldest first: one token for a decode, a chunk for a
    chunked prefill, at most `long_prefill_token_threshold` tokens each. left_out: of the turns in a pipeline.
    """
    if left_out is None and not running.has_prefill and running.num <= plan.token_budget and running.room() > 0:
        plan.positions = plan.counts = None
        return
    counts = running.total - running.computed
    counts[running.total >= running.max_total] = 0  # the steps in flight already sample its last token
    if long_prefill_token_threshold is not None:
        np.minimum(counts, long_prefill_token_threshold, out=counts)
    if left_out is not None:
        counts[left_out(running, counts)] = 0
    counts = _in_order(counts, plan.token_budget)
    plan.positions = np.flatnonzero(counts)
    plan.counts = counts[plan.positions]


def is_worth_starting(plan: StepPlan, max_num_batched_tokens: int) -> bool:
    """Whether a request whose prompt does not fit into what is left of the budget should start in this step: if its
    first chunk gets at least 1/`_LEAST_SHARE` of the budget, or if the step computes no other prompt.

    A smaller first chunk does not pay: attention is faster for whole prompts, and the rest of the prompt would make the
    next step no shorter.
    """
    return plan.token_budget * _LEAST_SHARE >= max_num_batched_tokens or not plan.computes_prompts


def allocate_blocks(plan: StepPlan, running: RunningTable, kv_cache: KVCacheManager) -> bool:
    """Allocates blocks for the tokens that `plan` gives to running requests. False, and nothing changed, if too
    few are free.
    """
    if plan.positions is None or plan.counts is None:
        lacking = (running.computed >= running.capacity).nonzero()[0]
        if not len(lacking):
            return True
        rows = running.row[lacking]
        # Each needs at most one block in each group: if so many are free, no exact count is needed.
        if len(rows) * len(kv_cache.config.groups) <= kv_cache.num_free_blocks:
            plan.append_blocks(kv_cache.extend_by_one(rows))
            running.capacity[lacking] = kv_cache.capacity[rows]
            return True
        num_tokens = running.computed[lacking] + 1
    else:
        after = running.computed[plan.positions] + plan.counts
        short = after > running.capacity[plan.positions]
        lacking, num_tokens = plan.positions[short], after[short]
        rows = running.row[lacking]
    if kv_cache.blocks_missing(rows, num_tokens) > kv_cache.num_free_blocks:
        return False
    if len(rows):
        plan.append_blocks(kv_cache.extend(rows, num_tokens))
        running.capacity[lacking] = kv_cache.capacity[rows]
    return True


def add_drafts(
    plan: StepPlan, running: RunningTable, kv_cache: KVCacheManager, max_row_tokens: int, lookahead: int = 0
) -> None:
    """Speculative decoding: lets running requests that decode gain several tokens in this step, oldest first.

    Their drafts take what `plan` leaves of the token budget and of the free blocks, at most `max_row_tokens` tokens in
    a row: no request computes less, or is preempted, for the drafts of another. lookahead: positions behind a row's
    drafts that get blocks too, where that many are free; with them a row has at most `max_row_tokens`, for which it was
    admitted.
    """
    positions = slice(plan.num_running) if plan.positions is None else plan.positions
    num_tokens, total = running.computed[positions] + 1, running.total[positions]
    most = np.minimum(np.minimum(running.max_gain[positions], max_row_tokens), running.max_total[positions] - total)
    drafts = _in_order(np.where(num_tokens == total, most - 1, 0), plan.token_budget)
    capacity, rows = running.capacity[positions], running.row[positions]
    ends = num_tokens + drafts
    behind = num_tokens + np.minimum(drafts + lookahead, max_row_tokens - 1)
    ahead = np.where(drafts > 0, np.minimum(behind, running.max_total[positions]), ends)
    wanted = next((one for one in (ahead, ends) if _fit(kv_cache, rows, one, capacity)), None)
    if wanted is None:
        drafts = np.where(ends > capacity, capacity - num_tokens, drafts)  # into the slots that they have
    elif (short := wanted > capacity).any():
        plan.append_blocks(kv_cache.extend(rows[short], wanted[short]))
        running.capacity[positions] = kv_cache.capacity[rows]
    if drafts.any():
        plan.max_gained = 1 + drafts


def _fit(kv_cache: KVCacheManager, rows: np.ndarray, num_tokens: np.ndarray, capacity: np.ndarray) -> bool:
    """Whether blocks are free for so many tokens of each row."""
    short = num_tokens > capacity
    return kv_cache.blocks_missing(rows[short], num_tokens[short]) <= kv_cache.num_free_blocks


def _in_order(wanted: np.ndarray, num_tokens: int) -> np.ndarray:
    """Of num_tokens, what each gets of the tokens that it wants, if the first are served first. [n] int64."""
    taken_before = np.cumsum(wanted) - wanted
    shares: np.ndarray = np.clip(num_tokens - taken_before, 0, wanted)
    return shares


def steps_at_once(
    plan: StepPlan, max_steps: int, running: RunningTable, kv_cache: KVCacheManager, steps_in_flight: int
) -> int:
    """Multi-step decode: how many steps may be scheduled as one, at most `max_steps`; allocates the blocks for them."""
    most = min(max_steps, running.room())
    if kv_cache.has_windows:  # blocks of tokens in flight are not released yet, and further one-token steps may follow
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


def preemption_order(running: RunningTable, by_priority: bool) -> np.ndarray:
    """The positions of all running requests, in the order of preemption.

    The worst priority first, under the priority policy; then the fewest computed tokens, as preemption is by recompute;
    then the latest arrival.
    """
    keys = [-running.sequence, running.computed]
    if by_priority:
        keys.append(-running.priority)
    return np.lexsort(keys)


def num_victims_needed(
    request: Request, prefix: CachedPrefix, rows: Sequence[int], has_row: bool, kv_cache: KVCacheManager
) -> int:
    """How many of `rows`, in their order, must be preempted for the request to start; 0 also if all are too few.

    has_row: whether a row is free. Preempting a row frees only its blocks with one reference, and blocks of the prefix
    do not count, as the request needs them itself.
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
