"""Applies a step's output: matches it with the requests that still run, and finds those that finish."""

from __future__ import annotations

from itertools import compress
from typing import NamedTuple, TypeVar

import numpy as np

from ringcore.protocol.requests import EngineCoreOutput, PooledPrompt, PromptLogprobs, TokenLogprobs
from ringcore.protocol.row_spans import ONE_EACH, RowSpans
from ringcore.protocol.steps import ModelRunnerOutput
from ringcore.scheduler.failures import failure, row_error
from ringcore.scheduler.request import Request
from ringcore.scheduler.running_table import RunningTable
from ringcore.scheduler.step import StepInFlight
from ringcore.scheduler.stop_tokens import StopTokens

__all__ = ["StepResults", "apply_output"]

_ALL = slice(None)
_OfPrompt = TypeVar("_OfPrompt", PromptLogprobs, PooledPrompt)


class StepResults(NamedTuple):
    """The sampled tokens of running requests: row i of `spans` is of the request at positions[i]."""

    positions: np.ndarray | slice  # [n] in the running table; a slice: all of it, in its order
    rows: np.ndarray  # [n] int32
    token_ids: np.ndarray  # [num_tokens] int32
    spans: RowSpans  # of token_ids and logprobs, n rows
    logprobs: list[TokenLogprobs | None] | None  # [num_tokens]
    failed: list[tuple[int, str]]  # positions of failed requests, and the worker's messages
    prompt_logprobs: list[PromptLogprobs]  # of some of `rows`
    pooled: list[PooledPrompt]  # likewise

    def ends(
        self, running: RunningTable, stop_tokens: StopTokens
    ) -> tuple[list[int], list[Request], list[EngineCoreOutput]]:
        """The finished requests: the indices of the complete ones, all complete or failed requests, their last
        outputs."""
        candidates = self._candidates(running, stop_tokens)
        if not candidates and not self.failed:
            return [], [], []
        requests = [running.request_at(position) for position, _ in self.failed]
        outputs = [
            failure(request, row_error(request, message))
            for request, (_, message) in zip(requests, self.failed, strict=True)
        ]
        indices = []
        rows, known = self.rows[candidates].tolist(), running.known[self.positions][candidates].tolist()
        new = self.spans.lists_of(candidates, self.token_ids)
        for index, row, num_known, token_ids in zip(candidates, rows, known, new, strict=True):
            request = running.request_in(row)
            if (last := self._last_output(index, request, num_known, token_ids)) is not None:
                indices.append(index)
                requests.append(request)
                outputs.append(last)
        return indices, requests, outputs

    def _candidates(self, running: RunningTable, stop_tokens: StopTokens) -> list[int]:
        """The indices of requests that may be complete, ascending."""
        hits, is_full = stop_tokens.hits(self.token_ids), running.num > 0 and running.room() <= 0
        if hits is None and not is_full:
            return []
        candidates = set() if hits is None else set(self.spans.rows_at(hits).tolist())
        if is_full:
            full = running.known[self.positions] >= running.max_total[self.positions]
            candidates.update(np.flatnonzero(full).tolist())
        return sorted(candidates)

    def _last_output(
        self, index: int, request: Request, num_known: int, token_ids: list[int]
    ) -> EngineCoreOutput | None:
        """The last output of a request that one of its new tokens completes; None if it continues."""
        # Without stop tokens only its length ends it, and no step samples past that.
        first = 1 if request.stop_token_ids else len(token_ids)
        for count in range(first, len(token_ids) + 1):
            num_tokens = num_known - len(token_ids) + count
            finish_reason, stop_reason = request.finish_reason(token_ids[count - 1], num_tokens)
            if finish_reason is not None:
                return request.to_output(
                    token_ids[:count],
                    logprobs=None if self.logprobs is None else self._logprobs_of(self.logprobs, index, count),
                    finish_reason=finish_reason,
                    stop_reason=stop_reason,
                    prompt_logprobs=_of_row(self.prompt_logprobs, request.row) if self.prompt_logprobs else None,
                    pooled=_of_row(self.pooled, request.row) if self.pooled else None,
                )
        return None

    def prompts_without(self, others: list[EngineCoreOutput]) -> tuple[list[PromptLogprobs], list[PooledPrompt]]:
        """What is of prompts, and not in these last outputs."""
        if not self.prompt_logprobs and not self.pooled:
            return [], []
        reported = {id(output.prompt_logprobs) for output in others} | {id(output.pooled) for output in others}
        return (
            [one for one in self.prompt_logprobs if id(one) not in reported],
            [one for one in self.pooled if id(one) not in reported],
        )

    def _logprobs_of(
        self, logprobs: list[TokenLogprobs | None], index: int, num_tokens: int
    ) -> list[TokenLogprobs] | None:
        """The logprobs of the first num_tokens tokens of one request, if it asked for any."""
        of_row = logprobs[self.spans.slice_of(index)]
        return [one for one in of_row[:num_tokens] if one is not None] or None

    def without(self, indices: list[int]) -> StepResults:
        """The tokens of the other requests."""
        if not indices:
            return self
        keep = np.ones(len(self.rows), dtype=bool)
        keep[indices] = False
        token_ids, spans, logprobs = _kept(self.token_ids, self.spans, self.logprobs, keep)
        return self._replace(rows=self.rows[keep], token_ids=token_ids, spans=spans, logprobs=logprobs)


