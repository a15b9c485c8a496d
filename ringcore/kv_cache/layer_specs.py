"""KV cache specs of a model's layers, from its configuration alone."""

from __future__ import annotations

from ringcore.checkpoint import ModelSpec
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

__all__ = ["layer_specs"]


def layer_specs(spec: ModelSpec, num_ranks: int, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
    """The spec of each attention layer on one rank, by layer name."""
    full = FullAttentionSpec(block_size, max(1, spec.num_kv_heads // num_ranks), spec.head_dim, dtype)

    def of_layer(index: int) -> KVCacheSpec:
        window = spec.sliding_windows.get(index)
        if window is None:
            return full
        return SlidingWindowSpec(full.block_size, full.num_kv_heads, full.head_size, full.dtype, window)

    return {f"layers.{index}": of_layer(index) for index in range(spec.num_layers)}
