"""One engine replica of a simulation: the real EngineCore in virtual time, and the records of its requests.

Event-driven, not token by token: between two events (an arrival, an end, a prefill) all running requests decode, so
that the engine schedules these steps as one multi-step message, whose duration has a closed form.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ringcore.config import EngineConfig
from ringcore.engine_core.core import EngineCore
from ringcore.errors import CapacityError, InvalidRequestError, RingcoreError
from ringcore.host.log_histogram import LogHistogram
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.requests import EngineCoreOutput, EngineCoreRequest, EngineStats, OutputColumns
from ringcore.testing.clock import VirtualClock
from ringcore.testing.fake_executor import FakeExecutor
from ringcore.testing.hardware import Hardware
from ringcore.testing.prompts import PromptMaker
from ringcore.testing.speculator import FakeSpeculator
from ringcore.testing.step_cost import StepCost
from ringcore.testing.trace import Trace

__all__ = ["MAX_STEPS", "Records", "Replica", "ReplicaTotals"]

MAX_STEPS = 1 << 20  # scheduled as one


@dataclass(slots=True)
class Records:
    """The results of a trace's requests: times in seconds by request, NaN for events that did not happen."""

    first_token_s: np.ndarray  # [n] float64
    last_token_s: np.ndarray  # [n] float64
    finish_s: np.ndarray  # [n] float64
    num_tokens: np.ndarray  # [n] int64: output tokens
    itl: LogHistogram = field(default_factory=LogHistogram)
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    refusals: dict[str, str] = field(default_factory=dict)  # reason: the message of the first refusal

    @classmethod
    def empty(cls, num_requests: int) -> Records:
        return cls(
            first_token_s=np.full(num_requests, np.nan),
            last_token_s=np.full(num_requests, np.nan),
            finish_s=np.full(num_requests, np.nan),
            num_tokens=np.zeros(num_requests, dtype=np.int64),
        )

    def place(self, indices: np.ndarray, part: Records) -> None:
        """Merges the records `part` of the requests `indices`."""
        for own, theirs in (
            (self.first_token_s, part.first_token_s),
            (self.last_token_s, part.last_token_s),
            (self.finish_s, part.finish_s),
            (self.num_tokens, part.num_tokens),
        ):
            own[indices] = theirs
        self.itl.counts += part.itl.counts
        self.refused.update(part.refused)
        self.refusals = part.refusals | self.refusals

    def refuse(self, error: RingcoreError) -> None:
        reason = type(error).__name__
        if isinstance(error, InvalidRequestError):
            reason += f" ({error.details.get('field')})"
        self.refused[reason] += 1
        self.refusals.setdefault(reason, error.message)


@dataclass(frozen=True, slots=True)
class ReplicaTotals:
    """The totals of one replica."""

    num_requests: int
    busy_s: float
    num_steps: int
    num_advances: int  # calls of the engine
    num_preemptions: int
    num_prefix_hit_tokens: int
    num_prefix_query_tokens: int


