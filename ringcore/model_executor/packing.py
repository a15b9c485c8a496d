"""A matrix product with its weight laid out once for the CPU's kernels.

All products of one step of SmolLM2-135M in ms, for M tokens, measured in one sitting on two cores of a Xeon with AMX:

    |                                  | M=1  | M=8  | M=16 | M=64 |
    | float32, F.linear                | 20.3 | 47.1 | 48.3 | 84.1 |
    | float32, packed by MKL           | 20.5 | 29.0 | 33.7 | 62.2 |
    | bfloat16, F.linear               | 19.1 | 20.2 | 21.0 | 27.5 |
    | bfloat16, packed by oneDNN       | 13.4 | 13.5 | 14.2 | 18.9 |

One packing by MKL, made for 64 rows, is the fastest or within the noise for every M from 1 to 2048. oneDNN's packing
of float32 is slower than MKL's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ringcore.model_executor import ops

__all__ = ["Product", "pack_linear"]

Product = Callable[[torch.Tensor], torch.Tensor]  # x [n, in] -> [n, out]

_MKL_ROWS_HINT = 64


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """The product x W^T + b for weight [out, in] and bias [out], in the fastest form that works here.

    The packed form is a copy: a caller that drops `weight` afterwards frees it.
    """
    if weight.device.type == "cpu" and weight.numel():
        if weight.dtype == torch.float32 and _agrees(_pack_mkl, torch.float32):
            return _pack_mkl(weight, bias)
        if weight.dtype in (torch.bfloat16, torch.float16) and _agrees(_pack_onednn, weight.dtype):
            return _pack_onednn(weight, bias)
    return functools.partial(ops.linear, weight=weight, bias=bias)


def _pack_mkl(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _MKL_ROWS_HINT)
    multiply: Callable[..., torch.Tensor] = torch.ops.mkl._mkl_linear.default
    # The operator takes the plain weight too, to fall back on where x has another number of rows than it is told.
    # We always tell it the right one, so only the shape is looked at. NaN: a fallback could not go unseen.
    shape_only = torch.full((1,), float("nan")).expand(weight.shape)

    def product(x: torch.Tensor) -> torch.Tensor:
        return multiply(x, packed, shape_only, bias, x.shape[0])

    return product


def _pack_onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    multiply: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default

    def product(x: torch.Tensor) -> torch.Tensor:
        return multiply(x, packed, bias, "none", [], "")

    return product


@functools.cache
def _agrees(pack: Callable[[torch.Tensor, torch.Tensor | None], Product], dtype: torch.dtype) -> bool:
    """Whether this build has the packing for `dtype` and it computes what `F.linear` does. Tried once a process.

    These operators are torch's own but not public: a build without them, or one in which they changed, gets the
    plain product.
    """
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(24, 40, generator=generator), torch.randn(24, generator=generator)
    weight, bias = weight.to(dtype), bias.to(dtype)
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
