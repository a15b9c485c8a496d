"""What several sums over the inputs of a product are combined by: one reduction has one round of barriers for all."""

from __future__ import annotations

import triton

__all__ = ["add2", "add3"]


@triton.jit
def add2(a0, a1, b0, b1):
    """Of `tl.reduce` of two tensors."""
    return a0 + b0, a1 + b1


@triton.jit
def add3(a0, a1, a2, b0, b1, b2):
    """Of `tl.reduce` of three tensors."""
    return a0 + b0, a1 + b1, a2 + b2
