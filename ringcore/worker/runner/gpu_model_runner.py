"""Runs steps on a GPU: `execute` launches them asynchronously; their tokens are read later from a pinned ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ringcore.config import EngineConfig
from ringcore.kernels import logit_adjustments
from ringcore.kernels.sampling import DeviceSamplingInputs, sample_tokens
from ringcore.kernels.step import RaggedRows, fill_last_tokens, finish_rows
from ringcore.kernels.step_state import BAD_HIDDEN, BAD_LOGITS
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.model_executor.sampler import PendingLogprobs, launch_logprobs
from ringcore.protocol.steps import ModelRunnerOutput, RowError, SchedulerOutput
from ringcore.worker.logits.prompt_logprobs import LaunchedPromptLogprobs
from ringcore.worker.logits.result_ring import ResultRing
from ringcore.worker.logits.row_adjustments import NO_TOKEN_LEFT, AdjustmentOps
from ringcore.worker.logits.step_output import SampledRows, make_output
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.rows.device_rows import DeviceRows
from ringcore.worker.rows.input_batch import InputBatch
from ringcore.worker.rows.request_rows import UNKNOWN_TOKEN
from ringcore.worker.rows.upload import upload
from ringcore.worker.runner.cuda_graphs import DecodeGraphs, DecodeStep, MixedGraphs
from ringcore.worker.runner.model_runner import LoadedModel, ModelRunner

__all__ = ["GPUModelRunner", "LaunchedOutput"]

_FLAGS = BAD_LOGITS | BAD_HIDDEN
_ALL_MASKED = 1  # in place of a token id, in an adjusted step: the logits are finite, but every token is masked


class _BatchOrder(NamedTuple):
    """The order of a step's rows in its batch."""

    scheduled: np.ndarray  # [n] int32: decoding rows first
    counts: np.ndarray | None  # [n] int32: tokens of each; None: one
    num_decodes: int
    inverse: np.ndarray | None  # [n]: the batch index of each row of the message; None: the same order


@dataclass(slots=True)
class LaunchedStep:
    """One step in flight."""

    number: int  # in the result ring
    rows: np.ndarray  # [n] int32, in the order of the batch
    starts: np.ndarray  # [n] int64: the position of each row's first token in the step
    admissions: np.ndarray  # [n]: identifies the row's request, see `RequestRows.num_admissions`
    sampling: np.ndarray  # [num_sampled]: batch indices of the rows that sample, in the message's order
    logprobs: PendingLogprobs | None  # in the order of the batch
    errors: dict[int, RowError]  # of the whole message, by row
    ends: np.ndarray  # [n] int64: one past the position of each row's last token in the step
    is_adjusted: bool  # whether any row's logits were adjusted before sampling
    prompt_logprobs: Sequence[LaunchedPromptLogprobs]
    words: np.ndarray | None = None  # [n] int32: the result ring's words; None: not read yet

    def sampled(self) -> SampledRows:
        """The samples of a step that was read."""
        assert self.words is not None
        logprobs = None
        if self.logprobs is not None:
            found = self.logprobs.result()
            logprobs = [found[index] for index in self.sampling.argsort().argsort().tolist()]
        token_ids = self.words[self.sampling] & ~_FLAGS
        return SampledRows(self.rows[self.sampling], token_ids, logprobs, self.prompt_logprobs)


class _LaunchedSamples(NamedTuple):
    """The samples of a launched step, for the rows that sample."""

    token_ids: torch.Tensor  # [num_sampled] int64
    ok: torch.Tensor  # [num_sampled] bool
    logprobs: PendingLogprobs | None
    is_adjusted: bool


