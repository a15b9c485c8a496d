"""The launch stage of a CPU: a step is over when it is launched."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ringcore.config import EngineConfig
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.model_executor import logit_adjustments
from ringcore.model_executor.row_sampler import sample_by_row
from ringcore.model_executor.sampler import sample
from ringcore.protocol.steps import NewRequest, RowError
from ringcore.tracing import now_ns
from ringcore.tracing.kinds import COMPUTED
from ringcore.worker.drafts.proposer import draft, room_for_drafts
from ringcore.worker.logits.draft_turns import DraftTurns
from ringcore.worker.logits.row_adjustments import NO_TOKEN_LEFT, AdjustmentOps
from ringcore.worker.logits.sampling_stage import ALL_MASKED, not_finite
from ringcore.worker.logits.step_output import SampledRows
from ringcore.worker.rows.input_batch import InputBatch
from ringcore.worker.rows.request_rows import UNKNOWN_TOKEN, AppendedBlocks
from ringcore.worker.runner.draft_costs import HostSteps
from ringcore.worker.runner.stage_port import make_port
from ringcore.worker.runner.step_launcher import StepLauncher, StepStages

__all__ = ["HostLauncher"]


class HostStep:
    """A finished step."""

    def __init__(self, sampled: SampledRows) -> None:
        self._sampled = sampled

    def done(self) -> bool:
        return True

    def read(self) -> None:
        """A no-op: its errors are known."""

    def sampled(self) -> SampledRows:
        return self._sampled


class HostLauncher(StepLauncher):
    """The host's rows are the device's own memory, so the next step's input is gathered from them."""

    adjustment_ops = AdjustmentOps(logit_adjustments.adjust_logits, logit_adjustments.count_tokens)

    def __init__(self, stages: StepStages, config: EngineConfig, plan: KVCacheConfig) -> None:
        self._stages, self._timed = stages, HostSteps(stages, plan)
        self._most_positions = config.scheduler.max_sampled_positions
        self._draw = sample_by_row if config.model.deterministic else sample
        self._port = make_port(stages.link, stages.paged.model, stages.rows, stages.device, self._write_tokens)
        self._end = self._sample if stages.paged.model.stage.is_last else self._hand_on

    @property
    def max_unread_steps(self) -> int:
        return 0  # there is nothing to read

    def time_steps(self, sizes: Sequence[int]) -> tuple[list[float], float]:
        return [self._timed.seconds(size) for size in sizes], 0.0

    def mirror(self, new_requests: Sequence[NewRequest], appended: Sequence[AppendedBlocks]) -> None:
        """A no-op: the rows exist once."""

    def warm_up(self) -> None:
        """A no-op: a step has no state of its own."""

    @property
    def num_graphs_left(self) -> int:
        return 0

    def capture_graph(self) -> None:
        """A no-op."""

    def launch(
        self,
        scheduled: np.ndarray,
        counts: np.ndarray | None,
        errors: dict[int, RowError],
        max_gained: np.ndarray | None = None,
    ) -> HostStep:
        stages, tracer = self._stages, self._stages.tracer
        began = tracer.is_on and now_ns()
        self._port.await_tokens(scheduled)
        drafts = self._draft(scheduled, counts, max_gained)
        num_tokens = counts if drafts is None else drafts + (1 if counts is None else counts)
        batch = InputBatch.gather(stages.rows, scheduled, num_tokens, stages.device, drafts=drafts)
        starts = stages.rows.num_computed_tokens[scheduled]
        inputs = self._port.inputs(batch.input_ids)
        prepared = began and now_ns()
        hidden = stages.paged.forward_batch(inputs, batch)
        computed = began and now_ns()
        self._isolate_non_finite(batch, scheduled, drafts, hidden, errors)
        stages.prompt_logprobs.take(hidden, batch, scheduled, stages.rows)
        stages.pooled_prompts.take(hidden, batch, scheduled, stages.rows)
        stages.rows.advance(scheduled, counts)
        stages.adjustments.report_failed(scheduled, errors)
        sampled = self._end(batch, hidden, errors)
        if stages.proposer is not None:
            stages.proposer.take(scheduled, starts, num_tokens)
        if began:
            tracer.record((COMPUTED.number, began, prepared, computed, now_ns(), len(hidden), len(batch.sample_rows)))
        prompt_logprobs = stages.prompt_logprobs.finished(scheduled, stages.rows)
        pooled = stages.pooled_prompts.finished(scheduled, stages.rows)
        return HostStep(sampled._replace(prompt_logprobs=prompt_logprobs, pooled=pooled))

    def _draft(
        self, scheduled: np.ndarray, counts: np.ndarray | None, max_gained: np.ndarray | None
    ) -> np.ndarray | None:
        """Writes drafts after the last tokens of `scheduled` [n] -> how many each has, [n]; None: none has any."""
        rows, proposer = self._stages.rows, self._stages.proposer
        room = room_for_drafts(self._most_positions, rows, scheduled, counts, max_gained)
        if proposer is None or room is None:
            return None
        proposer.follow(room.rows, rows.num_tokens[room.rows])
        drafts = draft(proposer, rows, scheduled, room)
        return None if drafts is None else drafts.counts

    def _write_tokens(self, rows: np.ndarray, positions: np.ndarray, token_ids: torch.Tensor) -> None:
        self._stages.rows.token_ids[rows, positions] = token_ids.numpy()

    def _hand_on(self, batch: InputBatch, hidden: torch.Tensor, errors: dict[int, RowError]) -> SampledRows:
        """The end of a step in a stage that is not the last, which replies with no tokens."""
        rows, none = batch.sample_rows, batch.sample_rows[:0]
        self._port.send_rows(hidden)
        self._stages.rows.append_tokens(rows, UNKNOWN_TOKEN)
        self._port.expect_tokens(rows)
        return SampledRows(none, none, None)

    def _sample(self, batch: InputBatch, hidden: torch.Tensor, errors: dict[int, RowError]) -> SampledRows:
        stages, rows = self._stages, batch.sample_rows
        if not len(rows):
            return SampledRows(rows, rows, None)
        logits = stages.paged.model.compute_logits(batch.sampled_of(hidden))
        turns = DraftTurns(stages.rows, rows, batch.sample_drafts)
        while len(turns.rows):
            self._sample_turn(turns, turns.logits_of(logits), errors)
        return turns.sampled()

    def _sample_turn(self, turns: DraftTurns, logits: torch.Tensor, errors: dict[int, RowError]) -> None:
        """logits: [n, vocab_size], of the turn's rows [n]."""
        stages, rows = self._stages, turns.rows
        inputs = stages.rows.sampling_inputs(rows)
        sampled_ids = np.zeros(len(rows), dtype=np.int32)

        def draw(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            drawn = self._draw(logits, inputs)
            return drawn.token_ids, torch.from_numpy(drawn.ok)

        def append(token_ids: torch.Tensor, ok: torch.Tensor) -> None:
            sampled_ids[:] = token_ids.numpy()
            self._port.return_tokens(token_ids)
            turns.append(sampled_ids)  # also to rows with an error: the next step may be scheduled

        samples = stages.sampling.sample(logits, rows, draw, append, errors)
        for place in np.flatnonzero(~samples.ok.numpy()).tolist():
            row, is_masked = int(rows[place]), samples.is_adjusted and sampled_ids[place] == ALL_MASKED
            error = RowError(row, NO_TOKEN_LEFT) if is_masked else not_finite(row, "logits", stages.dtype)
            errors.setdefault(row, error)
        turns.end(sampled_ids, None if samples.logprobs is None else samples.logprobs.result())

    def _isolate_non_finite(
        self,
        batch: InputBatch,
        scheduled: np.ndarray,
        drafts: np.ndarray | None,
        hidden: torch.Tensor,
        errors: dict[int, RowError],
    ) -> None:
        """Finds rows with a non-finite hidden state [num_tokens, hidden_size], and zeroes their keys and values.

        A token's keys and values flow into its own hidden state, so this check covers the KV cache: another request may
        get the block next, and attention needs finite values even at the positions that it masks.
        """
        if math.isfinite(hidden.sum(dtype=torch.float32).item()):
            return
        stages = self._stages
        finite = torch.isfinite(hidden).all(dim=-1).numpy()
        non_finite = ~np.logical_and.reduceat(finite, batch.query_start_loc_cpu[:-1])
        if not non_finite.any():
            return
        rows, counts = scheduled[non_finite], np.diff(batch.query_start_loc_cpu)[non_finite]
        drafts = None if drafts is None else drafts[non_finite]
        stages.paged.zero_kv(InputBatch.gather(stages.rows, rows, counts, stages.device, drafts=drafts))
        for row in scheduled[non_finite].tolist():
            errors.setdefault(row, not_finite(row, "hidden states", stages.dtype))
