"""The launch stage of a GPU: steps are launched asynchronously, and their tokens read later from a pinned ring."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from ringcore.config import EngineConfig
from ringcore.kernels.launch.upload import upload
from ringcore.kernels.logits import logit_adjustments
from ringcore.kernels.logits.sampling import DeviceSamplingInputs, sample_tokens
from ringcore.kernels.steps.step import RaggedRows, fill_last_tokens, finish_rows
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.model_executor.sampler import PendingLogprobs
from ringcore.protocol.steps import NewRequest, RowError
from ringcore.tracing import now_ns
from ringcore.tracing.kinds import COMPUTED, REPLAYED
from ringcore.worker.logits.result_ring import ResultRing
from ringcore.worker.logits.row_adjustments import AdjustmentOps
from ringcore.worker.logits.sampling_stage import Finish, SampledTokens
from ringcore.worker.rows.batch_order import BatchOrder
from ringcore.worker.rows.device_rows import DeviceRows
from ringcore.worker.rows.input_batch import InputBatch
from ringcore.worker.rows.request_rows import UNKNOWN_TOKEN, AppendedBlocks
from ringcore.worker.runner.decode_graphs import DecodeGraphs
from ringcore.worker.runner.decode_step import DecodeStep
from ringcore.worker.runner.device_drafts import make_drafts
from ringcore.worker.runner.device_step import DeviceStep, StepReader
from ringcore.worker.runner.mixed_graphs import MixedGraphs, can_plan_mixed
from ringcore.worker.runner.stage_port import make_port
from ringcore.worker.runner.step_launcher import StepLauncher, StepStages

__all__ = ["DeviceLauncher"]


class DeviceLauncher(StepLauncher):
    """`launch` returns before the device has done the work (async scheduling). Sampled tokens stay on the device, where
    the row's next step reads them; the host reads them one or more steps later.

    A step in which every row decodes is a `DecodeStep`, a CUDA graph unless `enforce_eager`. The host gathers the batch
    of any other (mixed) step; the forward pass is a graph too where the step is small, else launched eagerly. Between
    the logits of an adjusted step and their adjustment the host waits for the tokens of earlier steps if a row
    `needs_token_ids`.
    """

    adjustment_ops = AdjustmentOps(logit_adjustments.adjust_logits, logit_adjustments.count_tokens)

    def __init__(self, stages: StepStages, config: EngineConfig, plan: KVCacheConfig) -> None:
        self._stages, self._device = stages, stages.device
        max_places = config.scheduler.max_sampled_positions
        self.ring = ResultRing(max_places, self._device)
        self._reader = StepReader(stages, self.ring)
        max_drafted = 0 if config.scheduler.speculative is None else max_places
        self._device_rows = DeviceRows(stages.rows, self._device, max_drafted)
        self._port = make_port(stages.link, stages.paged.model, stages.rows, stages.device, self._write_tokens)
        is_last = stages.paged.model.stage.is_last
        self._end_decode = self._launch_logprobs if is_last else self._hand_on_decode
        self._end_mixed = self._sample_mixed if is_last else self._hand_on_mixed
        self._unread_steps: list[DeviceStep] = []  # with rows that `needs_token_ids`: read before their next sampling
        self._decode: DecodeStep | None = None
        self._mixed: MixedGraphs | None = None
        is_eager = config.device.enforce_eager or self._device.type != "cuda"
        backends = stages.paged.backends
        none = torch.zeros(2, dtype=torch.int32, device=self._device)
        one = none[:1], none[None, :1]  # the length and the block table of one sequence
        if all(backend.plan_on_device(*one) is not None for backend in backends):
            decode_class = DecodeStep if is_eager else DecodeGraphs
            self._decode = decode_class(stages.paged, self._device_rows, self.ring, self._port)
        if not is_eager and can_plan_mixed(backends, self._device):
            self._mixed = MixedGraphs(stages.paged, self._device_rows, config.max_mixed_graph_tokens)
        self._drafts = make_drafts(stages, config, self._decode, self._reader)

    @property
    def max_unread_steps(self) -> int:
        """Half of the ring: a step is read before its slot is reused."""
        return self.ring.num_slots // 2

    def follow(self) -> None:
        if self._drafts is not None:
            self._drafts.follow()

    def time_steps(self, sizes: Sequence[int]) -> tuple[list[float], float]:
        assert self._drafts is not None, "no row has drafts"
        return self._drafts.time_steps(sizes)

    def warm_up(self) -> None:
        if self._decode is not None:
            self._decode.warm_up()

    @property
    def num_graphs_left(self) -> int:
        return sum(len(graphs.missing) for graphs in self._all_graphs)

    def capture_graph(self) -> None:
        """Decoding graphs before mixed ones: they are launched more often."""
        graphs = next((graphs for graphs in self._all_graphs if graphs.missing), None)
        if graphs is not None:
            graphs.capture(graphs.missing[-1])

    @property
    def _all_graphs(self) -> list[DecodeStep | MixedGraphs]:
        return [graphs for graphs in (self._decode, self._mixed) if graphs is not None]

    def mirror(self, new_requests: Sequence[NewRequest], appended: Sequence[AppendedBlocks]) -> None:
        self._device_rows.admit(new_requests, self._stages.rows)
        self._device_rows.append(appended)
        if not len(self._stages.rows.scheduled):
            self._device_rows.write()

    def launch(
        self,
        scheduled: np.ndarray,
        counts: np.ndarray | None,
        errors: dict[int, RowError],
        max_gained: np.ndarray | None = None,
    ) -> DeviceStep:
        self._stages.adjustments.report_failed(scheduled, errors)
        self._port.await_tokens(scheduled)
        order = BatchOrder.of(self._stages.rows, scheduled, counts, self._stages.pooled_prompts.is_pending)
        if self._decode is None or order.num_decodes < len(scheduled):
            step = self._launch_mixed(order, errors)
        elif self._drafts is not None and (drafts := self._drafts.draft(scheduled, max_gained)) is not None:
            step = self._drafts.launch(scheduled, drafts, errors)
        else:
            step = self._launch_decode(self._decode, scheduled, errors)
        if self._drafts is not None:
            self._drafts.add(step)
        if step.is_adjusted and self._stages.adjustments.needs_token_ids[scheduled].any():
            self._unread_steps = [one for one in self._unread_steps if one.words is None] + [step]
        return step

    def _launch_decode(self, decode: DecodeStep, scheduled: np.ndarray, errors: dict[int, RowError]) -> DeviceStep:
        rows, sampling = self._stages.rows, self._stages.sampling
        starts = rows.num_computed_tokens[scheduled]
        is_adjusted = sampling.is_adjusted(scheduled)
        tracer = self._stages.tracer
        began = tracer.is_on and now_ns()
        if is_adjusted:
            logits = decode.launch_logits(scheduled)
            replayed = began and now_ns()
            rows.advance(scheduled, None)
            self._read_needed_tokens(scheduled)
            finish = partial(self._finish_decode, decode)
            logprobs = sampling.sample(logits, scheduled, decode.draw, finish, errors).logprobs
        else:
            results = decode.launch(scheduled)
            replayed = began and now_ns()
            rows.advance(scheduled, None)
            logprobs = self._end_decode(scheduled, *results)
        if began:
            tracer.record((REPLAYED.number, began, replayed, now_ns(), len(scheduled)))
        rows.append_tokens(scheduled, UNKNOWN_TOKEN)
        self._port.expect_tokens(scheduled)
        return DeviceStep(
            reader=self._reader,
            number=self.ring.num_launched,
            rows=scheduled,
            starts=starts,
            ends=starts + 1,
            admissions=rows.num_admissions[scheduled],
            sampling=np.arange(len(scheduled)),
            logprobs=logprobs,
            errors=errors,
            is_adjusted=is_adjusted,
            prompt_logprobs=self._stages.prompt_logprobs.finished(scheduled, rows),
        )

    def _finish_decode(self, decode: DecodeStep, token_ids: torch.Tensor, ok: torch.Tensor) -> None:
        decode.finish(token_ids, ok)
        self._port.return_tokens(token_ids)

    def _launch_logprobs(
        self, scheduled: np.ndarray, logits: torch.Tensor, token_ids: torch.Tensor
    ) -> PendingLogprobs | None:
        self._port.return_tokens(token_ids)
        return self._stages.sampling.launch_logprobs(logits, token_ids, scheduled)

    def _hand_on_decode(self, scheduled: np.ndarray, hidden: torch.Tensor) -> None:
        self._port.send_rows(hidden)

    def _write_tokens(self, rows: np.ndarray, positions: np.ndarray, token_ids: torch.Tensor) -> None:
        self._device_rows.set_last_tokens(rows, token_ids)

    def _launch_mixed(self, order: BatchOrder, errors: dict[int, RowError]) -> DeviceStep:
        rows, scheduled = self._stages.rows, order.scheduled
        starts = rows.num_computed_tokens[scheduled]
        tracer = self._stages.tracer
        began = tracer.is_on and now_ns()
        batch, rows_on_device = self._gather(order)
        prepared = began and now_ns()
        graphs = self._mixed if self._mixed is not None and self._mixed.takes(batch) else None
        inputs = self._port.inputs(batch.input_ids)
        hidden = self._stages.paged.forward_batch(inputs, batch) if graphs is None else graphs.forward(inputs, batch)
        computed = began and now_ns()
        self._stages.prompt_logprobs.take(hidden, batch, scheduled, rows)
        self._stages.pooled_prompts.take(hidden, batch, scheduled, rows)
        rows.advance(scheduled, order.counts)
        is_sampling = np.isin(scheduled, batch.sample_rows)
        here = is_sampling & self._stages.paged.model.stage.is_last
        finish = partial(self._finish_mixed, order, batch, rows_on_device, here, hidden)
        samples = self._end_mixed(batch, hidden, finish, errors)
        if began:
            tracer.record((COMPUTED.number, began, prepared, computed, now_ns(), len(hidden), len(batch.sample_rows)))
        rows.append_tokens(batch.sample_rows, UNKNOWN_TOKEN)
        self._port.expect_tokens(batch.sample_rows)
        return DeviceStep(
            reader=self._reader,
            number=self.ring.num_launched,
            rows=scheduled,
            starts=starts,
            ends=rows.num_computed_tokens[scheduled],
            admissions=rows.num_admissions[scheduled],
            sampling=order.in_message_order(is_sampling),
            logprobs=samples.logprobs,
            errors=errors,
            is_adjusted=samples.is_adjusted,
            prompt_logprobs=self._stages.prompt_logprobs.finished(scheduled, rows),
            pooled=self._stages.pooled_prompts.finished(scheduled, rows),
        )

    def _gather(self, order: BatchOrder) -> tuple[InputBatch, torch.Tensor]:
        """The input stage of a mixed step: the batch, gathered on the host but for the last tokens of decoding rows,
        which the device has; and its rows [n] int32."""
        self._device_rows.write()
        rows = self._stages.rows
        batch = InputBatch.gather(rows, order.scheduled, order.counts, self._device, num_decodes=order.num_decodes)
        on_device = upload(order.scheduled, self._device)
        state, layout = self._device_rows.state, self._device_rows.layout
        fill_last_tokens(state, layout, batch.input_ids, on_device, order.num_decodes)
        return batch, on_device

    def _sample_mixed(
        self, batch: InputBatch, hidden: torch.Tensor, finish: Finish, errors: dict[int, RowError]
    ) -> SampledTokens:
        """Samples for the rows whose known tokens are all computed, in the order of the batch."""
        rows = batch.sample_rows
        if not len(rows):
            return _no_samples(hidden, finish)
        logits = self._stages.paged.model.compute_logits(batch.sampled_of(hidden))
        inputs = DeviceSamplingInputs.from_host(self._stages.rows.sampling_inputs(rows), self._device)
        # Zeros: in kernel warm-up, which intercepts launches, these ids are used as indices without being sampled.
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
        if self._stages.sampling.is_adjusted(rows):
            self._read_needed_tokens(rows)
        draw = partial(sample_tokens, inputs=inputs, token_ids=token_ids)

        def finish_and_return(token_ids: torch.Tensor, ok: torch.Tensor) -> None:
            finish(token_ids, ok)
            self._port.return_tokens(token_ids)

        return self._stages.sampling.sample(logits, rows, draw, finish_and_return, errors)

    def _hand_on_mixed(
        self, batch: InputBatch, hidden: torch.Tensor, finish: Finish, errors: dict[int, RowError]
    ) -> SampledTokens:
        self._port.send_rows(hidden)
        return _no_samples(hidden, finish)

    def _finish_mixed(
        self,
        order: BatchOrder,
        batch: InputBatch,
        rows_on_device: torch.Tensor,
        is_sampling: np.ndarray,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        ok: torch.Tensor,
    ) -> None:
        """Launches the end of a mixed step: its tokens go to the rows and to the result ring."""
        num_rows = len(order.scheduled)
        counts = np.ones(num_rows, dtype=np.int32) if order.counts is None else order.counts.astype(np.int32)
        sample_index = np.where(is_sampling, np.cumsum(is_sampling) - 1, -1).astype(np.int32)
        ragged = RaggedRows(
            starts=upload(batch.query_start_loc_cpu[:-1], self._device),
            counts=upload(counts, self._device),
            samples=upload(sample_index, self._device),
            finite=torch.isfinite(hidden.sum(-1, dtype=torch.float32)),
        )
        state, layout = self._device_rows.state, self._device_rows.layout
        finish_rows(state, layout, rows_on_device, token_ids, ok, self.ring.words, num_rows, ragged)
        self.ring.launched()

    def _read_needed_tokens(self, rows: np.ndarray) -> None:
        """Waits for earlier steps if one of rows [n] `needs_token_ids`, while the device computes this step's
        logits."""
        if self._stages.adjustments.needs_token_ids[rows].any():
            for step in self._unread_steps:
                step.read()
            self._unread_steps.clear()


def _no_samples(hidden: torch.Tensor, finish: Finish) -> SampledTokens:
    """The end of a step that samples nothing here."""
    none = hidden.new_zeros(1, dtype=torch.int64), hidden.new_zeros(1, dtype=torch.bool)
    finish(*none)
    return SampledTokens(*none, logprobs=None, is_adjusted=False)
