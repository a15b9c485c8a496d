"""Runs steps: the delta into the rows, the rows into a batch, the batch through the model, a token for each row."""

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

    tensors: the model's, by `Weight.name`, where they have a place that stays, and so may get new contents; None where
    the model holds them packed.
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
        """allocated: called once the weights have their place, which they are read to after that; never where they have
        none that stays. Raises `ModelLoadError` where the checkpoint does not fit the model."""
        start = time.monotonic()
        spec = config.model.spec
        dtype = platform.resolve_dtype(config.model.dtype, spec.dtype)
        model = model_class(spec.architecture)(spec, tp, _DTYPES[dtype], config.model.context_len)
        weights = model.weights()
        # A CPU's are packed one by one, and dropped: they have no place that stays, unless they need one to sleep.
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
    """One rank's model, pages and rows. Steps are executed in the order in which they come; a row's input is then the
    row's own last token, so a step may be scheduled before the tokens of the one before it are known to anyone else.

    Every rank samples, and all sample the same: their logits have the same bits, and a draw depends on the row's seed
    and the token's position. So no rank has to tell another what it drew.
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
        """A prompt of one token, so that what the libraries set up lazily is not set up in the first request.

        It leaves a token in block 1, which the block's first owner overwrites as it would any old one.
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
        """CUDA graphs that steps may come to need and that are not there."""
        return 0

    def capture_graph(self) -> None:
        """Captures one of those that are left, the largest first; between steps. With other ranks all must do so
        together: what it runs is a step."""

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | PendingOutput | None:
        """One message, of one step or several; the output on rank 0, None on the others."""
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
        """Adds to `errors`, by row. A row with an error goes on: steps that have it may be on their way."""
        batch = InputBatch.gather(self.rows, scheduled, num_scheduled_tokens, self._device)
        hidden = self._forward(batch)
        self._contain(batch, scheduled, num_scheduled_tokens, hidden, errors)
        self._take_prompts(batch, scheduled, hidden)
        self.rows.advance(scheduled, num_scheduled_tokens)
        self.adjustments.tell_failed(scheduled, errors)
        sampled = self._sample(batch, hidden, errors)
        return sampled._replace(prompt_logprobs=self._finished_prompts(scheduled))

    def _take_prompts(self, batch: InputBatch, scheduled: np.ndarray, hidden: torch.Tensor) -> None:
        """Of the step whose tokens are not counted as computed yet."""
        if self._prompt_logprobs:
            starts = self.rows.num_computed_tokens[scheduled]
            places, known = batch.query_start_loc_cpu, self.rows.token_ids
            self._prompt_logprobs.take(hidden, scheduled, starts, places, known, self.is_output_rank)

    def _finished_prompts(self, scheduled: np.ndarray) -> Sequence[LaunchedPromptLogprobs]:
        """Of the step whose tokens have just been counted as computed."""
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
        self.rows.append_tokens(rows, token_ids)  # also of rows with an error: the next step may already have them
        if not self.is_output_rank:
            return SampledRows(rows, token_ids, None)
        for place in np.flatnonzero(~sampled.ok).tolist():
            row = int(rows[place])
            was_finite = is_adjusted and bool(torch.isfinite(logits[place].amax()))
            errors.setdefault(row, RowError(row, NO_TOKEN_LEFT) if was_finite else self._row_error(row, "logits"))
        return SampledRows(rows, token_ids, token_logprobs(logits, sampled.token_ids, inputs.num_logprobs))

    # -----------------------------------------------------------------------------------------------------------
    # A request whose numbers overflow ends alone.

    def _contain(
        self,
        batch: InputBatch,
        scheduled: np.ndarray,
        num_scheduled_tokens: np.ndarray | None,
        hidden: torch.Tensor,
        errors: dict[int, RowError],
    ) -> None:
        """Finds the rows with a hidden state [num_tokens, hidden_size] that is not finite, and erases what they wrote.

        A token's keys and values flow into its own hidden state, so this sees what must not stay in a page: another
        request may get the block next, and attention needs finite numbers even in the places that it masks.
        """
        if torch.isfinite(hidden.sum(dtype=torch.float32)):
            return
        finite = torch.isfinite(hidden).all(dim=-1).cpu().numpy()
        broken = ~np.logical_and.reduceat(finite, batch.query_start_loc_cpu[:-1])
        if not broken.any():
            return
        counts = None if num_scheduled_tokens is None else num_scheduled_tokens[broken]
        self._erase(InputBatch.gather(self.rows, scheduled[broken], counts, self._device))
        for row in scheduled[broken].tolist():
            errors.setdefault(row, self._row_error(row, "hidden states"))

    def _erase(self, batch: InputBatch) -> None:
        """Writes zeros where the tokens of `batch` have their keys and values, the way any backend writes them."""
        groups, layers = self._plan(batch), self._model.attention_layers
        for layer, index, kv_cache in zip(layers, self._group_of_layer, self._kv_caches, strict=True):
            group = groups[index]
            num_tokens = group.metadata.num_tokens
            query = kv_cache.new_zeros(num_tokens, layer.num_heads, layer.head_size)
            none = kv_cache.new_zeros(num_tokens, layer.num_kv_heads, layer.head_size)
            group.backend.forward(query, none, none, kv_cache, group.metadata, group.plan, layer.scale)

    def _row_error(self, row: int, what: str) -> RowError:
        return RowError(
            row,
            f"the model's {what} are not finite numbers in {self._dtype}; use dtype='float32', or check the "
            "checkpoint's weights",
        )
