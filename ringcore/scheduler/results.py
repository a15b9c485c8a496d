"""Applies a step's output: matches it with the requests that still run, and finds those that finish."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringcore.protocol.requests import EngineCoreOutput, PromptLogprobs, TokenLogprobs
from ringcore.protocol.steps import ModelRunnerOutput
from ringcore.scheduler.failures import failure, row_error
from ringcore.scheduler.request import Request
from ringcore.scheduler.running_table import RunningTable
from ringcore.scheduler.step import StepInFlight
from ringcore.scheduler.stop_tokens import StopTokens

__all__ = ["StepResults", "apply_output"]

_ALL = slice(None)


class StepResults(NamedTuple):
    """The sampled tokens of running requests: row i of `token_ids` [n, num_steps] is of the request at positions[i]."""

    positions: np.ndarray | slice  # [n] in the running table; a slice: all of it, in its order
    rows: np.ndarray  # [n] int32
    token_ids: np.ndarray  # [n, num_steps] int32
    logprobs: list[TokenLogprobs | None] | None  # [n * num_steps]
    failed: list[tuple[int, str]]  # positions of failed requests, and the worker's messages
    prompt_logprobs: list[PromptLogprobs]  # of some of `rows`

    def ends(
        self, running: RunningTable, stop_tokens: StopTokens
    ) -> tuple[list[int], list[Request], list[EngineCoreOutput]]:
        """The finished requests: the indices of the complete ones, all complete or failed requests, their last outputs.

        The caller has appended the tokens.
        """
        requests = [running.request_at(position) for position, _ in self.failed]
        outputs = [
            failure(request, row_error(request, message))
            for request, (_, message) in zip(requests, self.failed, strict=True)
        ]
        indices = []
        for index in self._candidates(running, stop_tokens):
            position = index if isinstance(self.positions, slice) else int(self.positions[index])
            request = running.request_at(position)
            last = self._last_output(index, request, int(running.known[position]))
            if last is not None:
                indices.append(index)
                requests.append(request)
                outputs.append(last)
        return indices, requests, outputs

    def _candidates(self, running: RunningTable, stop_tokens: StopTokens) -> list[int]:
        """The indices of requests that may be complete, ascending."""
        hits = stop_tokens.hits(self.token_ids.reshape(-1))
        candidates = set() if hits is None else set((hits // self.token_ids.shape[1]).tolist())
        if running.num and running.room() <= 0:
            full = running.known[self.positions] >= running.max_total[self.positions]
            candidates.update(np.flatnonzero(full).tolist())
        return sorted(candidates)

    def _last_output(self, index: int, request: Request, num_known: int) -> EngineCoreOutput | None:
        """The last output of a request that one of its new tokens completes; None if it continues."""
        token_ids = self.token_ids[index].tolist()
        # Without stop tokens only its length ends it, and no step samples past that.
        first = 1 if request.stop_token_ids else len(token_ids)
        for count in range(first, len(token_ids) + 1):
            num_tokens = num_known - len(token_ids) + count
            finish_reason, stop_reason = request.finish_reason(token_ids[count - 1], num_tokens)
            if finish_reason is not None:
                return request.to_output(
                    token_ids[:count],
                    logprobs=self._logprobs_of(index, count),
                    finish_reason=finish_reason,
                    stop_reason=stop_reason,
                    prompt_logprobs=self._prompt_logprobs_of(request),
                )
        return None

    def _prompt_logprobs_of(self, request: Request) -> PromptLogprobs | None:
        return next((one for one in self.prompt_logprobs if one.row == request.row), None)

    def prompt_logprobs_without(self, others: list[EngineCoreOutput]) -> list[PromptLogprobs]:
        """The prompt logprobs that are not in these last outputs."""
        reported = {id(output.prompt_logprobs) for output in others}
        return [one for one in self.prompt_logprobs if id(one) not in reported]

    def _logprobs_of(self, index: int, num_tokens: int) -> list[TokenLogprobs] | None:
        """The logprobs of the first num_tokens tokens of one request, if it asked for any."""
        if self.logprobs is None:
            return None
        first = index * self.token_ids.shape[1]
        return [one for one in self.logprobs[first : first + num_tokens] if one is not None] or None

    def columns_without(self, indices: list[int]) -> tuple[np.ndarray, np.ndarray, list[TokenLogprobs | None] | None]:
        """Rows, token ids and logprobs of the other requests, as columns of `OutputColumns`."""
        if not indices:
            return self.rows, self.token_ids.reshape(-1), self.logprobs
        keep = np.ones(len(self.rows), dtype=bool)
        keep[indices] = False
        logprobs = _kept(self.logprobs, keep, self.token_ids.shape[1])
        return self.rows[keep], self.token_ids[keep].reshape(-1), logprobs


def apply_output(step: StepInFlight, output: ModelRunnerOutput, running: RunningTable) -> StepResults:
    """Confirms the tokens that the step computed, and drops results of requests that were preempted or ended since."""
    token_ids = output.token_ids.reshape(-1, step.num_steps)
    if step.version == running.version and step.samples is None and output.rows is None and not output.row_errors:
        assert len(token_ids) == running.num, f"step {step.step}: a token too many or too few"
        running.confirmed += step.num_steps
        return StepResults(_ALL, step.rows, token_ids, output.logprobs, [], output.prompt_logprobs)
    positions = running.positions_of_runs(step.rows, step.runs)
    alive = positions >= 0
    erring = np.isin(step.rows, [error.row for error in output.row_errors])
    good = alive & ~erring  # the prefix cache must not get blocks of an erring row
    running.confirmed[positions[good]] += step.num_steps if step.counts is None else step.counts[good]
    sampled = ~erring if step.samples is None else step.samples & ~erring
    _check_output(step, output, sampled)
    messages = {error.row: error.message for error in output.row_errors}
    failed = [(int(positions[index]), messages[int(step.rows[index])]) for index in np.flatnonzero(alive & erring)]
    here, kept = alive & sampled, alive[sampled]
    logprobs = _kept(output.logprobs, kept, step.num_steps)
    rows = step.rows[here]
    prompt_logprobs = output.prompt_logprobs and [one for one in output.prompt_logprobs if one.row in rows]
    return StepResults(positions[here], rows, token_ids[kept], logprobs, failed, prompt_logprobs)


def _kept(
    logprobs: list[TokenLogprobs | None] | None, keep: np.ndarray, num_steps: int
) -> list[TokenLogprobs | None] | None:
    """The entries of logprobs [n * num_steps] whose rows keep [n] selects."""
    if logprobs is None or keep.all():
        return logprobs
    return [one for one, is_kept in zip(logprobs, np.repeat(keep, num_steps), strict=True) if is_kept]


def _check_output(step: StepInFlight, output: ModelRunnerOutput, sampled: np.ndarray) -> None:
    """Asserts that the output has tokens of exactly the step's rows in `sampled` [n] bool."""
    rows = step.rows if output.rows is None else output.rows
    assert np.array_equal(rows, step.rows[sampled]), f"step {step.step}: the workers sampled other rows than those due"
    assert len(output.token_ids) == len(rows) * step.num_steps, f"step {step.step}: a token too many or too few"
