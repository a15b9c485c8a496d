"""Where a rank's memory goes, as a table of bytes, and how much of it is left for the KV cache.

What a step takes is measured where the platform can (`profile_run`): the peak of the largest one, beside weights and
what the libraries keep. On a CPU that run would take as long as many real steps, and what a process has resident says
little about what it will need; there it is computed, as an upper bound:

    activations       = tokens * dtype * (4 * hidden + max(3 * intermediate, 2 * heads + 4 * KV heads, a rank's share))
                      + tile mask + 6 arrays of float32 logits [rows that sample, vocabulary], or 3 of a piece of a
                        prompt, whose log-probabilities are asked for
    attention_gather  = one tensor's share of the pool: at most all blocks of a layer are copied together at a time;
                      nothing where the attention reads pages where they lie

Graphs are captured when the pages stand, so theirs is an estimate: the peak of the largest step of single tokens, its
logits among it, which all of them share, the workspace of cuBLAS, what the driver takes with the first graph, and an
entry a node.

    available_kv_cache_bytes = budget - activations - attention_gather - graphs - rows - margin
                      budget: `Platform.memory_budget_bytes`, of which what the process has already, the weights among
                      it, is no part
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ringcore.checkpoint import ModelSpec
from ringcore.config import EngineConfig
from ringcore.kv_cache.planner import plan_without_limit
from ringcore.kv_cache.spec import DTYPE_BYTES, KVCacheConfig, KVCacheSpec
from ringcore.worker.logits.prompt_logprobs import positions_at_once
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.rows.row_tables import table_bytes

__all__ = ["StepPeaks", "activation_bytes", "format_table", "memory_table", "planned_cache"]

_log = logging.getLogger(__name__)

_MASK_ROWS = 256  # the query rows that share an attention mask: see the torch_sdpa backend
_LOGITS_ARRAYS = 6  # the logits; the sampler's scaled ones, weights and filtered ones; two for log-probabilities
_PROMPT_LOGITS_ARRAYS = 3  # the logits, and two for their log-probabilities, of as many positions as are taken at once

# Measured on an H200 with CUDA 13.
_FIRST_GRAPH_BYTES = 70 << 20
_GRAPH_WORKSPACE_BYTES = 32 << 20  # of cuBLAS, for the stream on which graphs are captured
_GRAPH_NODE_BYTES = 3500
_NODES_A_LAYER = 12
_NODES_BESIDE = 30

_ROUNDING_BYTES = 64 << 20  # torch's allocator takes 2 MiB at least, and 20 MiB for what is larger
_MARGIN_BYTES = 256 << 20  # for memory in parts that nothing fits into, and kernels that are loaded later


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """What steps take of the device while they run, measured, in bytes."""

    largest_bytes: int  # max_num_batched_tokens tokens, and max_num_seqs rows that sample with filters
    decode_bytes: int  # one token of each row that a graph may have
    num_graphs: int  # that will be captured


def activation_bytes(spec: ModelSpec, config: EngineConfig, dtype: str) -> int:
    """The most that one step holds beside weights and pages, on one rank."""
    num_tokens, ranks = config.scheduler.token_budget, config.parallel.tensor_parallel_size
    heads = 2 * spec.num_heads + 4 * max(spec.num_kv_heads, ranks)
    inner = max(3 * spec.intermediate_size, heads * spec.head_dim) // ranks
    layer = num_tokens * (4 * spec.hidden_size + inner) * DTYPE_BYTES[dtype]
    mask = min(_MASK_ROWS, num_tokens) * config.model.context_len * DTYPE_BYTES[dtype]
    num_sampled = min(config.scheduler.max_num_seqs, num_tokens)
    of_prompts = min(num_tokens, positions_at_once(spec.vocab_size, 0))
    num_rows = max(_LOGITS_ARRAYS * num_sampled, _PROMPT_LOGITS_ARRAYS * of_prompts)
    return layer + mask + num_rows * spec.vocab_size * 4


def memory_table(
    config: EngineConfig,
    platform: Platform,
    specs: Mapping[str, KVCacheSpec],
    dtype: str,
    weights_bytes: int,
    peaks: StepPeaks | None = None,
) -> dict[str, int]:
    """The table of one rank, called when its weights are loaded; `available_kv_cache_bytes` is the answer.

    `kv_cache_bytes` given is the answer as it is. Else the answer is no more than can be of use, which is twice what
    max_num_seqs requests of the greatest length take: as much again for the prefix cache.
    peaks: as `profile_steps` measured them; None: computed.
    Raises `ConfigError` where the layers cannot share a pool.
    """
    table = {
        "total_bytes": platform.total_memory_bytes(),
        "free_bytes": platform.free_memory_bytes(),
        "weights_bytes": weights_bytes,
    }
    plan = planned_cache(config, specs)
    needs = _needs(config, platform, plan, dtype, peaks)
    process = platform.process_memory()
    if process is not None:
        table["non_torch_bytes"] = process.non_torch_bytes
    if config.cache.kv_cache_bytes is not None:
        return table | needs | {"available_kv_cache_bytes": config.cache.kv_cache_bytes}
    share = config.cache.gpu_memory_utilization or platform.default_memory_share
    shared = platform.shared_memory_bytes(config.parallel.tensor_parallel_size)
    asked = int(shared * share)
    budget = platform.memory_budget_bytes(asked)
    left = max(0, budget - sum(needs.values()))
    gather = {"attention_gather_bytes": left // (plan.num_tensors + 1)} if platform.attention_gathers else {}
    available = min(left - sum(gather.values()), _useful_bytes(config, plan))
    table |= {"shared_bytes": shared, "asked_bytes": asked, "budget_bytes": budget}
    return table | needs | gather | {"available_kv_cache_bytes": available}


def _needs(
    config: EngineConfig, platform: Platform, plan: KVCacheConfig, dtype: str, peaks: StepPeaks | None
) -> dict[str, int]:
    """What steps will take beside what the process has already and the pages."""
    computed = activation_bytes(config.model.spec, config, dtype)
    if peaks is None:
        return {"activations_bytes": computed}
    if peaks.largest_bytes > computed + _ROUNDING_BYTES:
        _log.warning("a step takes %d bytes, and at most %d were computed", peaks.largest_bytes, computed)
    return {
        "activations_bytes": peaks.largest_bytes,
        "graphs_bytes": _graphs_bytes(config, peaks),
        "rows_bytes": _rows_bytes(config, plan),
        "margin_bytes": _MARGIN_BYTES,
    }


def _graphs_bytes(config: EngineConfig, peaks: StepPeaks) -> int:
    if not peaks.num_graphs:
        return 0
    nodes = _NODES_A_LAYER * config.model.spec.num_layers + _NODES_BESIDE
    entries = peaks.num_graphs * nodes * _GRAPH_NODE_BYTES
    return _FIRST_GRAPH_BYTES + _GRAPH_WORKSPACE_BYTES + entries + peaks.decode_bytes


def _rows_bytes(config: EngineConfig, plan: KVCacheConfig) -> int:
    """The block tables: the rows' own, and a step's. What rows with adjusted logits may come to need: counts of tokens
    and masks."""
    max_num_seqs, vocab_size = config.scheduler.max_num_seqs, config.model.spec.vocab_size
    blocks = sum(-(-config.model.context_len // group.spec.block_size) for group in plan.groups)
    return 2 * 4 * max_num_seqs * blocks + table_bytes(max_num_seqs, vocab_size)


def planned_cache(config: EngineConfig, specs: Mapping[str, KVCacheSpec]) -> KVCacheConfig:
    """How the layers will share the cache, which does not depend on how much of it there is."""
    return plan_without_limit(
        dict(specs),
        max_model_len=config.model.context_len,
        max_tokens_in_flight=config.scheduler.max_tokens_in_flight,
    )


def _useful_bytes(config: EngineConfig, plan: KVCacheConfig) -> int:
    num_blocks = plan.blocks_needed(config.model.context_len)
    return (2 * config.scheduler.max_num_seqs * num_blocks + 1) * plan.block_bytes


def format_table(rank: int, table: Mapping[str, int]) -> str:
    """The table for a log, one line an entry, in MiB."""
    lines = [f"  {name.removesuffix('_bytes').replace('_', ' '):<24}{n / 2**20:>12.1f}" for name, n in table.items()]
    return "\n".join([f"memory of rank {rank}, MiB:", *lines])