class GPUModelRunner(ModelRunner):
    """As `ModelRunner`, but `execute` returns before the device has done the work (async scheduling). Sampled tokens
    stay on the device, where the row's next step reads them; the host reads them one or more steps later.

    A step in which every row decodes is a `DecodeStep`, a CUDA graph unless `enforce_eager`. The host gathers the batch
    of any other (mixed) step; the forward pass is a graph too where the step is small, else launched eagerly. A step
    with adjusted logits is launched in two parts. Between them the host waits for the tokens of earlier steps if a row
    `needs_token_ids`, while the device computes the first part.
    """

    adjustment_ops = AdjustmentOps(logit_adjustments.adjust_logits, logit_adjustments.count_tokens)

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, kv_cache_config: KVCacheConfig, platform: Platform, rank: int
    ) -> None:
        """Allocates the pages. Raises `CapacityError` or `ConfigError`."""
        super().__init__(config, loaded, kv_cache_config, platform, rank)
        self.ring = ResultRing(config.scheduler.max_num_seqs, self._device)
        self._device_rows = DeviceRows(self.rows, self._device)
        self._unread_steps: list[LaunchedStep] = []  # with rows that `needs_token_ids`: read before their next sampling
        self._decode: DecodeStep | None = None
        self._mixed: MixedGraphs | None = None
        parts = (self._model, self._backends, self._group_of_layer, self._kv_caches, self._device_rows)
        is_eager = config.device.enforce_eager or self._device.type != "cuda"
        none = torch.zeros(2, dtype=torch.int32, device=self._device)
        one = none[:1], none[None, :1]  # the length and the block table of one sequence
        if all(backend.plan_on_device(*one) is not None for backend in self._backends):
            self._decode = DecodeStep(*parts, self.ring) if is_eager else DecodeGraphs(*parts, self.ring)
        plans = (backend.plan_mixed_on_device(none, *one, none[:1], 1) for backend in self._backends)
        if not is_eager and all(plan is not None for plan in plans):
            self._mixed = MixedGraphs(*parts, config.scheduler.token_budget)

    @torch.inference_mode()
    def warm_up(self) -> None:
        super().warm_up()
        if self._decode is not None:
            self._decode.warm_up()

    @property
    def num_graphs_left(self) -> int:
        return sum(len(graphs.missing) for graphs in self._all_graphs)

    @torch.inference_mode()
    def capture_graph(self) -> None:
        """Decoding graphs before mixed ones: they are launched more often."""
        graphs = next((graphs for graphs in self._all_graphs if graphs.missing), None)
        if graphs is not None:
            graphs.capture(graphs.missing[-1])

    @property
    def _all_graphs(self) -> list[DecodeGraphs | MixedGraphs]:
        return [graphs for graphs in (self._decode, self._mixed) if isinstance(graphs, DecodeGraphs | MixedGraphs)]

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> LaunchedOutput:
        """Launches the one or several steps of a message; the returned object's `result()` is their output."""
        appended = self.rows.apply(step)
        self._device_rows.admit(step.new_requests, self.rows)
        self._device_rows.append(appended)
        scheduled, counts = self.rows.scheduled, step.num_scheduled_tokens
        output = LaunchedOutput(self, step.step, len(scheduled))
        if not len(scheduled):
            self._device_rows.write()
            return output
        for index in range(step.num_steps):
            output.read(index + 1 - self.ring.num_slots // 2)  # before its ring slot is reused
            launched = self._launch(scheduled, counts if index == 0 else None, output.errors)
            output.launched.append(launched)
            if launched.is_adjusted and self.adjustments.needs_token_ids[scheduled].any():
                self._unread_steps = [step for step in self._unread_steps if step.words is None] + [launched]
        return output

    def _launch(self, scheduled: np.ndarray, counts: np.ndarray | None, errors: dict[int, RowError]) -> LaunchedStep:
        self.adjustments.report_failed(scheduled, errors)
        starts = self.rows.num_computed_tokens[scheduled]
        # One uncomputed token: the row decodes.
        is_decode = starts + 1 == self.rows.num_tokens[scheduled]
        if counts is not None:
            is_decode &= counts == 1
        if self._decode is not None and is_decode.all():
            return self._launch_decode(scheduled, starts, errors)
        return self._launch_ragged(_decodes_first(scheduled, counts, is_decode), errors)

    def _launch_decode(self, scheduled: np.ndarray, starts: np.ndarray, errors: dict[int, RowError]) -> LaunchedStep:
        assert self._decode is not None
        is_adjusted = bool(self.adjustments.is_adjusted[scheduled].any())
        if is_adjusted:
            logits = self._decode.launch_logits(scheduled)
        else:
            logits, token_ids = self._decode.launch(scheduled)
        self.rows.advance(scheduled, None)
        if is_adjusted:
            adjusted = self._adjust(logits, scheduled, errors)
            token_ids = self._decode.launch_sampling(adjusted, partial(_mark_fully_masked, logits))
            self.adjustments.count(scheduled, token_ids)
            del adjusted  # frees the memory for log-probabilities, which are of the model's raw logits
        logprobs = None
        if self.is_output_rank:
            logprobs = launch_logprobs(logits, token_ids, self.rows.num_logprobs[scheduled])
        self.rows.append_tokens(scheduled, UNKNOWN_TOKEN)
        return LaunchedStep(
            number=self.ring.num_launched,
            rows=scheduled,
            starts=starts,
            admissions=self.rows.num_admissions[scheduled],
            sampling=np.arange(len(scheduled)),
            logprobs=logprobs,
            errors=errors,
            ends=starts + 1,
            is_adjusted=is_adjusted,
            prompt_logprobs=self._finished_prompt_logprobs(scheduled),
        )

    def _launch_ragged(self, order: _BatchOrder, errors: dict[int, RowError]) -> LaunchedStep:
        self._device_rows.write()
        rows, scheduled, device = self.rows, order.scheduled, self._device
        starts = rows.num_computed_tokens[scheduled]
        batch = InputBatch.gather(rows, scheduled, order.counts, device, num_decodes=order.num_decodes)
        on_device = upload(scheduled, device)
        state, layout = self._device_rows.state, self._device_rows.layout
        fill_last_tokens(state, layout, batch.input_ids, on_device, order.num_decodes)
        graphs = self._mixed if self._mixed is not None and len(batch.input_ids) <= self._mixed.max_tokens else None
        hidden = self._forward(batch) if graphs is None else graphs.forward(batch)
        self._take_prompt_logprobs(batch, scheduled, hidden)
        rows.advance(scheduled, order.counts)
        samples = self._sample_ragged(batch, hidden, errors)
        sampling = np.isin(scheduled, batch.sample_rows)
        sample_index = np.where(sampling, np.cumsum(sampling) - 1, -1)
        counts = np.ones(len(scheduled), dtype=np.int64) if order.counts is None else order.counts
        ragged = RaggedRows(
            starts=upload(batch.query_start_loc_cpu[:-1], device),
            counts=upload(counts.astype(np.int32), device),
            samples=upload(sample_index.astype(np.int32), device),
            finite=torch.isfinite(hidden.sum(-1, dtype=torch.float32)),
        )
        finish_rows(state, layout, on_device, samples.token_ids, samples.ok, self.ring.words, len(scheduled), ragged)
        rows.append_tokens(batch.sample_rows, UNKNOWN_TOKEN)
        return LaunchedStep(
            number=self.ring.launched(),
            rows=scheduled,
            starts=starts,
            admissions=rows.num_admissions[scheduled],
            sampling=np.flatnonzero(sampling) if order.inverse is None else order.inverse[sampling[order.inverse]],
            logprobs=samples.logprobs,
            errors=errors,
            ends=starts + counts,
            is_adjusted=samples.is_adjusted,
            prompt_logprobs=self._finished_prompt_logprobs(scheduled),
        )

    def _sample_ragged(self, batch: InputBatch, hidden: torch.Tensor, errors: dict[int, RowError]) -> _LaunchedSamples:
        """Samples for the rows whose known tokens are all computed, in the order of the batch."""
        rows = batch.sample_rows
        if not len(rows):
            none = hidden.new_zeros(1, dtype=torch.int64), hidden.new_zeros(1, dtype=torch.bool)
            return _LaunchedSamples(*none, logprobs=None, is_adjusted=False)
        last = hidden if batch.sample_tokens is None else hidden[batch.sample_tokens]
        logits = self._model.compute_logits(last)
        inputs = self.rows.sampling_inputs(rows)
        # Zeros: in kernel warm-up, which intercepts launches, these ids are used as indices without being sampled.
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
        is_adjusted = bool(self.adjustments.is_adjusted[rows].any())
        adjusted = self._adjust(logits, rows, errors) if is_adjusted else logits
        _, ok = sample_tokens(adjusted, DeviceSamplingInputs.from_host(inputs, self._device), token_ids=token_ids)
        del adjusted
        if is_adjusted:
            _mark_fully_masked(logits, token_ids, ok)
            self.adjustments.count(rows, token_ids)
        logprobs = launch_logprobs(logits, token_ids, inputs.num_logprobs) if self.is_output_rank else None
        return _LaunchedSamples(token_ids, ok, logprobs, is_adjusted)

    def _adjust(self, logits: torch.Tensor, rows: np.ndarray, errors: dict[int, RowError]) -> torch.Tensor:
        """-> adjusted logits [n, vocab_size] float32. Waits for earlier steps only where a row `needs_token_ids`."""
        if self.adjustments.needs_token_ids[rows].any():
            for launched in self._unread_steps:
                self.read(launched)
            self._unread_steps.clear()
        return self.adjustments.adjust(logits, rows, self.rows.generated, errors)

    # -----------------------------------------------------------------------------------------------------------
    # Reading the results.

    def read(self, launched: LaunchedStep) -> None:
        """Reads the step's words from the ring, once; adds to its errors, and zeroes the KV of non-finite rows."""
        if launched.words is not None:
            return
        words = launched.words = self.ring.take(launched.number, len(launched.rows))
        if launched.is_adjusted:
            self._store_token_ids(launched, words)
        flagged = np.flatnonzero(words & _FLAGS)
        if not len(flagged):
            return
        is_masked = (words[flagged] == _ALL_MASKED | BAD_LOGITS) & launched.is_adjusted
        for place in flagged[is_masked].tolist():
            row = int(launched.rows[place])
            launched.errors.setdefault(row, RowError(row, NO_TOKEN_LEFT))
        non_finite = flagged[~is_masked]
        for place in non_finite.tolist():
            row = int(launched.rows[place])
            what = "hidden states" if words[place] & BAD_HIDDEN else "logits"
            launched.errors.setdefault(row, self._row_error(row, what))
        if len(non_finite):
            self._zero_kv_since(launched, non_finite)

    def _store_token_ids(self, launched: LaunchedStep, words: np.ndarray) -> None:
        """Stores the sampled ids of rows that `needs_token_ids`, unless another request has the row by now."""
        places = launched.sampling
        rows = launched.rows[places]
        is_stored = self.adjustments.needs_token_ids[rows]
        is_stored &= self.rows.num_admissions[rows] == launched.admissions[places]
        places = places[is_stored]
        self.rows.token_ids[rows[is_stored], launched.ends[places]] = words[places] & ~_FLAGS

    @torch.inference_mode()
    def _zero_kv_since(self, launched: LaunchedStep, places: np.ndarray) -> None:
        """Zeroes the keys and values that the rows at `places` have written since this step began, unless another
        request has the row by now."""
        rows, starts = launched.rows[places], launched.starts[places]
        counts = self.rows.num_computed_tokens[rows] - starts
        is_current = (self.rows.num_admissions[rows] == launched.admissions[places]) & (counts > 0)
        if is_current.any():
            rows, counts, starts = rows[is_current], counts[is_current], starts[is_current]
            self._zero_kv(InputBatch.gather(self.rows, rows, counts, self._device, starts=starts))


class LaunchedOutput:
    """The `PendingOutput` of one message's steps."""

    def __init__(self, runner: GPUModelRunner, step: int, num_scheduled: int) -> None:
        self._runner, self._step, self._num_scheduled = runner, step, num_scheduled
        self.errors: dict[int, RowError] = {}
        self.launched: list[LaunchedStep] = []

    def done(self) -> bool:
        return not self.launched or self._runner.ring.is_over(self.launched[-1].number)

    def read(self, num_steps: int) -> None:
        """Waits for and reads the first `num_steps` steps; none if it is below 1."""
        for launched in self.launched[: max(0, num_steps)]:
            self._runner.read(launched)

    def result(self) -> ModelRunnerOutput | None:
        """The output on rank 0, None on the others. Raises RuntimeError where the device failed."""
        self.read(len(self.launched))
        if not self._runner.is_output_rank:
            return None
        steps = [launched.sampled() for launched in self.launched]
        return make_output(self._step, self._num_scheduled, steps, self.errors)


def _mark_fully_masked(logits: torch.Tensor, token_ids: torch.Tensor, ok: torch.Tensor) -> None:
    """Sets token_ids [n] of rows that are not ok to `_ALL_MASKED` where the model's logits [n, vocab_size] are finite,
    so that the adjustments masked every token; else to 0."""
    was_finite = torch.isfinite(logits.amax(dim=-1))  # NaN is the largest
    token_ids.copy_(torch.where(ok, token_ids, was_finite * _ALL_MASKED))


def _decodes_first(scheduled: np.ndarray, counts: np.ndarray | None, is_decode: np.ndarray) -> _BatchOrder:
    num_decodes = int(np.count_nonzero(is_decode))
    if num_decodes in (0, len(scheduled)) or is_decode[:num_decodes].all():
        return _BatchOrder(scheduled, counts, num_decodes, None)
    order = np.argsort(~is_decode, kind="stable")
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return _BatchOrder(scheduled[order], None if counts is None else counts[order], num_decodes, inverse)
