"""From workers that have their device and model to an engine that can run: what they store, what they have room for,
the plan of the cache, the cache."""

from __future__ import annotations

import os

import msgspec

from ringcore.config import EngineConfig
from ringcore.executor.base import Executor
from ringcore.executor.timing import add_parts, timed
from ringcore.kv_cache.manager import KVCacheManager
from ringcore.kv_cache.planner import plan_kv_cache
from ringcore.kv_cache.spec import KVCacheConfig, KVCacheSpec
from ringcore.protocol import EngineReady

__all__ = ["start_up"]


def start_up(
    config: EngineConfig, executor: Executor, phases: dict[str, float], max_model_len: int | None = None
) -> tuple[EngineReady, KVCacheManager]:
    """The same after a start and after a restart.

    phases: seconds of what was done so far, to which its own come.
    max_model_len: at a restart, the one that the engine was ready with. One that is "auto" is fitted again, and may
        become smaller with the memory that is free, never larger: the front end goes by the first.

    Raises `CapacityError` where one request of the model's length does not fit, and what a worker raises.
    """
    with timed(phases, "get_kv_cache_spec"):
        specs = msgspec.convert(executor.collective_rpc("get_kv_cache_spec"), list[dict[str, KVCacheSpec]])
    with timed(phases, "determine_available_memory"):
        tables = msgspec.convert(executor.collective_rpc("determine_available_memory"), list[dict[str, int]])
    with timed(phases, "plan_kv_cache"):
        plans = plan_kv_cache(
            specs,
            [table["available_kv_cache_bytes"] for table in tables],
            max_model_len=config.model.context_len,
            fit_max_model_len=config.model.max_model_len == "auto",
            max_tokens_in_flight=config.scheduler.max_tokens_in_flight,
            num_blocks_override=config.cache.num_blocks_override,
        )
        assert all(plan == plans[0] for plan in plans), "ranks have different KV cache plans"
        plan = plans[0]
        if max_model_len is not None:
            plan = msgspec.structs.replace(plan, max_model_len=min(plan.max_model_len, max_model_len))
    with timed(phases, "initialize_from_config"):
        told = executor.collective_rpc("initialize_from_config", (plan,))
    add_parts(phases, "initialize_from_config", told)
    kv_cache = KVCacheManager(
        plan, max_num_seqs=config.scheduler.max_num_seqs, enable_prefix_caching=config.cache.enable_prefix_caching
    )
    return _describe(plan, tables, phases, executor.pids()), kv_cache


def _describe(
    plan: KVCacheConfig, tables: list[dict[str, int]], phases: dict[str, float], worker_pids: dict[str, int]
) -> EngineReady:
    usable = plan.num_blocks - 1  # block 0 is the null block
    needed = plan.blocks_needed(plan.max_model_len)
    return EngineReady(
        num_blocks=usable,
        block_size=min(group.spec.block_size for group in plan.groups),
        token_capacity=usable * plan.max_model_len // needed,
        max_model_len=plan.max_model_len,
        max_concurrency=usable / needed,
        phase_seconds=phases,
        memory_bytes=[table | {"kv_cache": plan.total_bytes} for table in tables],
        pids={"engine": os.getpid()} | worker_pids,
    )
