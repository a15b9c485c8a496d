"""What a layer stores per block, and what the planner decided: the plain data on which both columns meet.

Block = a logical run of `block_size` tokens. Page = one block's bytes in one layer. Slot = one token's place.
"""

from __future__ import annotations

import msgspec

__all__ = ["DTYPE_BYTES", "FullAttentionSpec", "KVCacheConfig", "KVCacheGroup", "KVCacheSpec"]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class FullAttentionSpec(msgspec.Struct, frozen=True, tag="full", forbid_unknown_fields=True):
    """One layer's cache on one rank: keys and values of every token. `dtype` is a name of `DTYPE_BYTES`."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str

    @property
    def page_size_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one request. The one place where this is computed."""
        return -(-num_tokens // self.block_size)


# A second kind of cache joins this as a tagged union.
KVCacheSpec = FullAttentionSpec


class KVCacheGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that share one block table: the same spec, the same blocks."""

    layer_names: list[str]
    spec: KVCacheSpec


class KVCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cache of one rank, learned at start. Block 0 is the null block: never allocated, never read for a result."""

    num_blocks: int
    groups: list[KVCacheGroup]

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * sum(len(g.layer_names) * g.spec.page_size_bytes for g in self.groups)
