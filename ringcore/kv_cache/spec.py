"""KV cache specs of layers, and the planned cache: plain data that the control and device columns share.

Block = a logical run of `block_size` tokens. Page = one block's bytes in one layer. Slot = one token's place.
"""

from __future__ import annotations

import bisect

import msgspec

__all__ = [
    "DTYPE_BYTES",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheSpec",
    "SlidingWindowSpec",
]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class FullAttentionSpec(msgspec.Struct, frozen=True, tag="full", forbid_unknown_fields=True):
    """One layer's cache on one rank: keys and values of every token. `dtype` is a name of `DTYPE_BYTES`."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str

    @property
    def page_size_bytes(self) -> int:
        return _page_size_bytes(self)

    def blocks_needed(self, num_tokens: int, max_tokens_in_flight: int) -> int:
        """The most blocks that one request holds until it has `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


class SlidingWindowSpec(msgspec.Struct, frozen=True, tag="sliding_window", forbid_unknown_fields=True):
    """As `FullAttentionSpec`, for a window: a token attends to itself and the sliding_window - 1 before it."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    sliding_window: int

    @property
    def page_size_bytes(self) -> int:
        return _page_size_bytes(self)

    def blocks_needed(self, num_tokens: int, max_tokens_in_flight: int) -> int:
        """The most blocks that one request holds until it has `num_tokens` tokens.

        The confirmed tokens in the next token's window, and `max_tokens_in_flight` tokens after these: contiguous slots
        that may begin with the last slot of a block, after block_size - 1 slots before the window.
        """
        num_live = self.sliding_window - 1 + max_tokens_in_flight
        return -(-min(num_tokens, self.block_size - 1 + num_live) // self.block_size)

    def first_live_token(self, num_computed_tokens: int) -> int:
        """The first token in the window of a token at position `num_computed_tokens`."""
        return max(num_computed_tokens - self.sliding_window + 1, 0)


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec


def _page_size_bytes(spec: KVCacheSpec) -> int:
    return 2 * spec.block_size * spec.num_kv_heads * spec.head_size * DTYPE_BYTES[spec.dtype]


class KVCacheGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that share one block table: the same spec, the same blocks."""

    layer_names: list[str]
    spec: KVCacheSpec


class KVCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cache of one rank, planned at start-up. Block 0 is the null block: never allocated, never attended to.

    All groups have pages of one size and take their blocks from one pool: layer i of every group has its pages in
    tensor i, each group in its own blocks.
    """

    num_blocks: int
    groups: list[KVCacheGroup]
    max_model_len: int  # tokens: the most that one request may have
    max_tokens_in_flight: int  # the most scheduled, unconfirmed tokens of one request

    @property
    def num_tensors(self) -> int:
        return max(len(group.layer_names) for group in self.groups)

    @property
    def page_size_bytes(self) -> int:
        return self.groups[0].spec.page_size_bytes

    @property
    def block_bytes(self) -> int:
        """Memory of one block: a page in every tensor, even if a short group leaves the last ones unused."""
        return self.num_tensors * self.page_size_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def blocks_needed(self, num_tokens: int) -> int:
        """The most blocks, over all groups, that one request holds until it has `num_tokens` tokens.

        Start-up, the fitting of max_model_len, admission and the scheduler all decide by this function.
        """
        return sum(group.spec.blocks_needed(num_tokens, self.max_tokens_in_flight) for group in self.groups)

    def max_num_tokens(self, num_blocks: int) -> int:
        """The most tokens, up to max_model_len, of one request that holds at most `num_blocks` blocks."""
        return bisect.bisect_right(range(1, self.max_model_len + 1), num_blocks, key=self.blocks_needed)
