"""Allocates the pages that the planner decided on, layer by layer, as the attention backend wants them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.layer import Attention
from ringcore.errors import CapacityError
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.worker.platform import Platform

__all__ = ["allocate_kv_caches"]


def allocate_kv_caches(
    config: KVCacheConfig, layers: Sequence[Attention], backend: AttentionBackend, platform: Platform
) -> tuple[torch.Tensor, ...]:
    """One zero-filled tensor a layer, in the order of `layers`: what `ForwardContext.kv_caches` takes.

    Raises `CapacityError` where the device does not have the memory, before anything is allocated.
    """
    specs = {name: group.spec for group in config.groups for name in group.layer_names}
    assert sorted(specs) == sorted(layer.name for layer in layers), "the plan has other layers than the model"
    assert all(spec == backend.spec for spec in specs.values()), "the plan has another spec than the backend serves"
    free = platform.free_memory_bytes()
    if config.total_bytes > free:
        raise CapacityError(
            f"KV cache: {config.num_blocks} blocks need {config.total_bytes / 2**30:.2f} GiB, "
            f"{free / 2**30:.2f} GiB are free; lower num_blocks_override or kv_cache_bytes",
            needed_bytes=config.total_bytes,
            available_bytes=free,
        )
    shape = backend.kv_cache_shape(config.num_blocks)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[backend.spec.dtype]
    return tuple(platform.allocate_pages(shape, dtype) for _ in layers)
