"""The profile run: dummy runs of the largest steps before the KV cache is allocated, to measure their peak memory.

Every token has its slot in the null block, and every block table refers to it: a KV cache of one block serves any
number of sequences, with meaningless results. So the run takes as long as one step, and the kernels that it compiles
and the libraries that it initializes do not delay the first request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from ringcore.attention.context import GroupContext
from ringcore.attention.metadata import AttentionMetadata
from ringcore.config import EngineConfig
from ringcore.errors import CapacityError
from ringcore.host.byte_sizes import format_bytes
from ringcore.kernels.logits.sampling import DeviceSamplingInputs, sample_tokens
from ringcore.kv_cache.spec import KVCacheSpec
from ringcore.model_executor.models.base import CausalLM
from ringcore.model_executor.sampler import SamplingInputs, logprob_tensors, token_logprobs
from ringcore.protocol.codec import int_array
from ringcore.protocol.row_parameters import EVERY_PARAMETER, ROW_PARAMETERS, RowParameters
from ringcore.protocol.steps import NewRequest
from ringcore.worker.logits.prompt_logprobs import positions_at_once
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.runner.graph_capture import graph_sizes, mixed_sizes
from ringcore.worker.runner.kv_caches import choose_backends, group_of_layer
from ringcore.worker.runner.mixed_graphs import can_plan_mixed
from ringcore.worker.runner.paged_model import PagedModel
from ringcore.worker.start_up.memory_budget import StepPeaks, planned_cache

__all__ = ["profile_steps", "run_rows", "sampling_inputs"]

_WARM_UP_TOKENS = 256
_MARGIN_TOKENS = 512  # of a graph whose memory is within the margin of `memory_budget`
_PROMPT_LOGPROBS = 20  # per position; with more of them, fewer positions are computed at once


@torch.inference_mode()
def profile_steps(
    config: EngineConfig, model: CausalLM, specs: Mapping[str, KVCacheSpec], platform: Platform
) -> StepPeaks:
    """The peak memory of the largest step and of the largest decoding step. All ranks must call it together.

    specs: of the model's attention layers, by name. Raises `CapacityError` where a step does not fit.
    """
    run = _ProfileRun(config, model, specs, platform)
    max_num_seqs, max_len = config.scheduler.max_num_seqs, config.model.context_len
    max_places = config.scheduler.max_sampled_positions  # of a decoding step, with drafts
    num_tokens = min(config.scheduler.token_budget, max_num_seqs * max_len)
    prompts = np.full(-(-num_tokens // max_len), max_len, dtype=np.int32)
    prompts[-1] -= prompts.sum() - num_tokens
    # A decoding size has two graphs: a whole step, and one that ends with the logits.
    of_mixed = mixed_sizes(config.max_mixed_graph_tokens)
    num_graphs = len(graph_sizes(max_num_seqs)) + len(graph_sizes(max_places)) + len(of_mixed)
    single = np.ones(min(num_tokens, max_places), dtype=np.int32)
    try:
        run.step(single)  # initializes libraries, whose workspaces persist and are not part of a step's peak
        run.step(np.minimum(prompts[:1], _WARM_UP_TOKENS))
        return StepPeaks(
            largest_bytes=platform.peak_bytes(lambda: run.step(prompts)),
            decode_bytes=platform.peak_bytes(lambda: run.step(single)),
            num_graphs=0 if config.device.enforce_eager else num_graphs,
            mixed_bytes=0 if config.device.enforce_eager else run.mixed_graphs_bytes(of_mixed, max_len),
        )
    except torch.OutOfMemoryError as error:
        free = platform.free_memory_bytes()
        raise CapacityError(
            f"a step of {num_tokens} tokens does not fit beside the weights, {format_bytes(free)} are free; lower "
            "max_num_batched_tokens or max_num_seqs",
            available_bytes=free,
        ) from error


@torch.inference_mode()
def run_rows(
    config: EngineConfig, model: CausalLM, specs: Mapping[str, KVCacheSpec], platform: Platform
) -> Callable[[int], None]:
    """A function that runs a step of so many rows of one token, up to the logits, with meaningless results; on all
    ranks together."""
    run = _ProfileRun(config, model, specs, platform)
    return torch.inference_mode()(lambda num_rows: run.logits(np.ones(num_rows, dtype=np.int32)))


class _ProfileRun:
    def __init__(
        self, config: EngineConfig, model: CausalLM, specs: Mapping[str, KVCacheSpec], platform: Platform
    ) -> None:
        plan = planned_cache(config, specs)
        layers = model.attention_layers
        self._platform, self._device = platform, platform.device
        self._max_sampled, self._vocab_size = config.scheduler.max_sampled_positions, config.model.spec.vocab_size
        groups = group_of_layer(plan, layers)
        backends = choose_backends(config.device.attention_backend, plan, layers, platform, config.model.deterministic)
        pages = [
            torch.zeros(backend.kv_cache_shape(1), dtype=backend.storage_dtype, device=platform.device)
            for backend in backends
        ]
        by_layer = {index: pages[group] for index, group in groups.items()}
        self._paged = PagedModel(model, tuple(backends), groups, by_layer)

    def step(self, lens: np.ndarray) -> None:
        """A dummy run of whole sequences of lens[i] tokens, sampling for as many rows as possible, with filters,
        logprobs and prompt logprobs. lens: [num_seqs] int32."""
        hidden, device = self._forward(lens), self._device
        model, num_tokens = self._paged.model, len(hidden)
        if not model.stage.is_last:
            return
        num_sampled = min(self._max_sampled, num_tokens)
        logits = model.compute_logits(hidden[torch.arange(num_sampled, device=device)])
        inputs = sampling_inputs(num_sampled)
        adjusted = logits.to(torch.float32, copy=True)
        token_ids, _ = sample_tokens(adjusted, DeviceSamplingInputs.from_host(inputs, logits.device))
        del adjusted
        token_logprobs(logits, token_ids, inputs.parameters["num_logprobs"])
        del logits
        chunk = hidden[: positions_at_once(self._vocab_size, _PROMPT_LOGPROBS)]
        prompt_logits = model.compute_logits(chunk)
        logprob_tensors(prompt_logits, torch.zeros(len(chunk), dtype=torch.int64, device=device), _PROMPT_LOGPROBS)

    def logits(self, lens: np.ndarray) -> None:
        """A dummy run up to the logits of all tokens."""
        hidden = self._forward(lens)
        if self._paged.model.stage.is_last:
            self._paged.model.compute_logits(hidden)

    def mixed_graphs_bytes(self, sizes: list[int], max_len: int) -> int:
        """What graphs of mixed steps take of these sizes; 0 where they cannot be, or are small."""
        largest = sizes[-1]
        if largest <= _MARGIN_TOKENS or not can_plan_mixed(self._paged.backends, self._device):
            return 0
        lens = np.full(-(-largest // max_len), max_len, dtype=np.int32)
        lens[-1] -= lens.sum() - largest
        inputs = self._paged.model.new_inputs(largest, self._device)
        kept_bytes = inputs.nbytes + sum(sizes) * self._forward(lens)[0].nbytes
        return kept_bytes + self._platform.peak_bytes(lambda: self._forward(lens))

    def _forward(self, lens: np.ndarray) -> torch.Tensor:
        """-> the model's output of these tokens."""
        num_tokens, device = int(lens.sum()), self._device
        starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        positions = torch.from_numpy(np.arange(num_tokens) - np.repeat(starts[:-1], lens).astype(np.int64)).to(device)
        slots = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        groups = [
            GroupContext.of(_metadata(lens, starts, backend.spec.block_size, slots), backend)
            for backend in self._paged.backends
        ]
        return self._paged.forward(self._paged.model.new_inputs(num_tokens, device), positions, groups)


def _metadata(lens: np.ndarray, starts: np.ndarray, block_size: int, slots: torch.Tensor) -> AttentionMetadata:
    max_len = int(lens.max())
    return AttentionMetadata(
        num_tokens=int(lens.sum()),
        num_seqs=len(lens),
        max_query_len=max_len,
        max_seq_len=max_len,
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
        block_table_cpu=np.zeros((len(lens), -(-max_len // block_size)), dtype=np.int32),
        slot_mapping=slots,
    )


def sampling_inputs(num_rows: int, parameters: RowParameters = ROW_PARAMETERS) -> SamplingInputs:
    """Every row sampled with filters and its log-probability."""
    params = replace(EVERY_PARAMETER, logprobs=0)
    request = NewRequest(0, int_array([0]), 1, 0, 0, [], params, seed=1, stop_token_ids=[])
    records = np.zeros(num_rows, dtype=parameters.dtype)
    records[:] = parameters.record(request)
    none = np.zeros(0, dtype=np.int64)
    return SamplingInputs(records, position=np.ones(num_rows, dtype=np.int64), masked_rows=none, masked_ids=none)