class Replica:
    """An engine and its virtual clock.

    Steps run back to back while there is work; a request that arrives during a step is scheduled in the next one. So
    if no request arrives before `time_s`, all steps that begin before it may be simulated.
    """

    def __init__(
        self,
        config: EngineConfig,
        cost: StepCost,
        hardware: str | Hardware,
        trace: Trace,
        prompts: PromptMaker,
        records: Records,
        max_steps: int = MAX_STEPS,
        speculator: FakeSpeculator | None = None,
    ) -> None:
        """max_steps: the most steps scheduled as one; it does not change the results. Raises as `EngineCore`."""
        self._trace, self._prompts, self._records, self._cost = trace, prompts, records, cost
        self._max_steps = max_steps
        self._clock = VirtualClock()
        speculator = speculator or FakeSpeculator()
        self._max_gain = 1 + speculator.num_drafts
        self._executor = FakeExecutor(config, clock=self._clock, cost=cost, hardware=hardware, speculator=speculator)
        self._core = EngineCore(config, self._executor, clock=self._clock.now, max_gain=speculator.max_gain)
        self._request_of_row = np.zeros(config.scheduler.max_num_seqs, dtype=np.int64)
        self._has_windows = self._executor.worker.rows.has_windows
        self._stats: EngineStats = self._core.stats()
        self._fewest_tokens_waiting: float = math.inf  # a lower bound of the output tokens of any waiting request
        self._is_steady_decode = False  # the next step is a pure decode of the requests of the last one
        self._num_requests = self._num_advances = 0
        self.ended: list[tuple[float, int]] = []  # (time, request), in order; the simulator drains it

    # -----------------------------------------------------------------------------------------------------------
    # Events.

    def run_until(self, time_s: float) -> None:
        """Simulates every step that begins before `time_s`; the last one may end after it."""
        core, clock, rows = self._core, self._clock, self._executor.worker.rows
        while core.has_unfinished and (left_s := time_s - clock.now()) > 0:
            max_steps = self._max_steps
            if max_steps > 1 and left_s < math.inf:
                max_steps = self._cost.steps_begun(rows.decode_work(), left_s, max_steps)
            self._advance(max_steps)
        if time_s < math.inf:
            clock.sleep_until(time_s)

    def add(self, index: int) -> bool:
        """Adds a request at the current time, its arrival. False if the engine refuses it."""
        trace = self._trace
        request = EngineCoreRequest(
            request_id=str(index),
            prompt_token_ids=self._prompts.make(
                index, int(trace.prompt_tokens[index]), int(trace.prefix[index]), int(trace.prefix_tokens[index])
            ),
            # The same seed, and so the same accepted drafts, however the replicas are spread over processes.
            sampling_params=SamplingParams(
                max_tokens=int(trace.output_tokens[index]),
                ignore_eos=True,
                seed=round(trace.time_s[index] * 1e6) % (1 << 53),
            ),
            arrival_s=float(trace.time_s[index]),
            priority=int(trace.priority[index]),
        )
        self._is_steady_decode = False
        try:
            self._core.add_request(request)
        except (InvalidRequestError, CapacityError) as error:
            self._records.refuse(error)
            return False
        self._num_requests += 1
        self._fewest_tokens_waiting = min(self._fewest_tokens_waiting, self._tokens_to_get(index))
        return True

    def _tokens_to_get(self, index: int) -> int:
        prompt, output = int(self._trace.prompt_tokens[index]), int(self._trace.output_tokens[index])
        return min(output, self._core.ready.max_model_len - prompt)

    def next_end_s(self) -> float:
        """A lower bound of the next request's end time if none arrives; infinity without requests."""
        if not self._core.has_unfinished:
            return math.inf
        rows, num_free = self._executor.worker.rows, self._stats.num_free_blocks
        num_steps = rows.steps_to_next_end()
        if not self._is_steady_decode:
            least_s = min(num_steps, self._fewest_tokens_waiting) / self._max_gain * self._cost.base_s
        else:
            # With too few blocks a request is preempted, which ends the steady decode.
            if rows.blocks_missing(num_steps) > num_free:
                num_steps = bisect.bisect_right(range(1, num_steps), num_free, key=rows.blocks_missing)
            least_s = self._cost.run_seconds(rows.decode_work(), num_steps)
        return self._clock.now() + least_s * (1 - 1e-9)

    def finish(self) -> ReplicaTotals:
        """Runs until all requests have ended, and shuts the engine down."""
        self.run_until(math.inf)
        stats = self._core.stats()
        self._core.shutdown()
        return ReplicaTotals(
            num_requests=self._num_requests,
            busy_s=self._executor.busy_s,
            num_steps=self._executor.num_steps,
            num_advances=self._num_advances,
            num_preemptions=stats.num_preemptions,
            num_prefix_hit_tokens=stats.num_prefix_hit_tokens,
            num_prefix_query_tokens=stats.num_prefix_query_tokens,
        )

    def _may_start_at_any_step(self, stats: EngineStats) -> bool:
        """Whether a waiting request may start after any decode step, because the step changes the free blocks: blocks
        slide out of windows, or running requests grow, so that preempting one of them frees more.
        """
        scheduler = self._core.config.scheduler
        by_window = self._has_windows and stats.num_running < scheduler.max_num_seqs
        return stats.num_waiting > 0 and (by_window or scheduler.preempt_lower_priority)

    # -----------------------------------------------------------------------------------------------------------
    # Recording.

    def _advance(self, max_steps: int) -> None:
        begun_s, num_steps_before = self._clock.now(), self._executor.num_steps
        columns = self._core.advance(True, max_steps)
        self._num_advances += 1
        assert columns is not None, "there is work, and the engine does none"
        num_steps = self._executor.num_steps - num_steps_before
        assert num_steps, "the engine gave outputs without a step"
        self._record(columns, begun_s, num_steps)
        has_preempted = columns.stats.num_preemptions != self._stats.num_preemptions
        if has_preempted:
            self._fewest_tokens_waiting = 1
        elif not columns.stats.num_waiting:
            self._fewest_tokens_waiting = math.inf
        self._stats = columns.stats
        self._is_steady_decode = (
            self._max_gain == 1
            and not (columns.started or columns.others or has_preempted)
            and not self._may_start_at_any_step(columns.stats)
            and self._executor.worker.rows.is_decoding()
        )

    def _record(self, columns: OutputColumns, begun_s: float, num_steps: int) -> None:
        """Records the outputs of steps that began at `begun_s` and end now."""
        for started in columns.started:
            self._request_of_row[started.row] = int(started.request_id)
        requests = self._request_of_row[columns.rows]
        if columns.others:
            ended = [self._check_end(output, num_steps) for output in columns.others]
            requests = np.concatenate([requests, np.array(ended, dtype=np.int64)])
        if not len(requests):
            return
        records, end_s, work = self._records, self._clock.now(), self._executor.worker.last_work
        first_s = self._cost.seconds(work)
        self._record_tokens(requests, begun_s + first_s if num_steps > 1 else end_s)
        if num_steps > 1:
            growth = self._cost.per_context_token_s * work.num_seqs
            records.itl.add_run(first_s + growth, growth, num_steps - 1, len(requests))
            records.last_token_s[requests] = end_s
        num_gained = self._num_gained(columns, num_steps)
        records.num_tokens[requests] += num_gained
        if num_steps == 1:
            records.itl.add(np.zeros(int(num_gained.sum()) - len(requests)))  # those of one step come at once
        for index in requests[len(columns.rows) :].tolist():
            records.finish_s[index] = end_s
            self.ended.append((end_s, index))

    def _record_tokens(self, requests: np.ndarray, time_s: float) -> None:
        """Records the next token of each of these requests at `time_s`."""
        records = self._records
        since = time_s - records.last_token_s[requests]
        is_first = np.isnan(since)
        if is_first.any():
            records.first_token_s[requests[is_first]] = time_s
            since = since[~is_first]
        records.itl.add(since)
        records.last_token_s[requests] = time_s

    @staticmethod
    def _num_gained(columns: OutputColumns, num_steps: int) -> np.ndarray:
        """[n] int64: the new tokens of the requests in `rows`, then of those in `others`."""
        of_rows = np.full(len(columns.rows), num_steps) if columns.num_gained is None else columns.num_gained
        return np.append(of_rows, [len(output.new_token_ids) for output in columns.others]).astype(np.int64)

    def _check_end(self, output: EngineCoreOutput, num_steps: int) -> int:
        """The index of an ended request: it must have ended by its length, in the last step of a multi-step message."""
        assert output.error is None, f"request {output.request_id} failed: {output.error}"
        assert output.finish_reason == "length", f"request {output.request_id} ended by {output.finish_reason}"
        num_gained = len(output.new_token_ids)
        assert num_steps <= num_gained <= num_steps * self._max_gain, f"request {output.request_id} ended within steps"
        return int(output.request_id)