def apply_output(step: StepInFlight, output: ModelRunnerOutput, running: RunningTable) -> StepResults:
    """Confirms the tokens that the step computed, and appends those that it sampled; drops results of requests that
    were preempted or ended since."""
    is_plain = step.num_steps == 1 and output.num_gained is None
    spans = ONE_EACH if is_plain else RowSpans(step.num_steps, output.num_gained)
    is_whole = step.samples is None and output.rows is None and not output.row_errors
    if is_whole and step.version == running.version:
        return _apply_whole(step, output, spans, _ALL, running)
    positions = running.positions_of_runs(step.rows, step.runs)
    if is_whole and (positions >= 0).all():
        return _apply_whole(step, output, spans, positions, running)
    return _apply_part(step, output, spans, positions, running)


def _apply_whole(
    step: StepInFlight, output: ModelRunnerOutput, spans: RowSpans, positions: np.ndarray | slice, running: RunningTable
) -> StepResults:
    """Every row of the step still runs, and has sampled. positions [n]: of the rows, or the slice of all."""
    _check_tokens(step, output, spans, step.max_gained, len(step.rows))
    if positions is _ALL and step.counts is None and step.max_gained is None and spans.counts is None:
        running.append_to_all(output.token_ids, step.num_steps)
    else:
        running.confirmed[positions] += step.num_steps if step.counts is None else step.counts
        if step.max_gained is not None:
            running.confirm_gains(positions, step.max_gained, spans.per_row)
        running.append_tokens(positions, output.token_ids, spans)
    prompts = output.prompt_logprobs, output.pooled
    return StepResults(positions, step.rows, output.token_ids, spans, output.logprobs, [], *prompts)


def _apply_part(
    step: StepInFlight, output: ModelRunnerOutput, spans: RowSpans, positions: np.ndarray, running: RunningTable
) -> StepResults:
    """Some rows of the step have ended, failed, or have more of their prompt to compute. positions [n]: -1 of those
    that have ended."""
    alive = positions >= 0
    messages = {error.row: error.message for error in output.row_errors}
    erring = np.isin(step.rows, [*messages]) if messages else np.zeros(len(step.rows), bool)
    good = alive & ~erring  # the prefix cache must not get blocks of an erring row
    running.confirmed[positions[good]] += step.num_steps if step.counts is None else step.counts[good]
    sampled = ~erring if step.samples is None else step.samples & ~erring
    _check_rows(step, output, sampled)
    max_gained = None if step.max_gained is None else step.max_gained[sampled]
    _check_tokens(step, output, spans, max_gained, int(sampled.sum()))
    failed = []
    if messages:
        failed = [(int(positions[index]), messages[int(step.rows[index])]) for index in np.flatnonzero(alive & erring)]
    here, kept = positions[alive & sampled], alive[sampled]
    token_ids, spans, logprobs = _kept(output.token_ids, spans, output.logprobs, kept)
    if max_gained is not None:
        running.confirm_gains(here, max_gained[kept], spans.per_row)
    running.append_tokens(here, token_ids, spans)
    rows = step.rows[alive & sampled]
    prompt_logprobs = output.prompt_logprobs and [one for one in output.prompt_logprobs if one.row in rows]
    pooled = output.pooled and [one for one in output.pooled if one.row in rows]
    return StepResults(here, rows, token_ids, spans, logprobs, failed, prompt_logprobs, pooled)


def _of_row(found: list[_OfPrompt], row: int | None) -> _OfPrompt | None:
    return next((one for one in found if one.row == row), None)


def _kept(
    token_ids: np.ndarray, spans: RowSpans, logprobs: list[TokenLogprobs | None] | None, keep: np.ndarray
) -> tuple[np.ndarray, RowSpans, list[TokenLogprobs | None] | None]:
    """The tokens, their spans and logprobs, of the rows that keep [n] bool selects."""
    if keep.all():
        return token_ids, spans, logprobs
    is_kept = spans.repeat(keep)
    return token_ids[is_kept], spans.kept(keep), None if logprobs is None else [*compress(logprobs, is_kept)]


def _check_rows(step: StepInFlight, output: ModelRunnerOutput, sampled: np.ndarray) -> None:
    """Asserts that the output is of exactly the step's rows in `sampled` [n] bool."""
    rows = step.rows if output.rows is None else output.rows
    assert np.array_equal(rows, step.rows[sampled]), f"step {step.step}: the workers sampled other rows than those due"


def _check_tokens(
    step: StepInFlight, output: ModelRunnerOutput, spans: RowSpans, max_gained: np.ndarray | None, num_rows: int
) -> None:
    """Asserts that each of `num_rows` rows gained a token, and none more than max_gained [num_rows], or `num_steps`."""
    assert len(output.token_ids) == spans.num_tokens(num_rows), f"step {step.step}: a token too many or too few"
    if spans.counts is None:
        return
    assert len(spans.counts) == num_rows, f"step {step.step}: a number of tokens for each row"
    most = step.num_steps if max_gained is None else max_gained
    assert ((spans.counts >= 1) & (spans.counts <= most)).all(), f"step {step.step}: a row gained too many or too few"
