"""The launch of `dot_kernel`, see `skinny_linear`."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ringcore.kernels.deferred_norm import DeferredNorm
from ringcore.kernels.dependent_launch import supports_pdl
from ringcore.kernels.packed_weight import BYTES_FP8, PackedWeight
from ringcore.kernels.round_rows import RoundedRows
from ringcore.kernels.skinny_kernels import TRIGGER_FIRST, dot_kernel
from ringcore.kernels.skinny_tiles import DotConfig
from ringcore.kernels.weight_tiles import tile_arguments

__all__ = ["MAX_ROW_BLOCKS", "launch_dot", "new_split_k_counters", "num_output_tiles", "num_prefetched_inputs"]

_MIN_BLOCK_OUTPUTS = 16
MAX_ROW_BLOCKS = 4  # of a product with splits


def new_split_k_counters(weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    """The arrival counters by which programs of one outputs tile of `weight` find the last one: 0 before and after a
    launch."""
    tiles = triton.cdiv(len(weight), _MIN_BLOCK_OUTPUTS) * MAX_ROW_BLOCKS
    return torch.zeros(tiles, dtype=torch.int32, device=weight.device)


def num_output_tiles(weight: torch.Tensor | PackedWeight, config: DotConfig) -> int:
    """Of the product of a weight without a gate."""
    return triton.cdiv(len(weight), config.block_weights)


def launch_dot(
    x: torch.Tensor | RoundedRows | DeferredNorm,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor,
    out: torch.Tensor,
    next_norm: DeferredNorm | None,
    counters: torch.Tensor | None,
    config: DotConfig,
    options: dict[str, Any],
) -> None:
    rows = x if isinstance(x, torch.Tensor) else x[0]
    row_scales, row_group = x[1:3] if isinstance(x, RoundedRows) else (rows, 0)
    norm = x if isinstance(x, DeferredNorm) else None
    num_rows, num_inputs = rows.shape
    num_outputs = out.shape[1]
    if isinstance(x, RoundedRows):
        _check_groups(x, weight, config)
    block_rows = max(config.least_rows, triton.next_power_of_2(min(num_rows, config.block_rows)))
    block_outputs = config.block_weights // 2 if options["is_gated"] else config.block_weights
    assert 1 <= num_rows <= MAX_ROW_BLOCKS * config.block_rows or config.splits == 1, (num_rows, config)
    assert config.splits == 1 or config.segments == 1, config
    assert _MIN_BLOCK_OUTPUTS <= block_outputs <= 32 * config.num_warps, config
    output_tiles, row_tiles = triton.cdiv(num_outputs, block_outputs), triton.cdiv(num_rows, block_rows)
    assert norm is None or (norm.squares.shape[1] == num_rows and norm.squares.is_contiguous()), norm
    _check_next_norm(next_norm, out, output_tiles)
    partials = out
    if config.splits > 1:
        size = config.splits * output_tiles * row_tiles * config.block_weights * block_rows
        partials = torch.empty(size, dtype=torch.float32, device=rows.device)
        counters = new_split_k_counters(weight) if counters is None else counters
        assert counters.numel() >= output_tiles * row_tiles, (counters.shape, output_tiles, row_tiles)
    dot_kernel[(output_tiles, config.splits, row_tiles)](
        x=rows,
        row_scales=row_scales,
        bias=bias,
        squares=rows if norm is None else norm.squares,
        eps=0.0 if norm is None else norm.eps,
        next_norm=() if next_norm is None else (next_norm.rows, next_norm.gain, next_norm.squares),
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
        threads=32 * config.num_warps,
        pdl=TRIGGER_FIRST if supports_pdl(rows.device) else 0,
        is_whole=num_inputs % config.block_inputs == 0,
        row_group=row_group,
        norm_tiles=0 if norm is None else len(norm.squares),
        block_tiles=1 if norm is None else triton.next_power_of_2(len(norm.squares)),
        defers_norm=next_norm is not None,
        **tile_arguments(weight, row_group > 0),
        **options,
    )


def _check_next_norm(norm: DeferredNorm | None, out: torch.Tensor, num_tiles: int) -> None:
    if norm is not None:
        assert out.dtype == torch.float32, out.dtype
        assert norm.rows.shape == out.shape, (norm.rows.shape, out.shape)
        assert norm.gain.shape == out.shape[1:], (norm.gain.shape, out.shape)
        assert norm.squares.shape == (num_tiles, len(out)), (norm.squares.shape, num_tiles, out.shape)
        assert all(tensor.is_contiguous() for tensor in norm[:3]), "tensors must be contiguous"


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
