"""Allocates the pages that the planner decided on, layer by layer, as the attention backends want them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.layer import Attention
from ringcore.errors import CapacityError
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.worker.platform import Platform

__all__ = ["allocate_kv_caches", "group_of_layer"]


def group_of_layer(config: KVCacheConfig, layers: Sequence[Attention]) -> tuple[int, ...]:
    """The index of each layer's group, in the order of `layers`."""
    groups = {name: index for index, group in enumerate(config.groups) for name in group.layer_names}
    assert sorted(groups) == sorted(layer.name for layer in layers), "the plan has other layers than the model"
    return tuple(groups[layer.name] for layer in layers)


def allocate_kv_caches(
    config: KVCacheConfig,
    layers: Sequence[Attention],
    backends: Sequence[AttentionBackend],  # by group
    platform: Platform,
) -> tuple[torch.Tensor, ...]:
    """One zero-filled tensor a layer, in the order of `layers`: what `ForwardContext.kv_caches` takes.

    The i-th layers of all groups have the same memory, each in the shape that its group's backend wants.
    Raises `CapacityError` where the device does not have the memory, before anything is allocated.
    """
    assert [group.spec for group in config.groups] == [backend.spec for backend in backends]
    free = platform.free_memory_bytes()
    if config.total_bytes > free:
        raise CapacityError(
            f"KV cache: {config.num_blocks} blocks need {config.total_bytes / 2**30:.2f} GiB, "
            f"{free / 2**30:.2f} GiB are free; lower num_blocks_override or kv_cache_bytes",
            needed_bytes=config.total_bytes,
            available_bytes=free,
        )
    shapes = [backend.kv_cache_shape(config.num_blocks) for backend in backends]
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[backends[0].spec.dtype]
    tensors = [platform.allocate_pages(shapes[0], dtype) for _ in range(config.num_tensors)]
    by_name = {
        name: tensor.view(shape)
        for group, shape in zip(config.groups, shapes, strict=True)
        for name, tensor in zip(group.layer_names, tensors, strict=False)  # the shorter groups leave the last ones
    }
    return tuple(by_name[layer.name] for layer in layers)
