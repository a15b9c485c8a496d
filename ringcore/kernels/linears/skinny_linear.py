"""A linear layer for few rows (a skinny GEMM) with a fused prologue and epilogue: RMS norm; bias, gate, residual add.

With few rows a GEMM is bound by reading the weights from memory, and a kernel by its launch latency. So the weights are
prefetched while the kernel before still runs, and prologue and epilogue need no kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import triton

from ringcore.kernels.launch.dependent_launch import launch_options, supports_pdl
from ringcore.kernels.launch.shared_memory import prefer_cache
from ringcore.kernels.linears.int8_gemv import launch_int8_gemv
from ringcore.kernels.linears.packed_fma import launch_packed_fma
from ringcore.kernels.linears.packed_weight import BYTES_FP8, PackedWeight
from ringcore.kernels.linears.round_rows import RoundedRows
from ringcore.kernels.linears.skinny_kernels import TRIGGER_FIRST, TRIGGER_LATE, dot_kernel, fma_kernel
from ringcore.kernels.linears.skinny_tiles import (
    Config,
    DotConfig,
    FmaConfig,
    Int8GemvConfig,
    PackedFmaConfig,
    TmaConfig,
)
from ringcore.kernels.linears.tma_linear import launch_tma_linear
from ringcore.kernels.linears.weight_tiles import tile_arguments
from ringcore.kernels.partials import Partials, RowNorm

__all__ = [
    "MAX_ROW_BLOCKS",
    "Activation",
    "new_split_k_counters",
    "num_prefetched_inputs",
    "skinny_linear",
    "skinny_linear_reference",
]

Activation = Literal["silu", "gelu_tanh"]

_MIN_BLOCK_OUTPUTS = 16
MAX_ROW_BLOCKS = 4  # of a product with splits


def new_split_k_counters(weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    """The arrival counters by which programs of one outputs tile of `weight` find the last one: 0 before and after a
    launch."""
    tiles = triton.cdiv(len(weight), _MIN_BLOCK_OUTPUTS) * MAX_ROW_BLOCKS
    return torch.zeros(tiles, dtype=torch.int32, device=weight.device)


def skinny_linear(
    x: torch.Tensor | RoundedRows,
    weight: torch.Tensor | PackedWeight,
    config: Config,
    *,
    bias: torch.Tensor | None = None,
    norm: RowNorm | None = None,
    row_group: int | None = None,
    activation: Activation | None = None,
    add_to: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    defer: Callable[[Partials], None] | None = None,
) -> torch.Tensor:
    """x W^T + b, accumulated in float32 and rounded once; `config`: from `skinny_configs.choose`.

    x: [n, num_inputs], weight: [num_weights, num_inputs] of x's dtype, or quantized, bias: [num_weights]; all
    contiguous. n is 1 to 4 for an `FmaConfig`, of a dense weight, 1 or 2 for a `PackedFmaConfig`, of a quantized one
    that `has_chunks`, 1 for an `Int8GemvConfig`, of one that `fits_int8_gemv`, up to 128 for a `TmaConfig`, on Hopper,
    and up to four times its block_rows for a `DotConfig`, or any number without splits. Rounded rows are for an FP8
    weight whose rows are contiguous, and a `DotConfig` or `TmaConfig` with a block_inputs that divides both's groups:
    FP8 is multiplied by FP8.
    norm: prologue, not of a `DotConfig` or `TmaConfig`: of each row of x, which may then be float32; the normalised row
    is not rounded before the product.
    row_group: prologue of a `PackedFmaConfig` and an FP8 weight, after the norm: rows are rounded to FP8, with a scale
    for each row_group inputs, which divides block_inputs, or for all.
    activation: epilogue; the weight's first half is a gate: the result is activation(first half) * second half.
    add_to: epilogue; [n, num_outputs], also float32; the result is added to it, in place, and rounded once, as the sum.
    out: [n, num_outputs] of the weight's dtype, or float32, instead of add_to; num_outputs is num_weights, or half of
    it.
    counters: see `new_split_k_counters`, not shared with a product that may run at the same time; allocated if not
    given, and used only where `config` has splits.
    defer: may be given the partials of splits, which are then not added yet, to each other or to add_to (a deferred
    add): the result has its old content.

    Returns add_to, or out (by default a new tensor).
    """
    rows = x.codes if isinstance(x, RoundedRows) else x
    num_outputs = len(weight) // (1 if activation is None else 2)
    if add_to is not None:
        assert out is None, "give add_to or out, not both"
        out = add_to
    if out is None:
        out = rows.new_empty(len(rows), num_outputs, dtype=weight.dtype)
    assert weight.dtype == x.dtype or (norm is not None and x.dtype == torch.float32), (weight.dtype, x.dtype)
    _check_shapes(rows, weight, bias, out, num_outputs)
    options: dict[str, Any] = {
        "has_bias": bias is not None,
        "is_gated": activation is not None,
        "is_gelu": activation == "gelu_tanh",
        "adds": add_to is not None,
        "num_warps": config.num_warps,
        **launch_options(supports_pdl(rows.device)),
    }
    bias = rows if bias is None else bias
    assert isinstance(x, torch.Tensor) or isinstance(config, DotConfig | TmaConfig), "rounded rows are for tensor cores"
    match config:
        case FmaConfig():
            assert row_group is None, "rows are rounded for quantized weights"
            _launch_fma(rows, weight, bias, out, norm, config, options)
        case PackedFmaConfig():
            launch_packed_fma(rows, weight, bias, out, norm, row_group or 0, config, options)
        case Int8GemvConfig():
            assert row_group is None, "rows are rounded for FP8 weights"
            launch_int8_gemv(rows, weight, bias, out, norm, config, options)
        case DotConfig():
            assert norm is None, "a DotConfig has no prologue"
            _launch_dot(x, weight, bias, out, counters, config, options)
        case TmaConfig():
            assert norm is None, "a TmaConfig has no prologue"
            launch_tma_linear(x, weight, bias, out, counters, config, options, defer)
    return out


def _check_shapes(
    rows: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    num_outputs: int,
) -> None:
    assert weight.shape[1] == rows.shape[1], (weight.shape, rows.shape)
    assert len(weight) % num_outputs == 0, weight.shape
    assert out.shape == (len(rows), num_outputs), (out.shape, rows.shape, num_outputs)
    assert bias is None or bias.shape == (len(weight),), (bias.shape, weight.shape)
    assert out.data_ptr() != rows.data_ptr(), "out must not be x: other programs still read it"
    for tensor in (rows, weight, bias, out):
        assert not isinstance(tensor, torch.Tensor) or tensor.is_contiguous(), "tensors must be contiguous"


def _launch_fma(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor,
    out: torch.Tensor,
    norm: RowNorm | None,
    config: FmaConfig,
    options: dict[str, Any],
) -> None:
    num_rows, num_inputs = x.shape
    num_outputs = out.shape[1]
    assert num_rows in (1, 2, 3, 4), num_rows
    assert isinstance(weight, torch.Tensor), "quantized weights are for other configurations"
    gain, eps = (x, 0.0) if norm is None else norm
    assert norm is None or (gain.shape == (num_inputs,) and gain.is_contiguous()), gain.shape
    pdl = TRIGGER_LATE if config.trigger_late else TRIGGER_FIRST
    kernel = fma_kernel[(triton.cdiv(num_outputs, config.block_outputs),)](
        x=x,
        weight=weight,
        gain=gain,
        bias=bias,
        out=out,
        num_outputs=num_outputs,
        eps=eps,
        num_rows=num_rows,
        block_rows=triton.next_power_of_2(num_rows),
        num_inputs=num_inputs,
        block_inputs=config.block_inputs,
        block_outputs=config.block_outputs,
        is_whole=num_inputs % config.block_inputs == 0,
        has_norm=norm is not None,
        pdl=pdl if supports_pdl(x.device) else 0,
        **options,
    )
    prefer_cache(kernel, x.device)


def _launch_dot(
    x: torch.Tensor | RoundedRows,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor,
    out: torch.Tensor,
    counters: torch.Tensor | None,
    config: DotConfig,
    options: dict[str, Any],
) -> None:
    rows, row_scales, row_group = x[:3] if isinstance(x, RoundedRows) else (x, x, 0)
    (num_rows, num_inputs), num_outputs = rows.shape, out.shape[1]
    if isinstance(x, RoundedRows):
        _check_groups(x, weight, config)
    assert not isinstance(weight, PackedWeight) or weight.has_whole_runs(config.block_inputs), (weight, config)
    block_rows = max(config.least_rows, triton.next_power_of_2(min(num_rows, config.block_rows)))
    block_outputs = config.block_weights // 2 if options["is_gated"] else config.block_weights
    assert 1 <= num_rows <= MAX_ROW_BLOCKS * config.block_rows or config.splits == 1, (num_rows, config)
    assert _MIN_BLOCK_OUTPUTS <= block_outputs <= 32 * config.num_warps, config
    output_tiles, row_tiles = triton.cdiv(num_outputs, block_outputs), triton.cdiv(num_rows, block_rows)
    partials = out
    if config.splits > 1:
        size = config.splits * output_tiles * row_tiles * config.block_weights * block_rows
        partials = torch.empty(size, dtype=torch.float32, device=rows.device)
        counters = new_split_k_counters(weight) if counters is None else counters
        assert counters.numel() >= output_tiles * row_tiles, (counters.shape, output_tiles, row_tiles)
    dot_kernel[(row_tiles, output_tiles, config.splits)](
        x=rows,
        row_scales=row_scales,
        bias=bias,
        out=out,
        partials=partials,
        counters=out if counters is None or config.splits == 1 else counters,
        num_rows=num_rows,
        num_outputs=num_outputs,
        block_rows=block_rows,
        num_inputs=num_inputs,
        block_inputs=config.block_inputs,
        block_weights=config.block_weights,
        splits=config.splits,
        segments=config.segments,
        num_stages=config.num_stages,
        prefetched_inputs=num_prefetched_inputs(weight, config, row_group > 0),
        scale_bytes=weight.shared_scale_bytes(block_outputs) if isinstance(weight, PackedWeight) else 0,
        threads=32 * config.num_warps,
        pdl=TRIGGER_FIRST if supports_pdl(rows.device) else 0,
        is_whole=num_inputs % config.block_inputs == 0,
        row_group=row_group,
        **tile_arguments(weight, row_group > 0),
        **options,
    )


def _check_groups(x: RoundedRows, weight: torch.Tensor | PackedWeight, config: DotConfig) -> None:
    assert isinstance(weight, PackedWeight), "rounded rows are for a quantized weight"
    num_inputs = weight.shape[1]
    assert (weight.form, weight.row_stride, weight.group_offset) == (BYTES_FP8, num_inputs, 0), weight
    for groups, size in ((weight.scales.shape[1], weight.group_size), (x.scales.shape[1], x.group)):
        assert groups == 1 or size % config.block_inputs == 0, (groups, size, config)


def num_prefetched_inputs(weight: torch.Tensor | PackedWeight, config: DotConfig, are_numbers: bool = False) -> int:
    """Inputs of each weight row that are prefetched: as `config` says, or 0 where rows are not aligned to 16 bytes, or
    have bytes that are not multiplied as they are."""
    if isinstance(weight, PackedWeight):
        is_words = weight.codes.dtype == torch.int16
        if not is_words and not are_numbers:
            return 0
        elements, tensor, row_bytes = (32, weight.codes, 2 * weight.row_stride) if is_words else (
            16, weight.codes, weight.row_stride
        )  # fmt: skip
    else:
        elements, tensor = 16 // weight.element_size(), weight
        row_bytes = weight.shape[1] * weight.element_size()
    are_aligned = weight.shape[1] % elements == 0 and row_bytes % 16 == 0 and tensor.data_ptr() % 16 == 0
    assert config.prefetched_inputs % elements == 0, config
    return config.prefetched_inputs if are_aligned else 0


def skinny_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: RowNorm | None = None,
    activation: Activation | None = None,
    add_to: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`skinny_linear` in plain torch."""
    rows = x.float()
    if norm is not None:
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm.eps) * norm.gain.float()
    product = torch.nn.functional.linear(rows, weight.float(), None if bias is None else bias.float())
    if activation is not None:
        gate, up = product.chunk(2, -1)
        functional = torch.nn.functional
        product = (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up
    if add_to is not None:
        return add_to.copy_(add_to.float() + product)
    return product.to(weight.dtype) if out is None else out.copy_(product)
