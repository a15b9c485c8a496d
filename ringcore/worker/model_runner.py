"""Runs steps: the delta into the rows, the rows into a batch, the batch through the model, a token for each row."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.backends import choose_backend
from ringcore.attention.context import ForwardContext
from ringcore.config import EngineConfig
from ringcore.kv_cache.spec import KVCacheConfig, KVCacheSpec
from ringcore.model_executor.loader import pending_weights
from ringcore.model_executor.models import model_class
from ringcore.model_executor.models.base import CausalLM
from ringcore.model_executor.parallel import TensorParallel
from ringcore.model_executor.sampler import sample, token_logprobs
from ringcore.protocol import ModelRunnerOutput, NewRequest, RowError, SchedulerOutput, TokenLogprobs, int_array
from ringcore.sampling_params import SamplingParams
from ringcore.worker.input_batch import InputBatch
from ringcore.worker.kv_caches import allocate_kv_caches
from ringcore.worker.platform import Platform
from ringcore.worker.request_rows import RequestRows

__all__ = ["LoadedModel", "ModelRunner"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights on this rank's device."""

    model: CausalLM
    dtype: str
    weights_bytes: int
    load_s: float

    @classmethod
    @torch.inference_mode()
    def load(cls, config: EngineConfig, platform: Platform, tp: TensorParallel) -> LoadedModel:
        """Raises `ModelLoadError` where the checkpoint does not fit the model."""
        start = time.monotonic()
        spec = config.model.spec
        dtype = platform.resolve_dtype(config.model.dtype, spec.dtype)
        model = model_class(spec.architecture)(spec, tp, _DTYPES[dtype], config.model.context_len)
        weights = model.weights()
        with pending_weights(weights, config.model.files, config.model.seed, platform.device) as tensors:
            model.bind(tensors)
        platform.synchronize()
        return cls(model, dtype, sum(weight.nbytes for weight in weights), time.monotonic() - start)

    def kv_cache_spec(self, block_size: int) -> dict[str, KVCacheSpec]:
        return {layer.name: layer.kv_cache_spec(block_size, self.dtype) for layer in self.model.attention_layers}


