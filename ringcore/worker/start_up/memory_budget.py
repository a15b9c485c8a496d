"""The memory table of a rank in bytes, and how much memory is available for the KV cache.

A step's memory is measured where the platform can (`profile_run`): the peak of the largest step, beside weights and
library workspaces. On a CPU a profile run would take as long as many real steps, and the resident size of a process
says little about its peak; there an upper bound is computed:

    activations       = tokens * dtype * (4 * hidden + max(3 * intermediate, 2 * heads + 4 * KV heads, a rank's share))
                      + tile mask + 6 arrays of float32 logits [rows that sample, vocabulary], or 3 of a chunk of
                        prompt logprobs
    attention_gather  = one layer's share of the pool: at most all blocks of one layer are gathered at a time; zero
                      where attention reads pages in place

CUDA graphs are captured after the KV cache is allocated, so their memory is an estimate: the peak of the largest
decoding step including its logits (all graphs share one pool and one logits buffer), the cuBLAS workspace, the driver's
memory for the first graph, and an entry per node. Graphs of mixed steps have a pool of their own: up to 512 tokens it
is within the margin, for more their pass is measured too.

    available_kv_cache_bytes = budget - activations - attention_gather - graphs - rows - margin
                      budget: `Platform.memory_budget_bytes`, which excludes what the process already uses,
                      weights included
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ringcore.checkpoint import AnySpec, ModelSpec
from ringcore.config import EngineConfig
from ringcore.kv_cache.planner import plan_without_limit
from ringcore.kv_cache.spec import DTYPE_BYTES, KVCacheConfig, KVCacheSpec
from ringcore.worker.drafts.head_features import MOST_PENDING
from ringcore.worker.drafts.head_runs import MOST_AT_ONCE
from ringcore.worker.logits.prompt_logprobs import positions_at_once
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.rows.row_tables import table_bytes
from ringcore.worker.runner.head_graphs import GRAPH_SIZES

__all__ = ["StepPeaks", "activation_bytes", "format_table", "memory_table", "planned_cache"]

_log = logging.getLogger(__name__)

_MASK_ROWS = 256  # query rows that share an attention mask: see the torch_sdpa backend
_LOGITS_ARRAYS = 6  # logits; the sampler's scaled logits, weights and filtered weights; two for logprobs
_PROMPT_LOGITS_ARRAYS = 3  # logits, and two for their logprobs, of the positions computed at once

# Measured on an H200 with CUDA 13.
_FIRST_GRAPH_BYTES = 70 << 20
_GRAPH_WORKSPACE_BYTES = 32 << 20  # cuBLAS's workspace of the capture stream
_GRAPH_NODE_BYTES = 3500
_NODES_PER_LAYER = 12
_NODES_PER_UNFUSED_LAYER = 110  # of transformers' models
_OTHER_NODES = 30

_ROUNDING_BYTES = 64 << 20  # torch's allocator reserves segments of 2 MiB, or 20 MiB for larger tensors
_MARGIN_BYTES = 256 << 20  # fragmentation, and kernels that are loaded later


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """Measured peak device memory of steps, in bytes."""

    largest_bytes: int  # max_num_batched_tokens tokens, and max_num_seqs rows that sample with filters
    decode_bytes: int  # a decoding step of max_num_seqs rows
    num_graphs: int  # that will be captured
    mixed_bytes: int = 0  # the pass of a mixed graph above 512 tokens, and the hidden states that each size keeps


def activation_bytes(spec: AnySpec, config: EngineConfig, dtype: str) -> int:
    """An upper bound of a step's memory beside weights and KV cache, on one rank."""
    num_tokens, ranks = config.scheduler.token_budget, config.parallel.tensor_parallel_size
    if isinstance(spec, ModelSpec):
        heads = 2 * spec.num_heads + 4 * max(spec.num_kv_heads, ranks)
        inner = max(3 * spec.intermediate_size, heads * spec.head_dim) // ranks
        if (experts := spec.experts) is not None:  # of a token's experts all may be of one rank
            inner = max(inner, experts.num_experts_per_tok * (3 * experts.intermediate_size + 3 * spec.hidden_size))
    else:
        inner = spec.layer_width  # on every rank: what is not in the model's plan is not split
    layer = num_tokens * (4 * spec.hidden_size + inner) * DTYPE_BYTES[dtype]
    mask = min(_MASK_ROWS, num_tokens) * config.model.context_len * DTYPE_BYTES[dtype]
    num_sampled = min(config.scheduler.max_sampled_positions, num_tokens)
    num_prompt_rows = min(num_tokens, positions_at_once(spec.vocab_size, 0))
    num_rows = max(_LOGITS_ARRAYS * num_sampled, _PROMPT_LOGITS_ARRAYS * num_prompt_rows)
    return layer + mask + num_rows * spec.vocab_size * 4


