"""One attention layer of a model: what it needs cached, and the call into the backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringcore.attention.context import ForwardContext
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheSpec

__all__ = ["Attention"]


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of layer `index` on this rank's heads."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float

    @property
    def name(self) -> str:
        return f"layers.{self.index}.attention"

    def kv_cache_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        return FullAttentionSpec(
            block_size=block_size, num_kv_heads=self.num_kv_heads, head_size=self.head_size, dtype=dtype
        )

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """q: [num_tokens, num_heads, head_size], k and v: [num_tokens, num_kv_heads, head_size] -> as q."""
        return ctx.backend.forward(q, k, v, ctx.kv_caches[self.index], ctx.metadata, ctx.plan, self.scale)
