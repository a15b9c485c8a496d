"""Weight packing: dense weights prepacked for the CPU's GEMM kernels.

Which library is the fastest differs between processors. GFLOP/s of one float32 product of 3,072 x 576 by M rows, the
weights from memory, one thread of an AMD EPYC (Zen 4), the best of 25 to 60 products in turns on a busy host:

    |                              | M=1 | M=4 | M=16 | M=64 | M=256 |
    | F.linear                     | 5   | 14  | 37   | 65   | 79    |
    | packed by MKL                | 6   | 14  | 39   | 70   | 80    |
    | packed by oneDNN             | 5   | 21  | 58   | 89   | 104   |
    | the same numbers in 16 bits  | 9   | 30  | 67   | 92   | 100   |
    | bfloat16, packed by oneDNN   | 8   | 33  | 91   | 163  | 197   |

and all linears of one step of SmolLM2-135M in ms, on two cores of a Xeon with AMX:

    |                              | M=1  | M=4  | M=8  | M=16 | M=64 |
    | packed by MKL                | 21.4 | 27.1 | 33.1 | 38.2 | 68.1 |
    | the same numbers in 16 bits  | 14.7 | 18.8 | 25.7 | 37.8 | 84.9 |
    | bfloat16, packed by oneDNN   | 13.4 |      | 13.5 | 14.2 | 18.9 |

There oneDNN's packing of float32 is slower than MKL's. So the packings of float32 are measured (`packing_choice.py`),
each made for 64 rows: the fastest for all numbers of rows is the only copy, unless two are faster by enough.

The same numbers in 16 bits: float32 weights that are float16 numbers times a power of two, as those of every published
bfloat16 checkpoint are unless they span more than 30 powers of two, may be held in 16 bits, by FBGEMM: the same
weights, float32 inputs and sums, half the bytes to read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import torch

from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.packing_choice import Choice, choose, measured_seconds

__all__ = ["Multiply", "is_bfloat16_faster", "pack", "pack_alike", "plain"]

Multiply = Callable[[torch.Tensor], torch.Tensor]  # x [n, in] -> [n, out]
Pack = Callable[[torch.Tensor, torch.Tensor | None], Multiply]

_ROWS_HINT = 64  # what a packing of float32 is made for
_CHUNK = 1 << 16  # numbers checked per iteration: fit in the cache, and reuse allocated memory
_TYPICAL = 1024  # inputs and outputs of the product by which dtypes are compared
_HALF, _MKL, _ONEDNN = "half", "mkl", "onednn"
_UNMEASURED = Choice(_HALF, _MKL, max_few_rows=12)  # of small matrices, and where no measurement can be kept


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    """x W^T + b for weight [out, in] and bias [out], in the fastest form available on its device.

    The packed form is a copy: a caller that drops `weight` afterwards frees it.
    """
    if weight.device.type == "cpu" and weight.numel():
        if weight.dtype == torch.float32:
            return _pack_float32(weight, bias)
        if weight.dtype in (torch.bfloat16, torch.float16) and _agrees(_pack_onednn, weight.dtype):
            return _pack_onednn(weight, bias)
    return plain(weight, bias)


def pack_alike(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    """As `pack`, in one form for every number of rows, and nothing measured: the same form in every process."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not weight.numel():
        return pack(weight, bias)
    packings = _usable_float32()
    scale = _half_scale(weight) if _HALF in packings else None
    if scale is not None:
        return _pack_half(weight, bias, scale)
    return next((packings[name](weight, bias) for name in (_ONEDNN, _MKL) if name in packings), plain(weight, bias))


def plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    """As `pack`, always of the current contents of `weight` and `bias`."""
    return functools.partial(ops.linear, weight=weight, bias=bias)


