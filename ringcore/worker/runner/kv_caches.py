"""Chooses the attention backend of each KV cache group, and allocates the KV cache tensors in the backends' layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ringcore.attention.backend import PagedBackend
from ringcore.attention.backends import BACKENDS, choose_backend
from ringcore.attention.layer import AnyAttention
from ringcore.attention.spec import AttentionSpec
from ringcore.errors import CapacityError
from ringcore.host.byte_sizes import format_bytes
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.worker.memory.arena import ALIGNMENT
from ringcore.worker.platforms.platform import Platform

__all__ = ["allocate_kv_caches", "choose_backends", "group_of_layer"]


def group_of_layer(config: KVCacheConfig, layers: Sequence[AnyAttention]) -> dict[int, int]:
    """The index of each layer's group, by the index of the layer."""
    groups = {name: index for index, group in enumerate(config.groups) for name in group.layer_names}
    assert sorted(groups) == sorted(layer.name for layer in layers), "the plan has other layers than the model"
    return {layer.index: groups[layer.name] for layer in layers}


def choose_backends(
    name: str,
    config: KVCacheConfig,
    layers: Sequence[AnyAttention],
    platform: Platform,
    is_batch_invariant: bool = False,
) -> list[PagedBackend]:
    """The backend of each group, for the plan's specs, which may differ from those that the layers reported. name: the
    engine option attention_backend; is_batch_invariant: deterministic. Raises `ConfigError` where no backend can serve
    a group."""
    order = [other.name for other in BACKENDS.values() if other.is_batch_invariant]
    order = order if is_batch_invariant else [*platform.attention_backends]
    specs, of_layer = [group.spec for group in config.groups], group_of_layer(config, layers)
    backends = []
    for index, spec in enumerate(specs):
        own = [layer.spec for layer in layers if of_layer[layer.index] == index]
        # A stage may have no layer of a group: its backend plans steps, as those of all groups do, that nothing reads.
        own = own or [AttentionSpec(spec.num_kv_heads, scale=1.0)]
        sharing_specs = specs[:index] + specs[index + 1 :]
        backends.append(choose_backend(name, spec, own, platform.device, order, sharing_specs))
    return backends


def allocate_kv_caches(
    config: KVCacheConfig,
    layers: Sequence[AnyAttention],
    backends: Sequence[PagedBackend],  # by group
    platform: Platform,
) -> dict[int, torch.Tensor]:
    """One zero-filled tensor per layer: `ForwardContext.kv_caches`.

    The i-th layers of all groups share memory, each viewed in the shape of its group's backend.
    Raises `CapacityError` where the device lacks the memory, before anything is allocated.
    """
    assert [group.spec for group in config.groups] == [backend.spec for backend in backends]
    free = platform.free_memory_bytes()
    if config.total_bytes > free:
        raise CapacityError(
            f"KV cache: {config.num_blocks} blocks need {format_bytes(config.total_bytes, exact=True)}, "
            f"{format_bytes(free, exact=True)} available, {format_bytes(config.total_bytes - free, exact=True)} "
            f"missing; lower num_blocks_override to {free // config.block_bytes}, or kv_cache_bytes to {free}",
            needed_bytes=config.total_bytes,
            available_bytes=free,
            missing_bytes=config.total_bytes - free,
        )
    shapes = [backend.kv_cache_shape(config.num_blocks) for backend in backends]
    tensors = _tensors(shapes[0], backends[0].storage_dtype, config.num_tensors, platform)
    by_name = {
        name: tensor.view(shape)
        for group, shape in zip(config.groups, shapes, strict=True)
        for name, tensor in zip(group.layer_names, tensors, strict=False)  # shorter groups do not use the last tensors
    }
    return {layer.index: by_name[layer.name] for layer in layers}


def _tensors(shape: tuple[int, ...], dtype: torch.dtype, count: int, platform: Platform) -> list[torch.Tensor]:
    """`count` tensors in one allocation."""
    num_bytes = math.prod(shape) * dtype.itemsize
    stride = -(-num_bytes // ALIGNMENT) * ALIGNMENT
    memory = platform.allocate(stride * count, "kv_cache")
    return [memory[at : at + num_bytes].view(dtype).view(shape) for at in range(0, stride * count, stride)]