def memory_table(
    config: EngineConfig,
    platform: Platform,
    specs: Mapping[str, KVCacheSpec],
    dtype: str,
    weights_bytes: int,
    peaks: StepPeaks | None = None,
    rank: int = 0,
) -> dict[str, int]:
    """The table of one rank, called after its weights are loaded; `available_kv_cache_bytes` is the result.

    The option `kv_cache_bytes` is the result as given. Else it is capped at the useful size: twice the need of
    max_num_seqs requests of the maximum length, the second half for the prefix cache.
    peaks: from `profile_steps`; None: an upper bound is computed.
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
    shared = platform.shared_memory_bytes(config.parallel.layout.num_local_ranks(rank))
    asked = int(shared * share)
    budget = platform.memory_budget_bytes(asked)
    left = max(0, budget - sum(needs.values()))
    copies = _gathered_copies(config, dtype)  # of one layer's cache, all of which one step may gather
    gather = (
        {"attention_gather_bytes": left * copies // (plan.num_tensors + copies)} if platform.attention_gathers else {}
    )
    available = min(left - sum(gather.values()), _useful_bytes(config, plan))
    table |= {"shared_bytes": shared, "asked_bytes": asked, "budget_bytes": budget}
    return table | needs | gather | {"available_kv_cache_bytes": available}


def _gathered_copies(config: EngineConfig, dtype: str) -> int:
    """What attention gathers of a layer's cache, in bytes of that cache: the pages, and FP8 expanded to numbers."""
    return 1 + (DTYPE_BYTES[dtype] + (4 if dtype == "float16" else 0) if config.cache.is_fp8 else 0)


def _needs(
    config: EngineConfig, platform: Platform, plan: KVCacheConfig, dtype: str, peaks: StepPeaks | None
) -> dict[str, int]:
    """The memory that steps will need beside what the process already uses and the KV cache."""
    computed = activation_bytes(config.model.spec, config, dtype)
    step_bytes = computed if peaks is None else peaks.largest_bytes
    has_graphs = peaks is not None and peaks.num_graphs > 0
    has_head = config.model.draft_head is not None
    head = {"draft_head_bytes": _head_bytes(config, dtype, step_bytes, has_graphs)} if has_head else {}
    if peaks is None:
        return {"activations_bytes": computed} | head
    if peaks.largest_bytes > computed + _ROUNDING_BYTES:
        _log.warning("a step takes %d bytes, above the computed bound of %d", peaks.largest_bytes, computed)
    return {
        "activations_bytes": peaks.largest_bytes,
        "graphs_bytes": _graphs_bytes(config, peaks),
        "rows_bytes": _rows_bytes(config, plan),
        "margin_bytes": _MARGIN_BYTES,
        **head,
    }


def _head_bytes(config: EngineConfig, dtype: str, step_bytes: int, has_graphs: bool) -> int:
    """An upper bound of what a head that drafts takes: features of tokens that it has not computed, what a run of it
    takes above a step of the model, whose memory is free by then, and what its graphs keep."""
    head = config.model.draft_head
    assert head is not None
    spec, ranks = head.layer, config.parallel.tensor_parallel_size
    features = (config.scheduler.token_budget + MOST_PENDING) * head.num_taps * spec.hidden_size * DTYPE_BYTES[dtype]
    if isinstance(spec, ModelSpec):
        heads = (2 * spec.num_heads + 4 * max(spec.num_kv_heads, ranks)) * spec.head_dim
        widest = max(3 * spec.intermediate_size, heads) // ranks
    else:
        widest = spec.layer_width
    inner = 4 * spec.hidden_size + widest
    of_token, of_logits = inner * DTYPE_BYTES[dtype] + 4 * 4 * spec.hidden_size, 2 * 4 * head.draft_vocab_size
    run = MOST_AT_ONCE * of_token + config.scheduler.max_sampled_positions * of_logits
    graphs = GRAPH_SIZES[-1] * (of_token + of_logits) if has_graphs else 0
    return features + max(0, 2 * features + run - step_bytes) + graphs


def _graphs_bytes(config: EngineConfig, peaks: StepPeaks) -> int:
    if not peaks.num_graphs:
        return 0
    spec = config.model.spec
    nodes_per_layer = _NODES_PER_LAYER if isinstance(spec, ModelSpec) else _NODES_PER_UNFUSED_LAYER
    nodes = nodes_per_layer * spec.num_layers + _OTHER_NODES
    entries = peaks.num_graphs * nodes * _GRAPH_NODE_BYTES
    return _FIRST_GRAPH_BYTES + _GRAPH_WORKSPACE_BYTES + entries + peaks.decode_bytes + peaks.mixed_bytes


def _rows_bytes(config: EngineConfig, plan: KVCacheConfig) -> int:
    """The block tables of the persistent batch and of a step, and the largest token counts and bitmasks of rows with
    adjusted logits."""
    max_num_seqs, vocab_size = config.scheduler.max_num_seqs, config.model.spec.vocab_size
    blocks = sum(-(-config.model.context_len // group.spec.block_size) for group in plan.groups)
    return 2 * 4 * max_num_seqs * blocks + table_bytes(max_num_seqs, vocab_size)


def planned_cache(config: EngineConfig, specs: Mapping[str, KVCacheSpec]) -> KVCacheConfig:
    """How the layers share the KV cache, independent of its size."""
    return plan_without_limit(
        dict(specs),
        max_model_len=config.model.context_len,
        max_tokens_in_flight=config.scheduler.max_tokens_in_flight,
    )


def _useful_bytes(config: EngineConfig, plan: KVCacheConfig) -> int:
    num_blocks = plan.blocks_needed(config.model.context_len)
    return (2 * config.scheduler.max_num_seqs * num_blocks + 1) * plan.block_bytes


def format_table(rank: int, table: Mapping[str, int]) -> str:
    """The table for the log, one line per entry, in MiB."""
    lines = [f"  {name.removesuffix('_bytes').replace('_', ' '):<24}{n / 2**20:>12.1f}" for name, n in table.items()]
    return "\n".join([f"memory of rank {rank}, MiB:", *lines])
