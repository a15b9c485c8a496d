"""Runs steps: applies the delta to the persistent batch, gathers an input batch, runs the model, samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ringcore.attention.context import ForwardContext, GroupContext
from ringcore.config import EngineConfig
from ringcore.distributed.parallel import TensorParallel
from ringcore.kv_cache.spec import KVCacheConfig, KVCacheSpec
from ringcore.model_executor import logit_adjustments
from ringcore.model_executor.loader import pending_weights
from ringcore.model_executor.models import model_class
from ringcore.model_executor.models.base import CausalLM
from ringcore.model_executor.sampler import sample, token_logprobs
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import ModelRunnerOutput, NewRequest, PendingOutput, RowError, SchedulerOutput
from ringcore.worker.logits.prompt_logprobs import LaunchedPromptLogprobs, PromptLogprobRows
from ringcore.worker.logits.row_adjustments import NO_TOKEN_LEFT, AdjustmentOps, RowAdjustments
from ringcore.worker.logits.step_output import SampledRows, make_output
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.rows.input_batch import InputBatch
from ringcore.worker.rows.request_rows import RequestRows
from ringcore.worker.runner.kv_caches import allocate_kv_caches, choose_backends, group_of_layer

__all__ = ["LoadedModel", "ModelRunner"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights on this rank's device.

    tensors: the model's, by `Weight.name`, where their addresses are fixed, so that a weight update can overwrite them;
    None where the model holds them packed.
    """

    model: CausalLM
    dtype: str
    weights_bytes: int
    load_s: float
    tensors: Mapping[str, torch.Tensor] | None = None

    @classmethod
    @torch.inference_mode()
    def load(
        cls, config: EngineConfig, platform: Platform, tp: TensorParallel, allocated: Callable[[], None] | None = None
    ) -> LoadedModel:
        """allocated: called when the weights' memory is allocated, before they are read into it; never called for
        packed weights. Raises `ModelLoadError` where the checkpoint does not fit the model."""
        start = time.monotonic()
        spec = config.model.spec
        dtype = platform.resolve_dtype(config.model.dtype, spec.dtype)
        model = model_class(spec.architecture)(spec, tp, _DTYPES[dtype], config.model.context_len)
        weights = model.weights()
        # A CPU packs weights one by one and frees the originals; sleep mode needs them at fixed addresses instead.
        is_packed = platform.device.type == "cpu" and not config.device.enable_sleep_mode
        allocate = None if is_packed else partial(_allocate, platform, allocated)
        files, seed = config.model.files, config.model.seed
        with pending_weights(weights, files, seed, platform.device, allocate) as tensors:
            final = tensors.final
            model.bind(tensors, updatable=final is not None)
        platform.synchronize()
        return cls(model, dtype, sum(weight.nbytes for weight in weights), time.monotonic() - start, final)

    def kv_cache_spec(self, block_size: int) -> dict[str, KVCacheSpec]:
        return {layer.name: layer.kv_cache_spec(block_size, self.dtype) for layer in self.model.attention_layers}


def _allocate(platform: Platform, allocated: Callable[[], None] | None, num_bytes: int) -> torch.Tensor:
    memory = platform.allocate(num_bytes, "weights")
    if allocated is not None:
        allocated()
    return memory


