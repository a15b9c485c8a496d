"""Arithmetic on packed numbers that attention and linears share: what the target has of it, and powers of 2."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import cuda_capability_geq

__all__ = ["has_packed_math", "power_of_2"]


@triton.constexpr_function
def has_packed_math():
    """Whether the target has arithmetic on pairs of bfloat16, and conversions of FP8."""
    return not knobs.runtime.interpret and cuda_capability_geq(9, 0)


@triton.jit
def power_of_2(exponents):
    """Biased by 127, int32 -> float32; 0 for 0."""
    return (exponents << 23).to(tl.float32, bitcast=True)
