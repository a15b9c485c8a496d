"""Decides how many blocks every rank has. Pure arithmetic on what the ranks reported."""

from __future__ import annotations

from collections.abc import Sequence

from ringcore.errors import CapacityError, ConfigError
from ringcore.kv_cache.spec import KVCacheConfig, KVCacheGroup, KVCacheSpec

__all__ = ["plan_kv_cache"]


def plan_kv_cache(
    specs: list[dict[str, KVCacheSpec]],
    available_bytes: list[int],
    *,
    max_model_len: int,
    num_blocks_override: int | None,
) -> list[KVCacheConfig]:
    """The cache of every rank, by rank, all with equal `num_blocks`: the least that any rank has room for.

    specs: what each rank's attention layers store, by layer name.
    available_bytes: what each rank can give to the cache.
    max_model_len: tokens; one request of so many must fit beside the null block.
    num_blocks_override: this many blocks whatever the bytes, the null block counted.

    Raises `ConfigError` where ranks or layers disagree on what a block is, `CapacityError` (details `needed_bytes`,
    `available_bytes`, and `max_model_len`, the largest that fits) where one request of max_model_len does not fit.
    """
    assert len(specs) == len(available_bytes) > 0, "one spec table and one number of bytes a rank"
    spec = _common_spec(specs)
    layer_names = list(specs[0])
    block_bytes = len(layer_names) * spec.page_size_bytes
    num_blocks = num_blocks_override
    if num_blocks is None:
        num_blocks = max(min(available_bytes), 0) // block_bytes
    if spec.blocks_needed(max_model_len) > num_blocks - 1:
        raise _too_small(spec, block_bytes, num_blocks, min(available_bytes), max_model_len, num_blocks_override)
    group = KVCacheGroup(layer_names=layer_names, spec=spec)
    return [KVCacheConfig(num_blocks=num_blocks, groups=[group]) for _ in specs]


def _common_spec(specs: Sequence[dict[str, KVCacheSpec]]) -> KVCacheSpec:
    """The one spec of all layers on all ranks: they share one block table, so a block must be the same for each."""
    first = specs[0]
    if not first:
        raise ConfigError("model: it has no attention layer, so no KV cache can be planned", option="model", value=None)
    for rank, table in enumerate(specs):
        if table.keys() != first.keys():
            odd = sorted(table.keys() ^ first.keys())
            raise ConfigError(
                f"KV cache: rank 0 has {len(first)} attention layers and rank {rank} has {len(table)}; they differ in "
                f"{', '.join(odd[:4])}; every rank must hold a part of every layer",
                option="tensor_parallel_size",
                value=len(specs),
            )
        for name, spec in table.items():
            if spec != first[name]:
                raise ConfigError(
                    f"KV cache: layer {name} is {_describe(first[name])} on rank 0 and {_describe(spec)} on rank {rank}"
                    "; give a tensor_parallel_size that splits its KV heads evenly",
                    option="tensor_parallel_size",
                    value=len(specs),
                )
    (name0, spec0), *others = first.items()
    for name, spec in others:
        if spec != spec0:
            raise ConfigError(
                f"KV cache: layer {name0} is {_describe(spec0)} and layer {name} is {_describe(spec)}; "
                "use a model whose attention layers all store the same",
                option="model",
                value=name,
            )
    return spec0


def _describe(spec: KVCacheSpec) -> str:
    return (
        f"(block_size {spec.block_size}, {spec.num_kv_heads} KV heads, head_size {spec.head_size}, dtype {spec.dtype})"
    )


def _too_small(
    spec: KVCacheSpec,
    block_bytes: int,
    num_blocks: int,
    available_bytes: int,
    max_model_len: int,
    num_blocks_override: int | None,
) -> CapacityError:
    """The numbers of a cache that does not hold one request; the null block's bytes are among the needed ones."""
    needed = (spec.blocks_needed(max_model_len) + 1) * block_bytes
    if num_blocks_override is None:
        remedy = "raise gpu_memory_utilization/kv_cache_bytes"
    else:
        available_bytes, remedy = num_blocks * block_bytes, f"raise num_blocks_override={num_blocks_override}"
    fits = max(num_blocks - 1, 0) * spec.block_size
    lower = f"lower max_model_len to {fits} or " if fits else ""
    return CapacityError(
        f"KV cache: one request of {max_model_len} tokens needs {_size(needed)}, "
        f"{_size(max(available_bytes, 0))} free; {lower}{remedy}",
        needed_bytes=needed,
        available_bytes=available_bytes,
        max_model_len=fits,
    )


def _size(num_bytes: int) -> str:
    """GiB to two digits; a cache too small for these, as in a test, in MiB or bytes."""
    if num_bytes >= 2**30 // 10 or num_bytes == 0:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB" if num_bytes >= 2**20 // 10 else f"{num_bytes} bytes"
