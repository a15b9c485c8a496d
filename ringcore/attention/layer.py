"""One attention layer of a model: its KV cache spec and the call into the backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ringcore.attention.context import ForwardContext
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

__all__ = ["Attention", "KVWriteTarget"]


class KVWriteTarget(NamedTuple):
    """Where the keys and values of a step's tokens are written: one layer's cache and the slot mapping."""

    kv_cache: torch.Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_size]
    slot_mapping: torch.Tensor  # [num_tokens] int64: block_id * block_size + offset in the block


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of layer `index` on this rank's heads.

    With a `sliding_window` a token sees the last sliding_window tokens, itself included.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None

    @property
    def name(self) -> str:
        return f"layers.{self.index}.attention"

    def kv_cache_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        """What the layer caches, in blocks of `block_size` tokens.

        The KV cache plan may store it otherwise: in longer blocks, or as full attention if the window masks no token.
        """
        if self.sliding_window is None:
            return FullAttentionSpec(
                block_size=block_size, num_kv_heads=self.num_kv_heads, head_size=self.head_size, dtype=dtype
            )
        return SlidingWindowSpec(
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=dtype,
            sliding_window=self.sliding_window,
        )

    def kv_write_target(self, ctx: ForwardContext) -> KVWriteTarget | None:
        """Where to write keys and values before `__call__`, which then gets none; None: the backend writes them
        itself."""
        group = ctx.groups[ctx.group_of_layer[self.index]]
        if not group.backend.accepts_prewritten_kv:
            return None
        return KVWriteTarget(ctx.kv_caches[self.index], group.metadata.slot_mapping)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, ctx: ForwardContext
    ) -> torch.Tensor:
        """q: [num_tokens, num_heads, head_size], k and v: [num_tokens, num_kv_heads, head_size] -> as q.

        k and v are None if they were written to `kv_write_target`.
        """
        group = ctx.groups[ctx.group_of_layer[self.index]]
        return group.backend.forward(q, k, v, ctx.kv_caches[self.index], group.metadata, group.plan, self.scale)
