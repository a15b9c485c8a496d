"""The error of a KV cache too small for one request, with the memory budget and the option values that would work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ringcore.errors import CapacityError
from ringcore.host.byte_sizes import format_bytes
from ringcore.kv_cache.spec import KVCacheConfig

__all__ = ["budget_text", "too_few_blocks", "too_little_memory"]


def too_few_blocks(plan: KVCacheConfig, num_tokens: int, fits: int) -> CapacityError:
    """For num_blocks_override as the cause; in blocks. The null block counts in the cache, and not in the request."""
    needed, usable = plan.blocks_needed(num_tokens), plan.num_blocks - 1
    return CapacityError(
        f"KV cache: {_request(plan, num_tokens)} needs {needed} blocks, num_blocks_override={plan.num_blocks} has "
        f"{usable} beside the null block, {needed - usable} missing; {_shorter(plan, num_tokens, fits)}raise "
        f"num_blocks_override to {needed + 1}",
        needed_blocks=needed,
        available_blocks=usable,
        needed_bytes=(needed + 1) * plan.block_bytes,
        available_bytes=plan.total_bytes,
        max_model_len=fits,
        num_blocks_override=needed + 1,
    )


def too_little_memory(
    plan: KVCacheConfig, num_tokens: int, fits: int, available_bytes: int, table: Mapping[str, int]
) -> CapacityError:
    """table: memory budget of the rank with the least memory, see `worker.memory`; empty if unknown."""
    available = max(available_bytes, 0)
    needed = (plan.blocks_needed(num_tokens) + 1) * plan.block_bytes  # with the null block
    numbers = _enough(plan, needed, table)
    remedies = [f"raise {name} to {_value(number)}" for name, number in numbers.items()]
    if not remedies:
        remedies = ["end what else uses this memory", "lower max_num_batched_tokens or max_num_seqs"]
    budget = f" ({budget_text(table)})" if table else ""
    return CapacityError(
        f"KV cache: {_request(plan, num_tokens)} needs {format_bytes(needed, exact=True)}, "
        f"{format_bytes(available, exact=True)} available, {format_bytes(needed - available, exact=True)} missing; "
        f"{_shorter(plan, num_tokens, fits)}{' or '.join(remedies)}{budget}",
        needed_bytes=needed,
        available_bytes=available_bytes,
        missing_bytes=needed - available,
        max_model_len=fits,
        budget=dict(table),
        **numbers,
    )


def budget_text(table: Mapping[str, int]) -> str:
    """The memory budget of a rank in one line."""
    entries = (f"{name.removesuffix('_bytes').replace('_', ' ')} {format_bytes(n)}" for name, n in table.items())
    return f"memory: {', '.join(entries)}"


def _request(plan: KVCacheConfig, num_tokens: int) -> str:
    return f"one request of {num_tokens} tokens{', the least of use,' if num_tokens < plan.max_model_len else ''}"


def _shorter(plan: KVCacheConfig, num_tokens: int, fits: int) -> str:
    return f"lower max_model_len to {fits} or " if fits and num_tokens == plan.max_model_len else ""


def _value(number: float) -> str:
    return format_bytes(number, exact=True) if isinstance(number, int) else str(number)


def _enough(plan: KVCacheConfig, needed: int, table: Mapping[str, int]) -> dict[str, Any]:
    """By option, the smallest value that makes `needed` bytes available, if one exists."""
    if "budget_bytes" not in table:  # kv_cache_bytes was given, or the budget is unknown
        return {"kv_cache_bytes": needed}
    left = needed
    if "attention_gather_bytes" in table:  # room for one more tensor: see `worker.memory`
        left = needed + -(-needed // plan.num_tensors) + 1
    parts = ("activations_bytes", "graphs_bytes", "rows_bytes", "margin_bytes")
    steps = sum(table.get(name, 0) for name in parts)
    lacking = steps + left - table["budget_bytes"]
    numbers: dict[str, Any] = {}
    share = math.ceil((table["asked_bytes"] + lacking) / table["shared_bytes"] * 100) / 100
    if share <= 1 and table["budget_bytes"] + lacking <= table["free_bytes"]:
        numbers["gpu_memory_utilization"] = share
    if steps + needed <= table["free_bytes"]:
        numbers["kv_cache_bytes"] = needed
    return numbers
