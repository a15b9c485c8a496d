"""Weight packing: dense weights prepacked for the CPU's GEMM kernels.

All linears of one step of SmolLM2-135M in ms, for M tokens, measured in one session on two cores of a Xeon with AMX:

    |                                  | M=1  | M=8  | M=16 | M=64 |
    | float32, F.linear                | 20.3 | 47.1 | 48.3 | 84.1 |
    | float32, packed by MKL           | 20.5 | 29.0 | 33.7 | 62.2 |
    | bfloat16, F.linear               | 19.1 | 20.2 | 21.0 | 27.5 |
    | bfloat16, packed by oneDNN       | 13.4 | 13.5 | 14.2 | 18.9 |

One packing by MKL, made for 64 rows, is the fastest or within the noise for every M from 1 to 2048. oneDNN's packing
of float32 is slower than MKL's.

The 12 ms of M=1 are of weights that a large cache holds. Where they come from memory, few rows are bandwidth-bound:

    |                                  | M=1  | M=4  | M=8  | M=12 | M=16 | M=64 |
    | float32, packed by MKL           | 21.4 | 27.1 | 33.1 | 35.9 | 38.2 | 68.1 |
    | the same numbers held in 16 bits | 14.7 | 18.8 | 25.7 | 27.9 | 37.8 | 84.9 |

So float32 weights that are float16 numbers times a power of two, as those of every published bfloat16 checkpoint are
unless they span more than 30 powers of two, are also held in 16 bits, by FBGEMM, for few rows: the same
weights, float32 inputs and sums, half the bytes to read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from ringcore.model_executor import ops

__all__ = ["Multiply", "pack", "plain"]

Multiply = Callable[[torch.Tensor], torch.Tensor]  # x [n, in] -> [n, out]

_MKL_ROWS_HINT = 64
_CHUNK = 1 << 16  # numbers checked per iteration: fit in the cache, and reuse allocated memory
_FEW_ROWS = 12  # up to this many, the weights held in 16 bits are faster


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    """x W^T + b for weight [out, in] and bias [out], in the fastest form available on its device.

    The packed form is a copy: a caller that drops `weight` afterwards frees it.
    """
    if weight.device.type == "cpu" and weight.numel():
        if weight.dtype == torch.float32 and _agrees(_pack_mkl, torch.float32):
            return _pack_float32(weight, bias)
        if weight.dtype in (torch.bfloat16, torch.float16) and _agrees(_pack_onednn, weight.dtype):
            return _pack_onednn(weight, bias)
    return plain(weight, bias)


def plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    """As `pack`, always of the current contents of `weight` and `bias`."""
    return functools.partial(ops.linear, weight=weight, bias=bias)


def _pack_float32(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    many = _pack_mkl(weight, bias)
    scale = _half_scale(weight) if _agrees(_pack_half, torch.float32) else None
    if scale is None:
        return many
    few = _pack_half(weight, bias, scale)

    def product(x: torch.Tensor) -> torch.Tensor:
        return few(x) if 0 < x.shape[0] <= _FEW_ROWS else many(x)

    return product


def _half_scale(weight: torch.Tensor) -> float | None:
    """The power of two that makes every weight exactly a float16 number; None if there is none."""
    largest = max(abs(float(bound)) for bound in weight.aminmax())
    if not 0 < largest < math.inf:
        return None
    flat = weight.reshape(-1)
    for scale in (1.0, 2.0 ** (14 - math.frexp(largest)[1])):
        if all(_is_half(chunk * scale) for chunk in torch.split(flat, _CHUNK)):
            return scale
    return None


def _is_half(values: torch.Tensor) -> bool:
    return torch.equal(values.half().float(), values)


def _pack_half(weight: torch.Tensor, bias: torch.Tensor | None, scale: float = 1.0) -> Multiply:
    if scale != 1:
        weight, bias = weight * scale, None if bias is None else bias * scale
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    multiply: Callable[..., torch.Tensor] = torch.ops.quantized.linear_dynamic_fp16.default
    if scale == 1:
        return lambda x: multiply(x, packed)
    return lambda x: multiply(x, packed).div_(scale)  # a power of two: nothing is rounded


def _pack_mkl(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _MKL_ROWS_HINT)
    multiply: Callable[..., torch.Tensor] = torch.ops.mkl._mkl_linear.default
    # The operator takes the plain weight too, as a fallback where x has another number of rows than its argument says.
    # The argument below is always right, so only the shape is read. NaN: a fallback could not go unnoticed.
    shape_only = torch.full((1,), float("nan")).expand(weight.shape)

    def product(x: torch.Tensor) -> torch.Tensor:
        return multiply(x, packed, shape_only, bias, x.shape[0])

    return product


def _pack_onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    multiply: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default

    def product(x: torch.Tensor) -> torch.Tensor:
        return multiply(x, packed, bias, "none", [], "")

    return product


@functools.cache
def _agrees(pack: Callable[[torch.Tensor, torch.Tensor | None], Multiply], dtype: torch.dtype) -> bool:
    """Whether this build has the packing for `dtype` and it computes what `F.linear` does. Tried once per process.

    These operators are torch's own but not public: a build without them, or one in which they changed, gets the plain
    linear.
    """
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(24, 40, generator=generator), torch.randn(24, generator=generator)
    weight, bias = weight.bfloat16().to(dtype), bias.to(dtype)  # numbers that any of the packings can hold
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    try:
        for rows in (1, 5, _MKL_ROWS_HINT + 1):
            x = torch.randn(rows, 40, generator=generator).to(dtype)
            for b in (bias, None):
                if not torch.allclose(pack(weight, b)(x), ops.linear(x, weight, b), atol=tolerance, rtol=tolerance):
                    return False
    except (AttributeError, RuntimeError):  # no such operator, or not for this dtype on this CPU
        return False
    return True
