"""One engine replica of a simulation: the real EngineCore in virtual time, and what is recorded of its requests.

Nothing happens at each token: between two events (an arrival, an end, a prompt to compute) all running requests decode
alike, so that the engine takes these steps as one, and how long they take is known in closed form.
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
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.requests import EngineCoreOutput, EngineCoreRequest, EngineStats, OutputColumns
from ringcore.testing.clock import VirtualClock
from ringcore.testing.fake_executor import FakeExecutor
from ringcore.testing.hardware import Hardware
from ringcore.testing.log_histogram import LogHistogram
from ringcore.testing.prompts import PromptMaker
from ringcore.testing.step_cost import StepCost
from ringcore.testing.trace import Trace

__all__ = ["MAX_STEPS", "Records", "Replica", "ReplicaTotals"]

MAX_STEPS = 1 << 20  # taken as one


@dataclass(slots=True)
class Records:
    """What came of the requests of a trace: times in seconds by request, NaN where it did not come to that."""

    first_token_s: np.ndarray  # [n] float64
    last_token_s: np.ndarray  # [n] float64
    finish_s: np.ndarray  # [n] float64
    num_tokens: np.ndarray  # [n] int64: generated
    itl: LogHistogram = field(default_factory=LogHistogram)
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    refusals: dict[str, str] = field(default_factory=dict)  # reason: the message of its first one

    @classmethod
    def empty(cls, num_requests: int) -> Records:
        return cls(
            first_token_s=np.full(num_requests, np.nan),
            last_token_s=np.full(num_requests, np.nan),
            finish_s=np.full(num_requests, np.nan),
            num_tokens=np.zeros(num_requests, dtype=np.int64),
        )

    def place(self, indices: np.ndarray, part: Records) -> None:
        """Takes in what came of the requests `indices`, by their numbers among all."""
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
    """What one replica did in all."""

    num_requests: int
    busy_s: float
    num_steps: int
    num_advances: int  # calls of the engine that this took
    num_preemptions: int
    num_prefix_hit_tokens: int
    num_prefix_query_tokens: int


class Replica:
    """An engine and its virtual clock.

    Steps begin one after the other as long as there is work; a request that arrives while one runs is seen by the
    next. So when it is known that nothing arrives before `time_s`, all steps that begin before it may be taken.
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
    ) -> None:
        """max_steps: taken as one, at most; the results are the same for any. Raises as `EngineCore`."""
        self._trace, self._prompts, self._records, self._cost = trace, prompts, records, cost
        self._max_steps = max_steps
        self._clock = VirtualClock()
        self._executor = FakeExecutor(config, clock=self._clock, cost=cost, hardware=hardware)
        self._core = EngineCore(config, self._executor, clock=self._clock.now)
        self._request_of_row = np.zeros(config.scheduler.max_num_seqs, dtype=np.int64)
        self._has_windows = self._executor.worker.rows.has_windows
        self._stats: EngineStats = self._core.stats()
        self._fewest_tokens_waiting: float = math.inf  # no request that has no row gets fewer before it ends
        self._goes_on_alike = False  # the next step will be of the requests of the last one, each decoding
        self._num_requests = self._num_advances = 0
        self.ended: list[tuple[float, int]] = []  # (time, request), in order; the caller removes them

    # -----------------------------------------------------------------------------------------------------------
    # What happens.

    def run_until(self, time_s: float) -> None:
        """Takes every step that begins before `time_s`; the last one may end after it."""
        core, clock, rows = self._core, self._clock, self._executor.worker.rows
        while core.has_unfinished and (left_s := time_s - clock.now()) > 0:
            max_steps = self._max_steps
            if max_steps > 1 and left_s < math.inf:
                max_steps = self._cost.steps_begun(rows.decode_work(), left_s, max_steps)
            self._advance(max_steps)
        if time_s < math.inf:
            clock.sleep_until(time_s)

    def add(self, index: int) -> bool:
        """The request arrives, at the time that was run until. False if the engine refuses it."""
        trace = self._trace
        request = EngineCoreRequest(
            request_id=str(index),
            prompt_token_ids=self._prompts.make(
                index, int(trace.prompt_tokens[index]), int(trace.prefix[index]), int(trace.prefix_tokens[index])
            ),
            sampling_params=SamplingParams(max_tokens=int(trace.output_tokens[index]), ignore_eos=True, seed=index),
            arrival_s=float(trace.time_s[index]),
            priority=int(trace.priority[index]),
        )
        self._goes_on_alike = False
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
        """No request ends before this time, if none arrives; infinity where there is none."""
        if not self._core.has_unfinished:
            return math.inf
        rows, num_free = self._executor.worker.rows, self._stats.num_free_blocks
        num_steps = rows.steps_to_next_end()
        if not self._goes_on_alike:
            least_s = min(num_steps, self._fewest_tokens_waiting) * self._cost.base_s
        else:
            # With too few blocks a request is preempted, which ends the uniform decode.
            if rows.blocks_missing(num_steps) > num_free:
                num_steps = bisect.bisect_right(range(1, num_steps), num_free, key=rows.blocks_missing)
            least_s = self._cost.run_seconds(rows.decode_work(), num_steps)
        return self._clock.now() + least_s * (1 - 1e-9)

    def finish(self) -> ReplicaTotals:
        """Runs until all is done, and ends the engine."""
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
        """Whether one that waits may start after any step of the others, since blocks change hands in it: a window
        leaves some behind, or those that run grow, which makes more room when one of them is preempted.
        """
        scheduler = self._core.config.scheduler
        by_window = self._has_windows and stats.num_running < scheduler.max_num_seqs
        return stats.num_waiting > 0 and (by_window or scheduler.preempt_lower_priority)

    # -----------------------------------------------------------------------------------------------------------
    # What is recorded.

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
        self._goes_on_alike = (
            not (columns.started or columns.others or has_preempted)
            and not self._may_start_at_any_step(columns.stats)
            and self._executor.worker.rows.is_decoding()
        )

    def _record(self, columns: OutputColumns, begun_s: float, num_steps: int) -> None:
        """What came of steps that began at `begun_s` and end now: tokens, one of each request after each step."""
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
        records.num_tokens[requests] += num_steps
        for index in requests[len(columns.rows) :].tolist():
            records.finish_s[index] = end_s
            self.ended.append((end_s, index))

    def _record_tokens(self, requests: np.ndarray, time_s: float) -> None:
        """Each of these requests has its next token at this time."""
        records = self._records
        since = time_s - records.last_token_s[requests]
        is_first = np.isnan(since)
        if is_first.any():
            records.first_token_s[requests[is_first]] = time_s
            since = since[~is_first]
        records.itl.add(since)
        records.last_token_s[requests] = time_s

    @staticmethod
    def _check_end(output: EngineCoreOutput, num_steps: int) -> int:
        """The request. Nothing but its length ends one here, with the last step of those taken as one."""
        assert output.error is None, f"request {output.request_id} failed: {output.error}"
        assert output.finish_reason == "length", f"request {output.request_id} ended by {output.finish_reason}"
        assert len(output.new_token_ids) == num_steps, f"request {output.request_id} ended within several steps"
        return int(output.request_id)