def _pack_float32(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    packings = _usable_float32()
    scale = _half_scale(weight) if _HALF in packings else None
    choice = _choice(*weight.shape, scale is not None)

    def packed(name: str) -> Multiply:
        if name == _HALF and scale is not None:
            return _pack_half(weight, bias, scale)
        return packings[name](weight, bias) if name in packings else plain(weight, bias)

    if choice.few == choice.many:
        return packed(choice.many)
    few, many, max_few_rows = packed(choice.few), packed(choice.many), choice.max_few_rows

    def product(x: torch.Tensor) -> torch.Tensor:
        return few(x) if x.shape[0] <= max_few_rows else many(x)

    return product


def _usable_float32() -> dict[str, Pack]:
    packings: dict[str, Pack] = {_MKL: _pack_mkl, _ONEDNN: _pack_onednn, _HALF: _pack_half}
    return {name: pack for name, pack in packings.items() if _agrees(pack, torch.float32)}


@functools.cache
def _choice(num_outputs: int, num_inputs: int, is_half: bool) -> Choice:
    """is_half: whether 16 bits represent the matrix exactly."""
    packings = _usable_float32()
    usable = [name for name in packings if name != _HALF or is_half]
    seconds = measured_seconds(num_outputs, num_inputs, packings) if len(usable) > 1 else None
    if seconds is not None:
        return choose({name: seconds[name] for name in usable}, _HALF)
    return _UNMEASURED if _HALF in usable else Choice(_MKL, _MKL, 0)


def is_bfloat16_faster(folder: Path | None = None) -> bool:
    """Whether a typical product in bfloat16 is faster than in the fastest packing of float32, as measured; True where
    it cannot be. folder: as in `measured_seconds`."""
    if not _agrees(_pack_onednn, torch.bfloat16):
        return False
    packings = _usable_float32()
    seconds = measured_seconds(_TYPICAL, _TYPICAL, packings | {"bfloat16": _pack_bfloat16}, folder)
    return seconds is None or choose(seconds, None).many == "bfloat16"


def _pack_bfloat16(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    multiply = _pack_onednn(weight.bfloat16(), bias)
    return lambda x: multiply(x.bfloat16())


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
    num_outputs = len(weight)

    def product(x: torch.Tensor) -> torch.Tensor:
        if not len(x):  # which the operator refuses
            return x.new_empty(0, num_outputs)
        return multiply(x, packed) if scale == 1 else multiply(x, packed).div_(scale)  # a power of two rounds nothing

    return product


def _pack_mkl(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _ROWS_HINT)
    multiply: Callable[..., torch.Tensor] = torch.ops.mkl._mkl_linear.default
    # The operator takes the plain weight too, as a fallback where x has another number of rows than its argument says.
    # The argument below is always right, so only the shape is read. NaN: a fallback could not go unnoticed.
    shape_only = torch.full((1,), float("nan")).expand(weight.shape)

    def product(x: torch.Tensor) -> torch.Tensor:
        return multiply(x, packed, shape_only, bias, x.shape[0])

    return product


def _pack_onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    rows_hint = _ROWS_HINT if weight.dtype == torch.float32 else None  # 16 bits: the faster for every number of rows
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows_hint)
    multiply: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default

    def product(x: torch.Tensor) -> torch.Tensor:
        return multiply(x, packed, bias, "none", [], "")

    return product


@functools.cache
def _agrees(pack: Pack, dtype: torch.dtype) -> bool:
    """Whether this build has the packing for `dtype` and it computes what `F.linear` does. Tried once per process.

    These operators are torch's own but not public: a build without them, or one in which they changed, gets the plain
    linear.
    """
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(24, 40, generator=generator), torch.randn(24, generator=generator)
    weight, bias = weight.bfloat16().to(dtype), bias.to(dtype)  # numbers that any of the packings can hold
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    try:
        for rows in (1, 5, _ROWS_HINT + 1):
            x = torch.randn(rows, 40, generator=generator).to(dtype)
            for b in (bias, None):
                if not torch.allclose(pack(weight, b)(x), ops.linear(x, weight, b), atol=tolerance, rtol=tolerance):
                    return False
    except (AttributeError, RuntimeError):  # no such operator, or not for this dtype on this CPU
        return False
    return True
