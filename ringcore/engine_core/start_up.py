"""Engine start-up after the workers have loaded the model: KV cache specs, free memory, the cache plan, the cache."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from ringcore.config import EngineConfig
from ringcore.engine_core.kv_store import open_store
from ringcore.executor.base import Executor
from ringcore.executor.timing import add_parts, timed
from ringcore.kv_cache.manager import KVCacheManager
from ringcore.kv_cache.planner import plan_kv_cache
from ringcore.kv_cache.spec import KVCacheConfig, KVCacheSpec
from ringcore.protocol.kernel_tuning import KernelTuning
from ringcore.protocol.messages import EngineReady
from ringcore.protocol.model_report import ModelReport

__all__ = ["resolve_config", "start_up"]


def resolve_config(config: EngineConfig, executor: Executor) -> EngineConfig:
    """Fills in the options that depend on the device, which the workers report; they apply the same rule themselves."""
    if config.scheduler.max_num_batched_tokens is not None:
        return config
    devices = {report["device"] for report in executor.collective_rpc("health")}
    assert len(devices) == 1, f"ranks have different devices: {devices}"
    return config.on_device(devices.pop())


def start_up(
    config: EngineConfig, executor: Executor, phases: dict[str, float], max_model_len: int | None = None
) -> tuple[EngineReady, KVCacheManager]:
    """Runs after a start and after a restart of the workers.

    config: resolved. phases: seconds of the phases so far; this function adds its own.
    max_model_len: at a restart, that of the first start. "auto" is fitted again and may become smaller with the free
        memory, never larger: the front end validates prompts by the first.

    Raises `CapacityError` if one request of `max_model_len` tokens does not fit, and what a worker raises.
    """
    with timed(phases, "get_kv_cache_spec"):
        specs = msgspec.convert(executor.collective_rpc("get_kv_cache_spec"), list[dict[str, KVCacheSpec]])
    tuning = _tune_kernels(config, executor, phases)
    with timed(phases, "determine_available_memory"):
        tables = msgspec.convert(executor.collective_rpc("determine_available_memory"), list[dict[str, int]])
    with timed(phases, "plan_kv_cache"):
        plan = plan_kv_cache(
            specs,
            [table["available_kv_cache_bytes"] for table in tables],
            max_model_len=config.model.context_len,
            fit_max_model_len=config.model.max_model_len == "auto",
            max_tokens_in_flight=config.scheduler.max_tokens_in_flight,
            num_blocks_override=config.cache.num_blocks_override,
            tables=tables,
            num_stages=config.parallel.layout.num_stages,
        )
        if max_model_len is not None:
            plan = msgspec.structs.replace(plan, max_model_len=min(plan.max_model_len, max_model_len))
    with timed(phases, "initialize_from_config"):
        answers = executor.collective_rpc("initialize_from_config", (plan,))
        reports = [report or {} for report in msgspec.convert(answers, list[dict[str, Any] | None])]
    add_parts(phases, "initialize_from_config", reports)
    ranks = [plan.of_layers(of_rank.keys()) for of_rank in specs]
    opened = open_store(config, executor, ranks)
    kv_cache = KVCacheManager(
        plan,
        max_num_seqs=config.scheduler.max_num_seqs,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        hasher=opened.hasher,
        store=opened.store,
    )
    num_graphs_left = max(int(report.get("graphs_left", 0)) for report in reports)
    model = msgspec.convert(reports[0].get("model"), ModelReport | None)
    for table, own in zip(tables, ranks, strict=True):
        table["kv_cache"] = own.total_bytes
    ready = _describe(config, plan, tables, phases, executor.pids(), num_graphs_left, model)
    return msgspec.structs.replace(ready, kernel_tuning=tuning), kv_cache


def _tune_kernels(config: EngineConfig, executor: Executor, phases: dict[str, float]) -> KernelTuning | None:
    """-> what rank 0 says of it."""
    if not config.device.kernel_autotune:
        return None
    with timed(phases, "tune_kernels"):
        return msgspec.convert(executor.collective_rpc("tune_kernels")[0], KernelTuning | None)


def _describe(
    config: EngineConfig,
    plan: KVCacheConfig,
    tables: list[dict[str, int]],
    phases: dict[str, float],
    worker_pids: dict[str, int],
    num_graphs_left: int,
    model: ModelReport | None,
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
        memory_bytes=tables,
        pids={"engine": os.getpid()} | worker_pids,
        max_num_batched_tokens=config.scheduler.token_budget,
        num_graphs_left=num_graphs_left,
        model=model,
        kv_cache_token_bytes=plan.token_bytes,
    )
