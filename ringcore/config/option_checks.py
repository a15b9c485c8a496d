"""Validates option values: each alone, and against each other and the model."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from ringcore.checkpoint import AnySpec, ModelSpec
from ringcore.checkpoint.family import Families
from ringcore.checkpoint.quantization.shares import refused_expert_shares
from ringcore.config.admin_keys import check_endpoint, read_server_keys
from ringcore.config.host_checks import check_hosts
from ringcore.config.options import (
    ATTENTION_BACKENDS,
    DEVICE_MEMORY,
    DEVICES,
    DTYPES,
    EXECUTORS,
    GENERATION_CONFIGS,
    GGUF_WEIGHTS,
    KV_CACHE_DTYPES,
    LARGE_MESSAGES,
    LOAD_FORMATS,
    MAX_GRAPH_TOKENS,
    MODEL_IMPLS,
    QUANTIZATIONS,
    SCHEDULING_POLICIES,
    START_FROM,
    STRUCTURED_OUTPUTS_BACKENDS,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from ringcore.config.speculation import check_head_split, check_speculative
from ringcore.config.split_checks import check_experts, check_split
from ringcore.config.value_checks import bad_value, check_count, check_seconds
from ringcore.params.vllm_values import what_to_give

__all__ = ["check_kv_cache_dtype", "check_together", "check_values"]

MIN_RING_BYTES, MAX_RING_BYTES = 64 << 10, 1 << 30
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "load_format": LOAD_FORMATS,
    "model_impl": MODEL_IMPLS,
    "generation_config": GENERATION_CONFIGS,
    "dtype": DTYPES,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "device": DEVICES,
    "gguf_weights": GGUF_WEIGHTS,
    "scheduling_policy": SCHEDULING_POLICIES,
    "attention_backend": ATTENTION_BACKENDS,
    "device_memory": DEVICE_MEMORY,
    "large_messages": LARGE_MESSAGES,
    "start_from": START_FROM,
    "structured_outputs_backend": STRUCTURED_OUTPUTS_BACKENDS,
}

_COUNTS = (
    *("block_size", "max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size", "max_tokenizer_queue"),
    "expert_balance_steps",
)

_SECONDS = ("stall_warning_s", "structured_outputs_timeout_s", "tokenizer_timeout_s", "kernel_autotune_timeout_s")
_FLAGS = (
    *("allow_callables", "local_admin", "enable_prefix_caching", "preempt_lower_priority", "enforce_eager"),
    *("enable_sleep_mode", "kernel_autotune"),
)


def check_values(options: Mapping[str, Any]) -> None:
    """Each option alone."""
    if not isinstance(options["model"], str | os.PathLike) or not str(options["model"]):
        raise bad_value("model", options["model"], "give a model folder, a .gguf file, or a hub id")
    for name, choices in _CHOICES.items():
        if options[name] not in choices:
            remedy = what_to_give(name, options[name]) or f"give one of {', '.join(choices)}"
            raise bad_value(name, options[name], remedy)
    if options["quantization"] not in (None, *QUANTIZATIONS):
        remedy = f"give one of {', '.join(QUANTIZATIONS)}, or None: a quantized checkpoint says itself how it is"
        raise bad_value("quantization", options["quantization"], remedy)
    executor = options["executor"]
    if not isinstance(executor, str) or (executor not in EXECUTORS and ":" not in executor):
        raise bad_value(
            "executor", executor, f"give one of {', '.join(EXECUTORS)}, an Executor class, or 'module:Class'"
        )
    _check_counts(options)
    for name in _SECONDS:
        check_seconds(name, options[name])
    for name in ("step_timeout_s", "engine_timeout_s"):
        if options[name] is not None:
            check_seconds(name, options[name])
    for name in _FLAGS:
        if not isinstance(options[name], bool):
            raise bad_value(name, options[name], "give True or False")
    share = options["gpu_memory_utilization"]
    if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
        raise bad_value("gpu_memory_utilization", share, "give a number above 0 and at most 1")
    _check_sleep(options["enable_sleep_mode"], options["sleep_directory"], options["device_memory"])
    _check_host_kv_cache(options)
    check_speculative(options)
    _check_admin(options["admin_endpoint"], options["admin_keys"])
    check_hosts(options)
    _check_installed("structured_outputs_backend", options["structured_outputs_backend"])


def _check_counts(options: Mapping[str, Any]) -> None:
    for name in _COUNTS:
        check_count(name, options[name], 1)
    for name in (
        "kv_cache_bytes",
        "host_kv_cache_bytes",
        "host_kv_cache_dir_bytes",
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
    ):
        if options[name] is not None:
            check_count(name, options[name], 1)
    if options["max_model_len"] not in (None, "auto"):
        check_count("max_model_len", options["max_model_len"], 1, or_else="'auto'")
    if options["num_blocks_override"] is not None:
        check_count("num_blocks_override", options["num_blocks_override"], 2)
    if options["max_cudagraph_capture_size"] is not None:
        name = "max_cudagraph_capture_size"
        check_count(name, options[name], 1, MAX_GRAPH_TOKENS, or_else=f"None for {MAX_GRAPH_TOKENS}")
    if options["steps_in_flight"] not in (None, 1, 2):
        raise bad_value("steps_in_flight", options["steps_in_flight"], "give 1 or 2, or leave it out")
    for name in ("max_worker_restarts", "max_skip_ahead"):
        check_count(name, options[name], 0)
    if options["redundant_experts"] is not None:
        check_count("redundant_experts", options["redundant_experts"], 0, or_else="None")
        if not options["expert_parallel"]:
            remedy = "it is of whole experts on each rank; give expert_parallel=True too, or leave this out"
            raise bad_value("redundant_experts", options["redundant_experts"], remedy)
    if options["max_logprobs"] != -1 or isinstance(options["max_logprobs"], bool):
        check_count("max_logprobs", options["max_logprobs"], 0, 2**31 - 1, or_else="-1 for no bound")
    for name in ("call_ring_bytes", "reply_ring_bytes"):
        check_count(name, options[name], MIN_RING_BYTES, MAX_RING_BYTES)


def _check_installed(option: str, library: str) -> None:
    if library == "auto" or importlib.util.find_spec(library) is not None:
        return
    extra = {"llguidance": "structured", "xgrammar": "xgrammar"}[library]
    raise bad_value(option, library, f"it is not installed; run pip install 'ringcore[{extra}]', or give 'auto'")


def _check_sleep(is_enabled: bool, directory: Any, device_memory: str) -> None:
    if is_enabled and device_memory == "plain":
        raise bad_value("enable_sleep_mode", True, "device_memory='plain' has no arenas, which it needs; give 'auto'")
    if directory is None:
        return
    if not isinstance(directory, str | os.PathLike) or not os.path.isdir(directory):
        raise bad_value("sleep_directory", directory, "give an existing directory, with room for the weights")
    if not is_enabled:
        raise bad_value(
            "sleep_directory", directory, "it is for sleep mode; give enable_sleep_mode=True too, or neither"
        )


def _check_host_kv_cache(options: Mapping[str, Any]) -> None:
    num_bytes, directory = options["host_kv_cache_bytes"], options["host_kv_cache_dir"]
    if num_bytes is not None and not options["enable_prefix_caching"]:
        raise bad_value(
            "host_kv_cache_bytes", num_bytes, "it is for blocks of the prefix cache; give enable_prefix_caching=True"
        )
    check_seconds("host_kv_cache_dir_timeout_s", options["host_kv_cache_dir_timeout_s"])
    if directory is None:
        if (limit := options["host_kv_cache_dir_bytes"]) is not None:
            raise bad_value(
                "host_kv_cache_dir_bytes", limit, "give host_kv_cache_dir too, the directory that it bounds"
            )
        return
    if not isinstance(directory, str | os.PathLike) or not os.path.isdir(directory):
        raise bad_value("host_kv_cache_dir", directory, "give an existing directory")
    if num_bytes is None:
        raise bad_value("host_kv_cache_dir", directory, "give host_kv_cache_bytes too, the memory in front of it")


def _check_admin(endpoint: object, keys: Any) -> None:
    """The admin endpoint and its keys require each other, and the keys must be valid and private."""
    if endpoint is None and keys is None:
        return
    if endpoint is None:
        raise bad_value("admin_keys", keys, "they are for the admin endpoint; give admin_endpoint too, or neither")
    check_endpoint("admin_endpoint", endpoint, to_listen=True)
    if keys is None:
        raise bad_value("admin_endpoint", endpoint, "give admin_keys too, a directory made by 'ringcore keys DIR'")
    if not isinstance(keys, str | os.PathLike) or not os.fspath(keys):
        raise bad_value("admin_keys", keys, "give a directory made by 'ringcore keys DIR'")
    read_server_keys(keys)


def check_kv_cache_dtype(kv_cache_dtype: str, spec: AnySpec, families: Families) -> None:
    """Whatever `model_impl` computes it, a model of a family loses what the family was measured to lose."""
    found = families.native([spec.architecture])
    if kv_cache_dtype == "auto" or found is None or found[1].fp8_kv_loss is None:
        return
    raise bad_value(
        "kv_cache_dtype",
        kv_cache_dtype,
        f"FP8 keys and values were measured to break a {spec.architecture}: {found[1].fp8_kv_loss}; give 'auto'",
    )


def _check_no_ray(options: Mapping[str, Any]) -> None:
    for name in ("ray_address", "ray_resources", "ray_runtime_env"):
        if options[name] is not None:
            raise bad_value(name, options[name], "it is for executor='ray'; give that too, or leave this out")


def check_together(
    model: ModelConfig, scheduler: SchedulerConfig, parallel: ParallelConfig, device: DeviceConfig
) -> None:
    """Checks the options against each other and the model."""
    spec, size = model.spec, parallel.tensor_parallel_size
    limit = spec.max_position_embeddings
    if model.context_len > limit:
        raise bad_value("max_model_len", model.max_model_len, f"the model has positions for {limit} tokens; lower it")
    if scheduler.preempt_lower_priority and scheduler.scheduling_policy != "priority":
        raise bad_value(
            "preempt_lower_priority",
            True,
            f"scheduling_policy={scheduler.scheduling_policy!r} has no priorities; "
            "give scheduling_policy='priority' too, or leave this out",
        )
    num_ranks = size * parallel.pipeline_parallel_size
    if parallel.hosts is not None and len(parallel.hosts) != num_ranks:
        raise bad_value("hosts", parallel.hosts, f"give {num_ranks} names, one for each rank")
    for name, workers in (("tensor_parallel_size", size), ("pipeline_parallel_size", parallel.pipeline_parallel_size)):
        if parallel.executor == "uniproc" and workers != 1:
            raise bad_value(name, workers, "the uniproc executor has one worker; use executor='multiproc'")
    if parallel.pipeline_parallel_size > spec.num_layers:
        remedy = f"the model has {spec.num_layers} layers, and each stage needs one; lower it"
        raise bad_value("pipeline_parallel_size", parallel.pipeline_parallel_size, remedy)
    if device.device_ids is not None:
        _check_device_ids(device, parallel)
    if parallel.expert_parallel:
        check_experts(spec, size, parallel.redundant_experts)
    if isinstance(spec, ModelSpec):  # of any other the worker that builds it says what else cannot be split
        check_split(spec, size, parallel.expert_parallel)
    elif not parallel.expert_parallel and (refused := refused_expert_shares(spec, size)) is not None:
        remedy = "give expert_parallel=True, by which each rank has whole experts, or another number"
        raise bad_value("tensor_parallel_size", size, f"{refused}; {remedy}")
    if model.draft_head is not None:
        check_head_split(model.draft_head, scheduler.speculative, size)


def _check_device_ids(device: DeviceConfig, parallel: ParallelConfig) -> None:
    ids, size = device.device_ids, parallel.layout.world_size
    is_fitting = isinstance(ids, list | tuple) and all(type(one) is int and one >= 0 for one in ids)
    if not is_fitting or ids is None or not len(set(ids)) == len(ids) == size:
        raise bad_value("device_ids", ids, f"give {size} different numbers from 0, one for each rank")
    if device.device == "cpu" or parallel.executor == "uniproc":
        raise bad_value("device_ids", ids, "only of use with device='cuda' and executor='multiproc'; leave it out")
