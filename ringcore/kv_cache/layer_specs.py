"""KV cache specs of a model's layers, from its configuration alone."""

from __future__ import annotations

from ringcore.checkpoint import ModelSpec
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

__all__ = ["layer_specs"]


def layer_specs(
    spec: ModelSpec, num_ranks: int, block_size: int, dtype: str, is_fp8: bool = False
) -> dict[str, KVCacheSpec]:
    """The spec of each attention layer on one rank, by layer name."""
    num_kv_heads = max(1, spec.num_kv_heads // num_ranks)
    full = FullAttentionSpec(block_size, num_kv_heads, spec.head_dim, dtype, is_fp8=is_fp8)

    def of_layer(index: int) -> KVCacheSpec:
        window = spec.sliding_windows.get(index)
        if window is None:
            return full
        shape = full.block_size, full.num_kv_heads, full.head_size, full.dtype
        return SlidingWindowSpec(*shape, window, is_fp8=is_fp8)

    return {f"layers.{index}": of_layer(index) for index in range(spec.num_layers)}
