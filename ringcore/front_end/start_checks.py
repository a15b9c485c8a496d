"""Checks that a front end makes before an engine process starts: the checkpoint's tensors, enough memory.

Without the device only a CPU's memory can be checked. It must be checked in advance because the kernel overcommits:
allocation succeeds, and the OOM killer ends some process of the host when the memory is written.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Callable

from ringcore.checkpoint import ModelSpec, TensorIndex, TransformersSpec
from ringcore.checkpoint.expected_tensors import (
    check_checkpoint,
    expected_tensors,
    num_parameters,
    quantized_bytes,
    stored_bytes,
)
from ringcore.checkpoint.quantization.contents import check_contents
from ringcore.config import EngineConfig
from ringcore.config.options import EXECUTORS
from ringcore.config.rank_layout import LOCALHOST
from ringcore.errors import CapacityError
from ringcore.families import FAMILIES
from ringcore.front_end.folder_check import folder_check
from ringcore.host.byte_sizes import format_bytes
from ringcore.host.cache_folder import our_cache_folder
from ringcore.host.resources import Host
from ringcore.kv_cache.capacity import budget_text
from ringcore.kv_cache.layer_specs import layer_specs
from ringcore.kv_cache.planner import plan_without_limit
from ringcore.kv_cache.spec import DTYPE_BYTES

__all__ = ["check_host_memory", "check_start"]

_log = logging.getLogger(__name__)

# Per head-dimension pair and position, while the RoPE table is computed: angle, cosine, sine, and both concatenated.
_ANGLE_BYTES = 20


def check_start(config: EngineConfig) -> None:
    """Raises `ModelLoadError` if files of the model are missing or inconsistent, `CapacityError` if the host lacks the
    memory. For a user-defined executor it checks nothing."""
    if config.parallel.executor not in EXECUTORS:
        return
    with folder_check(config.model, our_cache_folder("folders")):
        spec = config.model.spec
        if isinstance(spec, ModelSpec):
            check_checkpoint(config.model.files, spec, FAMILIES)
        elif spec.quantization is not None and config.model.files.kind == "safetensors":
            check_contents(TensorIndex(config.model.files.weight_files), spec.quantization)
        if isinstance(spec, TransformersSpec) and spec.is_part:
            _log.warning("%s: its text model is served alone: it sees no images", spec.architecture)
        host = Host()
        if config.device.device == "cpu" or (config.device.device == "auto" and not host.has_gpu()):
            check_host_memory(config.on_device("cpu"), host)


def check_host_memory(config: EngineConfig, host: Host) -> None:
    """Compares the weights, RoPE tables and smallest KV cache of all ranks with the free memory. Raises
    `CapacityError`. This is a lower bound: activations are not included."""
    dtype = host.resolve_dtype(config.model.dtype, config.model.spec.dtype)
    is_fitted, context_len = config.model.max_model_len == "auto", config.model.context_len
    weights, free = _weights_bytes(config, dtype), host.free_memory_bytes()
    least = min(2, context_len) if is_fitted else context_len
    cache_bytes, angles_bytes = _context_bytes(config, dtype)
    cache, angles = cache_bytes(least), angles_bytes(context_len)
    needed = weights + angles + cache
    if needed <= free:
        return
    fits = bisect.bisect_right(
        range(1, context_len + 1), free - weights, key=lambda tokens: cache_bytes(tokens) + angles_bytes(tokens)
    )
    shorter = f"lower max_model_len to {fits}, " if fits >= 2 else ""
    table = {
        "total_bytes": host.total_memory_bytes(),
        "weights_bytes": weights,
        "rotary_embedding_bytes": angles,
        "kv_cache_bytes": cache,
    }
    raise CapacityError(
        f"host memory: the model in {dtype}, with one request of {least} tokens, needs "
        f"{format_bytes(needed, exact=True)}, {format_bytes(free, exact=True)} available, "
        f"{format_bytes(needed - free, exact=True)} missing; {shorter}give a smaller model or another dtype, or end "
        f"other processes of this host ({budget_text(table)})",
        needed_bytes=needed,
        available_bytes=free,
        missing_bytes=needed - free,
        max_model_len=fits if fits >= 2 else 0,
        budget=table,
    )


def _weights_bytes(config: EngineConfig, dtype: str) -> int:
    """In the CPU kernels' layouts: see `model_executor.linear_schemes.cpu_packing`."""
    spec = config.model.spec
    if not isinstance(spec, ModelSpec):
        return _share_of_host(config, _checkpoint_bytes(config, dtype))
    quantized = quantized_bytes(spec)
    expected = expected_tensors(spec, FAMILIES[spec.architecture])
    shapes = [shape for name, shape in expected.items() if name not in quantized]
    num_bytes = sum(map(math.prod, shapes)) * DTYPE_BYTES[dtype] + sum(quantized.values())
    if config.device.enable_sleep_mode:
        return _share_of_host(config, num_bytes)
    if (
        spec.tie_word_embeddings and "model.embed_tokens.weight" not in quantized
    ):  # an embedding table, and a packed copy for the LM head
        num_bytes += spec.vocab_size * spec.hidden_size * DTYPE_BYTES[dtype]
    if dtype == "float32" and spec.dtype != "float32" and config.model.files.kind != "dummy":
        num_bytes += sum(2 * math.prod(shape) for shape in shapes if len(shape) == 2)
    return _share_of_host(config, num_bytes)


def _checkpoint_bytes(config: EngineConfig, dtype: str) -> int:
    """Of a model whose tensors are not known yet: those of its files, quantized ones as they are."""
    files, quantization = config.model.files, config.model.spec.quantization
    if quantization is None or quantization.is_on_load or files.kind == "dummy":
        return num_parameters(files) * DTYPE_BYTES[dtype] // (1 if quantization is None else 2)
    return stored_bytes(files, DTYPE_BYTES[dtype])


def _share_of_host(config: EngineConfig, num_bytes: int) -> int:
    """Of what all ranks share equally, the part of this host's ranks."""
    layout = config.parallel.layout
    return num_bytes * layout.num_ranks_on(LOCALHOST) // layout.world_size


def _context_bytes(config: EngineConfig, dtype: str) -> tuple[Callable[[int], int], Callable[[int], int]]:
    """(the KV cache, the RoPE tables) of this host's ranks in bytes, by the tokens of one request."""
    spec = config.model.spec
    if not isinstance(spec, ModelSpec):  # its layers are not known yet: the worker's memory table checks them
        return (lambda _: 0), (lambda _: 0)
    layout = config.parallel.layout
    ranks, local = layout.ranks_per_stage, layout.num_ranks_on(LOCALHOST)
    num_tables = 1 if spec.sliding_rope is None else 2
    plan = plan_without_limit(
        layer_specs(spec, ranks, config.cache.block_size, dtype, config.cache.is_fp8),
        max_model_len=config.model.context_len,
        max_tokens_in_flight=config.scheduler.max_tokens_in_flight,
    )
    return (
        lambda tokens: local * (plan.blocks_needed(tokens) + 1) * plan.block_bytes // layout.num_stages,
        lambda tokens: local * num_tables * tokens * spec.head_dim // 2 * _ANGLE_BYTES,
    )
