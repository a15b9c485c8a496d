"""One row times a 4-bit weight on Hopper, by int8 tensor cores: a kernel in CUDA C++ (`int8_gemv.cu`).

A nibble is an 8-bit integer, and one mask gives four. The row becomes integers too: of each group of 128 inputs numbers
of 23 bits times a power of 2, each as three digits of 8 bits. Digits are columns of the second factor, of which the
tensor core has eight, so that they are multiplied at once, and the sums of a group are exact. Zeros are subtracted from
them, as integers. What rounds is the digits, at 2^-23 of a group's largest number, and the float32 sum of the groups.

Warps are specialized. One thread fills a ring in shared memory by TMA, across tiles, and from before the kernel waits
for its predecessor (`dependent_launch`). Eight warps multiply what has landed, each 512 inputs of 16 rows of the weight
at a time. Their sums stay in shared memory until all tiles are done, and no warp waits for another before. A program
has at most half of an SM's registers and shared memory, so the next kernel's weights are on their way meanwhile. In
Triton and Gluon all warps share a tile, and none can wait for its own part alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import triton

from ringcore.kernels.launch.cuda_kernel import FLOAT, INT, NUMBERS, POINTER, CudaKernel, tensor_map
from ringcore.kernels.linears.packed_weight import PackedWeight
from ringcore.kernels.linears.skinny_tiles import Int8GemvConfig
from ringcore.kernels.linears.skinny_times import NUM_SMS
from ringcore.kernels.partials import RowNorm

__all__ = ["int8_gemv", "launch_int8_gemv", "specialization"]

_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

_SOURCE = Path(__file__).with_suffix(".cu")

int8_gemv = CudaKernel(__name__, "int8_gemv", _SOURCE, 32 * Int8GemvConfig.num_warps, headers=(NUMBERS,))


def launch_int8_gemv(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor,
    out: torch.Tensor,
    norm: RowNorm | None,
    config: Int8GemvConfig,
    options: dict[str, Any],
) -> None:
    """As `skinny_linear`, whose arguments these are."""
    assert isinstance(weight, PackedWeight), "dense weights are for other configurations"
    assert len(x) == 1, x.shape
    gain, eps = (x, 0.0) if norm is None else norm
    assert x.data_ptr() % 16 == gain.data_ptr() % 16 == 0, "rows and gains are loaded 16 bytes at a time"
    programs, content = specialization(x, weight, gain, bias, out, norm is not None, config, options)

    def arguments() -> list[tuple[Any, Any]]:
        pointers = [(tensor.data_ptr(), POINTER) for tensor in (x, gain, bias, out)]
        maps = [(one, None) for one in _tensor_maps(weight, options["is_gated"])]
        return [*maps, *pointers, (out.shape[1], INT), (eps, FLOAT)]

    int8_gemv.launch(programs, content, arguments)


def specialization(
    x: torch.Tensor,
    weight: PackedWeight,
    gain: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    has_norm: bool,
    config: Int8GemvConfig,
    options: dict[str, Any],
) -> tuple[int, str]:
    """(The number of programs, what the kernel is compiled for.)"""
    tiles = triton.cdiv(out.shape[1], 8 if options["is_gated"] else 16)
    programs = min(tiles, _num_sms(x.device))
    max_tiles = triton.cdiv(tiles, programs)
    num_bytes = config.shared_bytes(x.shape[1], max_tiles)
    macros = {
        "NUM_INPUTS": x.shape[1],
        "NUM_STAGES": config.num_stages,
        "EARLY_WINDOW": config.early_window,
        "WINDOW": config.window,
        "MAX_TILES": max_tiles,
        "SHARED_BYTES": num_bytes,
        "HAS_NORM": int(has_norm),
        "HAS_BIAS": int(options["has_bias"]),
        "IS_GATED": int(options["is_gated"]),
        "IS_GELU": int(options["is_gelu"]),
        "ADDS": int(options["adds"]),
        "HAS_ZERO_BITS": int(weight.has_zero_bits),
        "ZERO": weight.zero,
        "ARE_BY_GROUP": int(not weight.scales.is_contiguous()),
        "ROW_TYPE": _TYPES[x.dtype],
        "GAIN_TYPE": _TYPES[gain.dtype],
        "BIAS_TYPE": _TYPES[bias.dtype],
        "OUT_TYPE": _TYPES[out.dtype],
    }
    return programs, json.dumps({"macros": macros, "shared_bytes": num_bytes})


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else NUM_SMS


def _tensor_maps(weight: PackedWeight, is_gated: bool) -> tuple[Any, Any]:
    """Of the codes, boxes of 16 rows of 1,024 inputs, 128 bytes of a row at a time, swizzled; and of their scales. A
    gated box is 8 rows of the gate and 8 of the up projection."""
    num_weights, num_inputs = weight.shape
    halves = 2 if is_gated else 1
    rows, box_rows = num_weights // halves, 16 // halves
    row_bytes, num_groups = num_inputs // 2, weight.scales.shape[1]
    codes = tensor_map(
        weight.codes.data_ptr(),
        torch.uint8,
        (128, rows, halves, num_inputs // 256),
        (row_bytes, rows * row_bytes, 128),
        (128, box_rows, halves, 4),
        is_swizzled=True,
    )
    shape, strides, box = (num_groups, rows, halves), (4 * num_groups, 4 * rows * num_groups), (8, box_rows, halves)
    if not weight.scales.is_contiguous():
        shape, strides, box = (rows, halves, num_groups), (4 * rows, 4 * num_weights), (box_rows, halves, 8)
    scales = tensor_map(weight.scales.data_ptr(), torch.float32, shape, strides, box, is_swizzled=False)
    return codes, scales
