"""A step: planned by the scheduler, then in flight until the scheduler applies the workers' output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from ringcore.kv_cache.block_store import Transfers
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import NewBlocks, NewRequest, SchedulerOutput
from ringcore.protocol.stored_kv import KVLoad, KVTransfers
from ringcore.scheduler.running_table import RunningTable

__all__ = ["StepInFlight", "StepPlan", "check_in_flight", "with_transfers"]

_NONE = int_array()
_ALL = slice(None)


class StepInFlight(NamedTuple):
    """A step in flight, as it was scheduled."""

    step: int
    num_steps: int
    version: int | None  # of the running table, where the step has all of it, in its order; else None
    rows: np.ndarray  # [n] int32
    runs: np.ndarray  # [n] int64
    counts: np.ndarray | None  # [n] int64: known tokens, without drafts; None: num_steps each
    samples: np.ndarray | None  # [n] bool; None: all sample
    max_gained: np.ndarray | None  # [n] int64: the most tokens that each gains if it samples; None: num_steps

    @property
    def num_tokens(self) -> int:
        """The known tokens that it computes."""
        return len(self.rows) * self.num_steps if self.counts is None else int(self.counts.sum())

    @property
    def num_drafts(self) -> int:
        """The most draft tokens that it computes."""
        return 0 if self.max_gained is None else int(self.max_gained.sum()) - len(self.max_gained)

    def tokens_by_run(self) -> Iterable[tuple[int, int]]:
        """By run the most tokens that it computes of it, drafts included."""
        counts = np.full(len(self.rows), self.num_steps) if self.counts is None else self.counts
        if self.max_gained is not None:
            counts = counts + self.max_gained - 1
        return zip(self.runs.tolist(), counts.tolist(), strict=True)

    def samples_by_run(self) -> Iterable[tuple[int, int]]:
        """By run the most tokens that it gains."""
        samples = np.ones(len(self.rows), dtype=bool) if self.samples is None else self.samples
        gains = samples * (self.num_steps if self.max_gained is None else self.max_gained)
        return zip(self.runs.tolist(), gains.tolist(), strict=True)

    def check(self, max_num_batched_tokens: int) -> None:
        num_tokens = self.num_tokens // self.num_steps + self.num_drafts
        assert self.num_steps == 1 or self.max_gained is None, f"step {self.step} has drafts, and several steps"
        assert (num_tokens > 0) == bool(len(self.rows)), f"step {self.step} has {num_tokens} tokens"
        assert num_tokens <= max_num_batched_tokens, f"step {self.step} has {num_tokens} tokens"
        assert len(set(self.rows.tolist())) == len(self.rows), f"step {self.step} has a row twice"


def check_in_flight(steps: Iterable[StepInFlight], running: RunningTable, max_num_batched_tokens: int) -> None:
    """Asserts that the columns count the tokens of these steps, all that are in flight."""
    tokens, samples = dict.fromkeys(running.run.tolist(), 0), dict.fromkeys(running.run.tolist(), 0)
    for step in steps:
        step.check(max_num_batched_tokens)
        for sums, counts in ((tokens, step.tokens_by_run()), (samples, step.samples_by_run())):
            for run, count in counts:
                if run in sums:
                    sums[run] += count
    assert (running.computed - running.confirmed).tolist() == list(tokens.values()), "tokens in flight"
    assert (running.total - running.known).tolist() == list(samples.values()), "tokens that no step will sample"


@dataclass(slots=True)
class StepPlan:
    """The contents of a step under construction; `token_budget` is what is left of the budget, in tokens.

    `max_gained` is of the running requests in the step, as `positions`.
    """

    token_budget: int
    positions: np.ndarray | None = None  # [n] int64: running requests that get tokens; None: all
    counts: np.ndarray | None = None  # [n] int64: their known tokens; None: one each
    max_gained: np.ndarray | None = None  # [n] int64: the most tokens that each may gain; None: one each
    num_running: int = 0  # before this step's new requests
    has_preempted: bool = False
    new_requests: list[NewRequest] = field(default_factory=list)
    new_counts: list[int] = field(default_factory=list)
    new_blocks: list[tuple[list[np.ndarray], list[np.ndarray]]] = field(default_factory=list)  # by group: rows, ids

    @property
    def is_empty(self) -> bool:
        return not self.new_counts and (self.num_running == 0 if self.positions is None else not len(self.positions))

    @property
    def decodes_all(self) -> bool:
        """Whether every running request gets one token and no request starts."""
        return self.positions is None and not self.new_counts

    @property
    def computes_prompts(self) -> bool:
        """Whether a request gets more than one token, or starts."""
        return bool(self.new_counts) or (self.counts is not None and bool((self.counts > 1).any()))

    def schedule_nothing(self) -> None:
        """No request is in the step: it only carries transfers."""
        self.positions = self.counts = np.zeros(0, np.int64)

    def append_blocks(self, by_group: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        if not self.new_blocks:
            self.new_blocks = [([], []) for _ in by_group]
        for (rows, block_ids), (more_rows, more_ids) in zip(self.new_blocks, by_group, strict=True):
            rows.append(more_rows)
            block_ids.append(more_ids)

    def add_new(self, num_tokens: int) -> None:
        """Counts a request that starts with `num_tokens` tokens; its message is appended to `new_requests` later."""
        self.new_counts.append(num_tokens)
        self.token_budget -= num_tokens

    def launch(self, step: int, num_steps: int, running: RunningTable) -> StepInFlight:
        """Puts the step in flight: its tokens count as computed, and those that it will sample as existing."""
        max_gained = None if self.max_gained is None else self._launch_drafts(self.max_gained, running)
        if self.decodes_all:
            running.schedule_all(num_steps)
            rows, runs = running.row_ids, running.run_ids
            return StepInFlight(step, num_steps, running.version, rows, runs, None, None, max_gained)
        positions, counts = self._all_shares(running.num)
        running.computed[positions] += counts
        running.last_step[positions] = step
        samples = running.computed[positions] == running.total[positions]
        running.total[positions] += samples
        running.min_room -= 1
        running.has_prefill = bool((running.total - running.computed > 1).any())
        version = running.version if len(counts) == running.num else None
        rows, runs = running.row_ids[positions], running.run_ids[positions]
        some = None if samples.all() else samples
        return StepInFlight(step, num_steps, version, rows, runs, counts, some, max_gained)

    def _launch_drafts(self, max_gained: np.ndarray, running: RunningTable) -> np.ndarray:
        """Counts all drafts as computed and accepted; returns the most tokens that each request of the step gains."""
        positions = slice(self.num_running) if self.positions is None else self.positions
        running.computed[positions] += max_gained - 1
        running.total[positions] += max_gained - 1
        running.min_room -= int(max_gained.max()) - 1
        return np.append(max_gained, np.ones(len(self.new_counts), dtype=np.int64))

    def _all_shares(self, num_running_now: int) -> tuple[np.ndarray | slice, np.ndarray]:
        """Positions and token counts of all requests in the step, new ones last. A slice: every running request."""
        positions = _ALL if self.positions is None else self.positions
        counts = np.ones(self.num_running, np.int64) if self.counts is None else self.counts
        if not self.new_counts:
            return positions, counts
        if self.positions is not None:
            started = np.arange(self.num_running, num_running_now)
            positions = np.concatenate((self.positions, started))
        return positions, np.concatenate((counts, self.new_counts))

    def to_output(self, step: StepInFlight, finished_rows: list[int], repeats_rows: bool) -> SchedulerOutput:
        """repeats_rows: whether the step's rows are those of the previous step, in its order."""
        return SchedulerOutput(
            step.step,
            step.num_steps,
            int_array(finished_rows) if finished_rows else _NONE,
            self.new_requests,
            [_new_blocks(rows, block_ids) for rows, block_ids in self.new_blocks],
            None if repeats_rows else step.rows,
            None if step.counts is None else int_array(step.counts),
            step.num_tokens,
            None if step.max_gained is None else int_array(step.max_gained),
        )


def with_transfers(output: SchedulerOutput, transfers: Transfers | None) -> SchedulerOutput:
    """The message with what the workers have to do for a store before the step."""
    if transfers is None:
        return output
    drops, saves, loads = transfers
    loads_now = [KVLoad(number, names, int_array(block_ids)) for number, names, block_ids in loads]
    message = KVTransfers(drops, list(saves), int_array(list(saves.values())), loads_now)
    return msgspec.structs.replace(output, kv_transfers=message)


def _new_blocks(rows: list[np.ndarray], block_ids: list[np.ndarray]) -> NewBlocks:
    if len(rows) == 1:
        return NewBlocks(rows[0], block_ids[0])
    return NewBlocks(np.concatenate(rows), np.concatenate(block_ids))
