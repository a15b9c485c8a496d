"""Loads of the tiles of a product."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_tile"]


@triton.jit
def load_tile(pointers, in_bounds, is_whole: tl.constexpr):
    """A load with a mask, or without one where the tile is whole; 0 where it is out of bounds."""
    if is_whole:
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask=in_bounds, other=0.0)
    return found
