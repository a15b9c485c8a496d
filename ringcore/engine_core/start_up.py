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
from ringcore.protocol.messages import EngineReady

__all__ = ["resolve_config", "start_up"]


def resolve_config(config: EngineConfig, executor: Executor) -> EngineConfig:
    """With what depends on the device, which the workers have by now: they resolve their own by the same rule."""
    if config.scheduler.max_num_batched_tokens is not None:
        return config
    devices = {told["device"] for told in executor.collective_rpc("health")}
    assert len(devices) == 1, f"ranks have different devices: {devices}"
    return config.on_device(devices.pop())


def start_up(
    config: EngineConfig, executor: Executor, phases: dict[str, float], max_model_len: int | None = None
) -> tuple[EngineReady, KVCacheManager]:
    """The same after a start and after a restart.

    config: resolved. phases: seconds of what was done so far, to which its own come.
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
            tables=tables,
        )
        assert all(plan == plans[0] for plan in plans), "ranks have different KV cache plans"
        plan = plans[0]
        if max_model_len is not None:
            plan = msgspec.structs.replace(plan, max_model_len=min(plan.max_model_len, max_model_len))
    with timed(phases, "initialize_from_config"):
        answers = executor.collective_rpc("initialize_from_config", (plan,))
        told = msgspec.convert(answers, list[dict[str, float] | None])
    add_parts(phases, "initialize_from_config", told)
    kv_cache = KVCacheManager(
        plan, max_num_seqs=config.scheduler.max_num_seqs, enable_prefix_caching=config.cache.enable_prefix_caching
    )
    num_graphs_left = max(int((of_rank or {}).get("graphs_left", 0)) for of_rank in told)
    return _describe(config, plan, tables, phases, executor.pids(), num_graphs_left), kv_cache


def _describe(
    config: EngineConfig,
    plan: KVCacheConfig,
    tables: list[dict[str, int]],
    phases: dict[str, float],
    worker_pids: dict[str, int],
    num_graphs_left: int,
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
        max_num_batched_tokens=config.scheduler.token_budget,
        num_graphs_left=num_graphs_left,
    )
