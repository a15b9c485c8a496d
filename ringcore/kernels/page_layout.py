"""Where keys and values lie in the pages of one layer's cache.

A page is contiguous, so layers of other shapes may share the memory. In it, head by head and token by token:

    values as wide as keys    [num_blocks, 2, num_kv_heads, block_size, head_size]            all keys, then all values
    of another width          [num_blocks, num_kv_heads, block_size, head_size + v_head_size]  each key with its value

The first makes the keys of a head one contiguous matrix. In the second a token's key and value are neighbours, so one
stride serves both and no page has padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["PageLayout", "padded_head_size"]


class PageLayout(NamedTuple):
    """Sizes and distances are in elements."""

    num_kv_heads: int
    block_size: int
    head_size: int  # of keys
    v_head_size: int  # of values
    token_stride: int  # from a token of a head to the next
    value_offset: int  # from a key to its value

    @classmethod
    def of(cls, kv_cache: torch.Tensor, head_size: int) -> PageLayout:
        """The layout of a cache for keys of `head_size`. Asserts its shape."""
        assert kv_cache.is_contiguous()
        if kv_cache.dim() == 4:
            _, num_kv_heads, block_size, both = kv_cache.shape
            assert both > head_size, (kv_cache.shape, head_size)
            return cls(num_kv_heads, block_size, head_size, both - head_size, both, head_size)
        _, kinds, num_kv_heads, block_size, size = kv_cache.shape
        assert (kinds, size) == (2, head_size), (kv_cache.shape, head_size)
        return cls(num_kv_heads, block_size, size, size, size, num_kv_heads * block_size * size)

    @staticmethod
    def shape(num_blocks: int, num_kv_heads: int, block_size: int, head_size: int, v_head_size: int) -> tuple[int, ...]:
        """Of a cache."""
        if head_size == v_head_size:
            return (num_blocks, 2, num_kv_heads, block_size, head_size)
        return (num_blocks, num_kv_heads, block_size, head_size + v_head_size)

    def split(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the keys and of the values: [num_blocks, num_kv_heads, block_size, head_size or v_head_size]."""
        if kv_cache.dim() == 5:
            return kv_cache[:, 0], kv_cache[:, 1]
        return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]


def padded_head_size(head_size: int) -> int:
    """The width of its tile: a power of two that tl.dot takes."""
    return max(16, 1 << (head_size - 1).bit_length())