class ModelRunner:
    """One rank's model, pages and rows. Steps are executed in the order in which they come; a row's input is then the
    row's own last token, so a step may be scheduled before the tokens of the one before it are known to anyone else.

    Every rank samples, and all sample the same: their logits have the same bits, and a draw depends on the row's seed
    and the token's position. So no rank has to tell another what it drew.
    """

    @torch.inference_mode()
    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, kv_cache_config: KVCacheConfig, platform: Platform, rank: int
    ) -> None:
        """Allocates the pages and warms up. Raises `CapacityError` or `ConfigError`."""
        self._model = loaded.model
        self._dtype = loaded.dtype
        self._is_output_rank = rank == 0
        self._vocab_size = config.model.spec.vocab_size
        self._backend = self._choose_backend(config, kv_cache_config, platform)
        self._kv_caches = allocate_kv_caches(kv_cache_config, self._model.attention_layers, self._backend, platform)
        self.rows = RequestRows(
            config.scheduler.max_num_seqs,
            config.model.context_len,
            config.cache.block_size,
            len(config.model.spec.eos_token_ids),
        )
        self._warm_up(config.model.context_len)

    def _choose_backend(
        self, config: EngineConfig, kv_cache_config: KVCacheConfig, platform: Platform
    ) -> AttentionBackend:
        (group,) = kv_cache_config.groups  # layers that differ in kind would have a group and a backend each
        num_heads = self._model.attention_layers[0].num_heads
        order = platform.attention_backends
        return choose_backend(config.device.attention_backend, group.spec, num_heads, platform.device, order)

    def _warm_up(self, max_model_len: int) -> None:
        """A prompt of one token, so that what the libraries set up lazily is not set up in the first request.

        It leaves a token in block 1, which the block's first owner overwrites as it would any old one.
        """
        if max_model_len < 2:
            return
        request = NewRequest(
            row=0,
            token_ids=int_array([0]),
            num_prompt_tokens=1,
            num_computed_tokens=0,
            block_ids=int_array([1]),
            sampling_params=SamplingParams(),
            seed=0,
            stop_token_ids=[],
        )
        none, one, row = int_array(), int_array([1]), int_array([0])
        self.execute(SchedulerOutput(0, none, [request], none, none, row, one))
        self.rows.clear()

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """One step; the output on rank 0, None on the others."""
        self.rows.apply(step)
        if not len(step.rows):
            return self._output(step.step, int_array(), int_array(), None, {})
        batch = InputBatch.gather(self.rows, step.rows, step.num_scheduled_tokens)
        hidden = self._forward(batch)
        errors = self._contain(batch, step, hidden)
        self.rows.advance(step.rows, step.num_scheduled_tokens)
        return self._sample(step.step, batch, hidden, errors)

    def _forward(self, batch: InputBatch) -> torch.Tensor:
        """-> hidden states [num_tokens, hidden_size]"""
        ctx = ForwardContext(batch.metadata, self._backend, self._backend.plan(batch.metadata), self._kv_caches)
        return self._model.forward(batch.input_ids, batch.positions, ctx)

    def _sample(
        self, step: int, batch: InputBatch, hidden: torch.Tensor, errors: dict[int, RowError]
    ) -> ModelRunnerOutput | None:
        rows = batch.sample_rows
        if not len(rows):
            return self._output(step, rows, rows, None, errors)
        last = hidden if batch.sample_tokens is None else hidden[batch.sample_tokens]
        logits = self._model.compute_logits(last)
        inputs = self.rows.sampling_inputs(rows)
        sampled = sample(logits, inputs)
        token_ids = sampled.token_ids.numpy().astype(np.int32)
        self.rows.append_tokens(rows, token_ids)  # also of rows with an error: the next step may already have them
        if not self._is_output_rank:
            return None
        for row in rows[~sampled.ok].tolist():
            errors.setdefault(row, self._row_error(row, "logits"))
        logprobs = token_logprobs(logits, sampled.token_ids, inputs.num_logprobs)
        return self._output(step, rows, token_ids, logprobs, errors)

    def _output(
        self,
        step: int,
        rows: np.ndarray,
        token_ids: np.ndarray,
        logprobs: list[TokenLogprobs | None] | None,
        errors: dict[int, RowError],
    ) -> ModelRunnerOutput | None:
        if not self._is_output_rank:
            return None
        if errors:
            good = ~np.isin(rows, list(errors))
            logprobs = [entry for entry, keep in zip(logprobs, good, strict=True) if keep] if logprobs else None
            rows, token_ids = rows[good], token_ids[good]
        return ModelRunnerOutput(step, rows, token_ids, logprobs, list(errors.values()))

    # -----------------------------------------------------------------------------------------------------------
    # A request whose numbers overflow ends alone.

    def _contain(self, batch: InputBatch, step: SchedulerOutput, hidden: torch.Tensor) -> dict[int, RowError]:
        """The rows with a hidden state [num_tokens, hidden_size] that is not finite, and their keys and values erased.

        A token's keys and values flow into its own hidden state, so this sees what must not stay in a page: another
        request may get the block next, and attention needs finite numbers even in the places that it masks.
        """
        if torch.isfinite(hidden.sum(dtype=torch.float32)):
            return {}
        finite = torch.isfinite(hidden).all(dim=-1).numpy()
        broken = ~np.logical_and.reduceat(finite, batch.metadata.query_start_loc_cpu[:-1])
        if not broken.any():
            return {}
        self._erase(InputBatch.gather(self.rows, step.rows[broken], step.num_scheduled_tokens[broken]))
        return {row: self._row_error(row, "hidden states") for row in step.rows[broken].tolist()}

    def _erase(self, batch: InputBatch) -> None:
        """Writes zeros where the tokens of `batch` have their keys and values, the way any backend writes them."""
        plan, layers = self._backend.plan(batch.metadata), self._model.attention_layers
        for layer, kv_cache in zip(layers, self._kv_caches, strict=True):
            query = kv_cache.new_zeros(batch.metadata.num_tokens, layer.num_heads, layer.head_size)
            none = kv_cache.new_zeros(batch.metadata.num_tokens, layer.num_kv_heads, layer.head_size)
            self._backend.forward(query, none, none, kv_cache, batch.metadata, plan, layer.scale)

    def _row_error(self, row: int, what: str) -> RowError:
        return RowError(
            row,
            f"the model's {what} are not finite numbers in {self._dtype}; use dtype='float32', or check the "
            "checkpoint's weights",
        )
