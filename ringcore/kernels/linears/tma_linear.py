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
from ringcore.kernels.linears.tma_configs import has_plain_rows
from ringcore.kernels.linears.tma_kernels import tma_kernel
from ringcore.kernels.partials import Partials

__all__ = ["launch_tma_linear"]

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
    (num_rows, num_inputs), num_outputs, splits = rows.shape, out.shape[1], config.splits
    block_rows = padded_rows(num_rows)
    num_items = triton.cdiv(len(weight), config.block_weights) * splits
    is_deferred = splits > 1 and defer is not None and options["adds"] and not options["has_bias"]
    partials = out
    if is_deferred:
        partials = torch.empty(splits, num_rows, num_outputs, dtype=torch.float32, device=rows.device)
    elif splits > 1:
        size = num_items * config.block_weights * block_rows
        partials = torch.empty(size, dtype=torch.float32, device=rows.device)
        if counters is None:
            counters = torch.zeros(num_items // splits, dtype=torch.int32, device=rows.device)
    sms = torch.cuda.get_device_properties(rows.device).multi_processor_count if rows.is_cuda else num_items
    describe = _gated_descriptor if options["is_gated"] else _descriptor
    tma_kernel[(min(num_items, config.programs_per_sm * sms),)](
        x=_descriptor(rows, block_rows, config.block_inputs),
        weight=describe(numbers, config.block_weights, config.block_inputs),
        scales=scales,
        bias=bias,
        out=out,
        partials=partials,
        counters=out if counters is None else counters,
        num_rows=num_rows,
        num_outputs=num_outputs,
        num_items=num_items,
        num_inputs=num_inputs,
        block_rows=block_rows,
        block_inputs=config.block_inputs,
        block_weights=config.block_weights,
        splits=splits,
        num_stages=config.num_stages,
        groups=groups,
        is_deferred=is_deferred,
        pdl=True,
        **options,
    )
    if is_deferred and defer is not None:
        defer(Partials(partials))


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
