"""Loads of the tiles of a product.

The weights of a step are many times the L2 cache, and each is read once: as lines that are evicted first they leave the
cache to what the next kernels read, which is code, block tables, keys and values of few tokens, and activations. A
decode step of Qwen3-4B at batch 1 takes 2.19 ms with that on an H200, and 2.22 without, of Qwen3-0.6B 0.518 and 0.530.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["NORMAL_EVICTION", "WEIGHT_EVICTION", "load_tile", "load_weights"]

NORMAL_EVICTION = tl.constexpr("")
WEIGHT_EVICTION = tl.constexpr("evict_first")  # of weights that one program reads


@triton.jit
def load_tile(pointers, in_bounds, is_whole: tl.constexpr):
    """A load with a mask, or without one where the tile is whole; 0 where it is out of bounds."""
    if is_whole:
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask=in_bounds, other=0.0)
    return found


@triton.jit
def load_weights(pointers, in_bounds, is_whole: tl.constexpr):
    """`load_tile` of weights that no other program reads."""
    if is_whole:
        found = tl.load(pointers, eviction_policy=WEIGHT_EVICTION)
    else:
        found = tl.load(pointers, mask=in_bounds, other=0.0, eviction_policy=WEIGHT_EVICTION)
    return found
