"""From workers that have their device and model to an engine that can run: what they store, what they have room for,
the plan of the cache, the cache."""

from __future__ import annotations

import os

import msgspec

from ringcore.config import EngineConfig
from ringcore.executor.base import Executor
from ringcore.executor.timing import timed
from ringcore.kv_cache.manager import KVCacheManager
from ringcore.kv_cache.planner import plan_kv_cache
from ringcore.kv_cache.spec import KVCacheConfig, KVCacheSpec
from ringcore.protocol import EngineReady

__all__ = ["start_up"]


def start_up(config: EngineConfig, executor: Executor, phases: dict[str, float]) -> tuple[EngineReady, KVCacheManager]:
    """The same after a start and after a restart. `phases`: seconds of what was done so far, to which its own come.

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
            num_blocks_override=config.cache.num_blocks_override,
        )
    with timed(phases, "initialize_from_config"):
        assert all(plan == plans[0] for plan in plans), "ranks have different KV cache plans"
        executor.collective_rpc("initialize_from_config", (plans[0],))
    plan = plans[0]
    ready = _describe(config, plan, tables, phases, executor.pids())
    return ready, KVCacheManager(plan.groups[0].spec, plan.num_blocks, config.cache.enable_prefix_caching)


def _describe(
    config: EngineConfig,
    plan: KVCacheConfig,
    tables: list[dict[str, int]],
    phases: dict[str, float],
    worker_pids: dict[str, int],
) -> EngineReady:
    spec, max_model_len = plan.groups[0].spec, config.model.context_len
    usable = plan.num_blocks - 1  # block 0 is the null block
    return EngineReady(
        num_blocks=usable,
        block_size=spec.block_size,
        token_capacity=usable * spec.block_size,
        max_model_len=max_model_len,
        max_concurrency=usable / spec.blocks_needed(max_model_len),
        phase_seconds=phases,
        memory_bytes=[table | {"kv_cache": plan.total_bytes} for table in tables],
        pids={"engine": os.getpid()} | worker_pids,
    )
