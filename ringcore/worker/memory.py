"""Where a rank's memory goes, as a table of bytes, and how much of it is left for the KV cache.

The peak of a step is computed and not measured: on a CPU a run of max_num_batched_tokens tokens takes as long as many
real steps, and what a process has resident says little about what it will need. The formulas are upper bounds:

    activations       = tokens * dtype * (4 * hidden + max(3 * intermediate, 2 * heads + 4 * KV heads, a rank's share))
                      + tile mask + 4 arrays of float32 logits [rows that sample, vocabulary]
    attention_gather  = one tensor's share of the pool: at most all blocks of a layer are copied together at a time;
                        nothing where the attention reads pages where they lie
    available_kv_cache_bytes = budget - activations - attention_gather,  budget: `Platform.memory_budget_bytes`
"""

from __future__ import annotations

from collections.abc import Mapping

from ringcore.checkpoint import ModelSpec
from ringcore.config import EngineConfig
from ringcore.kv_cache.planner import plan_kv_cache
from ringcore.kv_cache.spec import DTYPE_BYTES, KVCacheConfig, KVCacheSpec
from ringcore.worker.platform import Platform

__all__ = ["activation_bytes", "format_table", "memory_table"]

_MASK_ROWS = 256  # the query rows that share an attention mask: see the torch_sdpa backend
_MORE_THAN_ANY_HOST_HAS = 1 << 60  # bytes
_LOGITS_ARRAYS = 4  # the logits, and the sampler's scaled ones, weights and filtered ones


def activation_bytes(spec: ModelSpec, config: EngineConfig, dtype: str) -> int:
    """The most that one step holds beside weights and pages, on one rank."""
    num_tokens, ranks = config.scheduler.max_num_batched_tokens, config.parallel.tensor_parallel_size
    heads = 2 * spec.num_heads + 4 * max(spec.num_kv_heads, ranks)
    inner = max(3 * spec.intermediate_size, heads * spec.head_dim) // ranks
    layer = num_tokens * (4 * spec.hidden_size + inner) * DTYPE_BYTES[dtype]
    mask = min(_MASK_ROWS, num_tokens) * config.model.context_len * DTYPE_BYTES[dtype]
    num_sampled = min(config.scheduler.max_num_seqs, num_tokens)
    return layer + mask + _LOGITS_ARRAYS * num_sampled * spec.vocab_size * 4


def memory_table(
    config: EngineConfig, platform: Platform, specs: Mapping[str, KVCacheSpec], dtype: str, weights_bytes: int
) -> dict[str, int]:
    """The table of one rank, called when its weights are loaded; `available_kv_cache_bytes` is the answer.

    `kv_cache_bytes` given is the answer as it is. Else the answer is no more than can be of use, which is twice what
    max_num_seqs requests of the greatest length take: as much again for the prefix cache.
    Raises `ConfigError` where the layers cannot share a pool.
    """
    activations = activation_bytes(config.model.spec, config, dtype)
    table = {
        "total_bytes": platform.total_memory_bytes(),
        "free_bytes": platform.free_memory_bytes(),
        "weights_bytes": weights_bytes,
        "activations_bytes": activations,
    }
    if config.cache.kv_cache_bytes is not None:
        return table | {"available_kv_cache_bytes": config.cache.kv_cache_bytes}
    share = config.cache.gpu_memory_utilization or platform.default_memory_share
    budget = platform.memory_budget_bytes(share, config.parallel.tensor_parallel_size)
    plan = _plan(config, specs)
    gather = max(0, budget - activations) // (plan.num_tensors + 1) if platform.attention_gathers else 0
    return table | {
        "budget_bytes": budget,
        "attention_gather_bytes": gather,
        "available_kv_cache_bytes": min(max(0, budget - activations - gather), _useful_bytes(config, plan)),
    }


def _plan(config: EngineConfig, specs: Mapping[str, KVCacheSpec]) -> KVCacheConfig:
    """How the layers will share the cache, which does not depend on how much of it there is."""
    (plan,) = plan_kv_cache(
        [dict(specs)],
        [_MORE_THAN_ANY_HOST_HAS],
        max_model_len=config.model.context_len,
        fit_max_model_len=False,
        max_tokens_in_flight=config.scheduler.max_tokens_in_flight,
        num_blocks_override=None,
    )
    return plan


def _useful_bytes(config: EngineConfig, plan: KVCacheConfig) -> int:
    num_blocks = plan.blocks_needed(config.model.context_len)
    return (2 * config.scheduler.max_num_seqs * num_blocks + 1) * plan.block_bytes


def format_table(rank: int, table: Mapping[str, int]) -> str:
    """The table for a log, one line an entry, in MiB."""
    lines = [f"  {name.removesuffix('_bytes').replace('_', ' '):<24}{n / 2**20:>12.1f}" for name, n in table.items()]
    return "\n".join([f"memory of rank {rank}, MiB:", *lines])