class ModelRunner:
    """One rank's model, KV cache and persistent batch. Steps are executed in order, and a row's next input is its own
    last token, so the scheduler may schedule a step before it knows the tokens of the previous one (async scheduling).

    Every rank samples the same tokens: logits are bitwise equal on all ranks, and sampling uses a counter-based RNG of
    the row's seed and the token's position. So no rank broadcasts its samples.
    """

    adjustment_ops = AdjustmentOps(logit_adjustments.adjust_logits, logit_adjustments.count_tokens)

    @torch.inference_mode()
    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, kv_cache_config: KVCacheConfig, platform: Platform, rank: int
    ) -> None:
        """Allocates the pages. Raises `CapacityError` or `ConfigError`."""
        self._model = loaded.model
        self._dtype = loaded.dtype
        self._device = platform.device
        self.is_output_rank = rank == 0
        layers = self._model.attention_layers
        self._group_of_layer = group_of_layer(kv_cache_config, layers)
        self._backends = choose_backends(config.device.attention_backend, kv_cache_config, layers, platform)
        self._kv_caches = allocate_kv_caches(kv_cache_config, layers, self._backends, platform)
        spec = config.model.spec
        self.adjustments = RowAdjustments(config, self._device, self._dtype, self.adjustment_ops)
        self._prompt_logprobs = PromptLogprobRows(spec.vocab_size, self._model.compute_logits)
        listeners = (self.adjustments, self._prompt_logprobs)
        self.rows = RequestRows(config.scheduler.max_num_seqs, kv_cache_config, len(spec.eos_token_ids), listeners)
        self._kv_cache_config = kv_cache_config

    def warm_up(self) -> None:
        """Runs a prompt of one token, so that libraries do their lazy initialization before the first request.

        It leaves a token in block 1, which the first request that gets the block overwrites.
        """
        if self._kv_cache_config.max_model_len < 2:
            return
        request = NewRequest(
            row=0,
            token_ids=int_array([0]),
            num_prompt_tokens=1,
            num_computed_tokens=0,
            num_cached_tokens=0,
            block_ids=[int_array([1]) for _ in self._kv_cache_config.groups],
            sampling_params=SamplingParams(),
            seed=0,
            stop_token_ids=[],
        )
        output = self.execute(
            SchedulerOutput(
                step=0,
                num_steps=1,
                finished_rows=int_array(),
                new_requests=[request],
                new_blocks=[],
                rows=int_array([0]),
                num_scheduled_tokens=None,
                num_tokens=1,
            )
        )
        if output is not None and not isinstance(output, ModelRunnerOutput):
            output.result()
        self.rows.clear()

    @property
    def num_graphs_left(self) -> int:
        """CUDA graphs that are not captured yet."""
        return 0

    def capture_graph(self) -> None:
        """Captures one of the missing graphs, the largest first; called between steps, on all ranks together, since the
        warm-up run before a capture is a step with collectives."""

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | PendingOutput | None:
        """Executes the one or several steps of a message; the output on rank 0, None on the others."""
        self.rows.apply(step)
        scheduled = self.rows.scheduled
        steps: list[SampledRows] = []
        errors: dict[int, RowError] = {}
        if len(scheduled):
            steps.append(self._execute_one(scheduled, step.num_scheduled_tokens, errors))
            steps += [self._execute_one(scheduled, None, errors) for _ in range(1, step.num_steps)]
        return make_output(step.step, len(scheduled), steps, errors) if self.is_output_rank else None

    def _execute_one(
        self, scheduled: np.ndarray, num_scheduled_tokens: np.ndarray | None, errors: dict[int, RowError]
    ) -> SampledRows:
        """Adds to `errors`, by row. A row with an error still advances: steps in flight may contain it."""
        batch = InputBatch.gather(self.rows, scheduled, num_scheduled_tokens, self._device)
        hidden = self._forward(batch)
        self._isolate_non_finite(batch, scheduled, num_scheduled_tokens, hidden, errors)
        self._take_prompt_logprobs(batch, scheduled, hidden)
        self.rows.advance(scheduled, num_scheduled_tokens)
        self.adjustments.report_failed(scheduled, errors)
        sampled = self._sample(batch, hidden, errors)
        return sampled._replace(prompt_logprobs=self._finished_prompt_logprobs(scheduled))

    def _take_prompt_logprobs(self, batch: InputBatch, scheduled: np.ndarray, hidden: torch.Tensor) -> None:
        """Called before the step's tokens are counted as computed."""
        if self._prompt_logprobs:
            starts = self.rows.num_computed_tokens[scheduled]
            places, known = batch.query_start_loc_cpu, self.rows.token_ids
            self._prompt_logprobs.take(hidden, scheduled, starts, places, known, self.is_output_rank)

    def _finished_prompt_logprobs(self, scheduled: np.ndarray) -> Sequence[LaunchedPromptLogprobs]:
        """Called after the step's tokens were counted as computed."""
        if not self._prompt_logprobs:
            return ()
        return self._prompt_logprobs.finished(scheduled, self.rows.num_computed_tokens[scheduled], self.is_output_rank)

    def _forward(self, batch: InputBatch) -> torch.Tensor:
        """-> hidden states [num_tokens, hidden_size]"""
        ctx = ForwardContext(self._plan(batch), self._group_of_layer, self._kv_caches)
        return self._model.forward(batch.input_ids, batch.positions, ctx)

    def _plan(self, batch: InputBatch) -> tuple[GroupContext, ...]:
        return tuple(GroupContext.of(*group) for group in zip(batch.metadata, self._backends, strict=True))

    def _sample(self, batch: InputBatch, hidden: torch.Tensor, errors: dict[int, RowError]) -> SampledRows:
        rows = batch.sample_rows
        if not len(rows):
            return SampledRows(rows, rows, None)
        last = hidden if batch.sample_tokens is None else hidden[batch.sample_tokens]
        logits = self._model.compute_logits(last)
        inputs = self.rows.sampling_inputs(rows)
        is_adjusted = bool(self.adjustments.is_adjusted[rows].any())
        adjusted = self.adjustments.adjust(logits, rows, self.rows.generated, errors) if is_adjusted else logits
        sampled = sample(adjusted, inputs)
        if is_adjusted:
            self.adjustments.count(rows, sampled.token_ids)
        token_ids = sampled.token_ids.cpu().numpy().astype(np.int32)
        self.rows.append_tokens(rows, token_ids)  # also of rows with an error: the next step may be scheduled
        if not self.is_output_rank:
            return SampledRows(rows, token_ids, None)
        for place in np.flatnonzero(~sampled.ok).tolist():
            row = int(rows[place])
            was_finite = is_adjusted and bool(torch.isfinite(logits[place].amax()))
            errors.setdefault(row, RowError(row, NO_TOKEN_LEFT) if was_finite else self._row_error(row, "logits"))
        return SampledRows(rows, token_ids, token_logprobs(logits, sampled.token_ids, inputs.num_logprobs))

    # -----------------------------------------------------------------------------------------------------------
    # Isolation of requests with non-finite values.

    def _isolate_non_finite(
        self,
        batch: InputBatch,
        scheduled: np.ndarray,
        num_scheduled_tokens: np.ndarray | None,
        hidden: torch.Tensor,
        errors: dict[int, RowError],
    ) -> None:
        """Finds rows with a non-finite hidden state [num_tokens, hidden_size], and zeroes their keys and values.

        A token's keys and values flow into its own hidden state, so this check covers the KV cache: another request may
        get the block next, and attention needs finite values even at the positions that it masks.
        """
        if torch.isfinite(hidden.sum(dtype=torch.float32)):
            return
        finite = torch.isfinite(hidden).all(dim=-1).cpu().numpy()
        non_finite = ~np.logical_and.reduceat(finite, batch.query_start_loc_cpu[:-1])
        if not non_finite.any():
            return
        counts = None if num_scheduled_tokens is None else num_scheduled_tokens[non_finite]
        self._zero_kv(InputBatch.gather(self.rows, scheduled[non_finite], counts, self._device))
        for row in scheduled[non_finite].tolist():
            errors.setdefault(row, self._row_error(row, "hidden states"))

    def _zero_kv(self, batch: InputBatch) -> None:
        """Zeroes the keys and values of the tokens of `batch`, by the write path that every backend has."""
        groups, layers = self._plan(batch), self._model.attention_layers
        for layer, index, kv_cache in zip(layers, self._group_of_layer, self._kv_caches, strict=True):
            group = groups[index]
            num_tokens = group.metadata.num_tokens
            query = kv_cache.new_zeros(num_tokens, layer.num_heads, layer.head_size)
            zeros = kv_cache.new_zeros(num_tokens, layer.num_kv_heads, layer.head_size)
            group.backend.forward(query, zeros, zeros, kv_cache, group.metadata, group.plan, layer.scale)

    def _row_error(self, row: int, what: str) -> RowError:
        return RowError(
            row,
            f"the model's {what} are not finite numbers in {self._dtype}; use dtype='float32', or check the "
            "checkpoint's weights",
        )
