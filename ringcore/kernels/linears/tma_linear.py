"""Launches `tma_kernel`: of dense weights, or of FP8 times FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringcore.kernels.linears.packed_weight import PackedWeight
from ringcore.kernels.linears.round_rows import RoundedRows
from ringcore.kernels.linears.skinny_tiles import TmaConfig, padded_rows
from ringcore.kernels.linears.skinny_times import NUM_SMS
from ringcore.kernels.linears.tma_configs import has_plain_rows
from ringcore.kernels.linears.tma_kernels import tma_kernel
from ringcore.kernels.partials import Partials

__all__ = ["launch_tma_linear", "most_contributors"]

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


def launch_tma_linear(
    x: torch.Tensor | RoundedRows,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor,
    out: torch.Tensor,
    counters: torch.Tensor | None,
    config: TmaConfig,
    options: dict[str, Any],
    defer: Callable[[Partials], None] | None,
) -> None:
    """As `skinny_linear`, whose arguments these are."""
    rows, numbers, scales, groups = _operands(x, weight)
    (num_rows, num_inputs), num_outputs = rows.shape, out.shape[1]
    block_rows = padded_rows(num_rows)
    num_tiles = triton.cdiv(len(weight), config.block_weights)
    num_programs, slots = _grid(config, num_tiles, num_inputs, rows.device)
    is_deferred = slots > 1 and defer is not None and not (options["has_bias"] or options["is_gated"])
    partials = out
    if slots > 1:
        of_tiles = num_tiles, slots, config.block_weights, block_rows
        shape = (slots, num_rows, num_outputs) if is_deferred else of_tiles
        partials = torch.empty(shape, dtype=torch.float32, device=rows.device)
        counters = torch.zeros(num_tiles, dtype=torch.int32, device=rows.device) if counters is None else counters
    describe = _gated_descriptor if options["is_gated"] else _descriptor
    tma_kernel[(num_programs,)](
        x=_descriptor(rows, block_rows, config.block_inputs),
        weight=describe(numbers, config.block_weights, config.block_inputs),
        scales=scales,
        bias=bias,
        out=out,
        partials=partials,
        counters=out if counters is None else counters,
        num_rows=num_rows,
        num_outputs=num_outputs,
        num_items=num_tiles * config.splits,
        num_inputs=num_inputs,
        block_rows=block_rows,
        block_inputs=config.block_inputs,
        block_weights=config.block_weights,
        splits=config.splits,
        slots=slots,
        is_even=config.is_even,
        num_stages=config.num_stages,
        groups=groups,
        is_deferred=is_deferred,
        pdl=True,
        **options,
    )
    if is_deferred and defer is not None:
        defer(Partials(partials))


def _grid(config: TmaConfig, num_tiles: int, num_inputs: int, device: torch.device) -> tuple[int, int]:
    """How many programs, and partials of a tile at most."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else NUM_SMS
    resident = config.programs_per_sm * sms
    if not config.is_even:
        return min(num_tiles * config.splits, resident), config.splits
    assert config.splits == 1, config
    blocks = num_inputs // config.block_inputs
    num_programs = min(num_tiles * blocks, resident)
    return num_programs, most_contributors(num_tiles, blocks, num_programs)


@functools.cache
def most_contributors(num_tiles: int, blocks: int, num_programs: int) -> int:
    """Of even ranges of the blocks of num_tiles tiles: at most so many programs have some of one."""

    def owner(block: int) -> int:
        return ((block + 1) * num_programs - 1) // (num_tiles * blocks)

    return max(owner((tile + 1) * blocks - 1) - owner(tile * blocks) + 1 for tile in range(num_tiles))


def _operands(
    x: torch.Tensor | RoundedRows, weight: torch.Tensor | PackedWeight
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...], tuple[int, ...]]:
    """Both matrices, and of FP8 `scales` and `groups` of `tma_kernel`."""
    if isinstance(x, torch.Tensor):
        assert isinstance(weight, torch.Tensor), "quantized weights are multiplied by rounded rows"
        return x, weight, (), ()
    assert isinstance(weight, PackedWeight), "rounded rows are for a quantized weight"
    assert has_plain_rows(weight), weight
    codes = weight.codes.view(torch.float8_e4m3fn)
    groups = x.group, weight.group_size, weight.scales.shape[1], weight.scale_run
    return x.codes, codes, (x.scales, weight.scales, *weight.scales.stride()), groups


def _descriptor(tensor: torch.Tensor, block_rows: int, block_inputs: int) -> TensorDescriptor:
    return _described(tensor, (block_rows, block_inputs))


def _gated_descriptor(weight: torch.Tensor, block_weights: int, block_inputs: int) -> TensorDescriptor:
    """A tile has by turns 8 rows of the gate and 8 of the up projection: a thread's two rows of 16 are then gate and up
    of one output."""
    num_weights, num_inputs = weight.shape
    pairs = weight.view(2, num_weights // 16, 8, num_inputs).transpose(0, 1)
    return _described(pairs, (block_weights // 16, 2, 8, block_inputs))


def _described(tensor: torch.Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, list(block), _layout(block, tensor.dtype))


@functools.cache  # it takes as long as a launch
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])
