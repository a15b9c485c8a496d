"""Quantized matrices as the C kernels take them: a copy of the codes in blocks, and scales for runs of outputs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812

from ringcore.model_executor.linear_schemes.block_kernels import (
    LANES,
    BlockKernels,
    BlockLayout,
    KernelMatrix,
    RunScales,
    exact_form,
)
from ringcore.model_executor.linear_schemes.codes import AwqCodes, ByteCodes, WordCodes
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix

__all__ = ["scaled_blocks"]

_GROUP = 32  # inputs of a block
_LARGEST_ZERO = 255
_MOST_INTEGERS = 1 << 16  # inputs whose sums, of products of 8 bits, are 32 bits
_ALL = 62  # the shift of a scale of all inputs


def scaled_blocks(
    kernels: BlockKernels,
    matrix: QuantizedMatrix,
    order: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    by_integers: bool = False,
) -> KernelMatrix | None:
    """order: in which the kernels see the inputs, sorted by group. dtype: of the inputs. by_integers: they are rounded
    by row, and the codes are INT8 with a scale for each output. None where a block has several scales, or codes are
    neither integers nor e4m3, or sums may overflow."""
    kind, is_signed = _kind(matrix)
    groups = matrix.groups.of_inputs(matrix.num_inputs, torch.device("cpu"))
    groups = groups if order is None else groups[order]
    size = _scale_size(groups, matrix.scales.shape[1])
    if kind is None or size is None or (by_integers and matrix.num_inputs > _MOST_INTEGERS):
        return None
    scales = _run_scales(matrix, groups, size, 128 if is_signed else 0)
    if scales is None:
        return None
    rows = _rows(kernels, matrix, order, is_signed)
    kernels.interleave(kind, rows)
    num_bytes = _GROUP * matrix.codes.bits // 8
    layout = BlockLayout(kind, _GROUP, num_bytes, "integers" if by_integers else exact_form(dtype))
    return KernelMatrix(kernels, rows, layout, None if bias is None else bias.float(), scales)


def _kind(matrix: QuantizedMatrix) -> tuple[str | None, bool]:
    """(of the blocks, whether codes are signed)."""
    codes = matrix.codes
    if isinstance(codes, ByteCodes):
        return ("E4M3", False) if codes.is_fp8 else ("BYTES", True)
    if isinstance(codes, AwqCodes | WordCodes):
        return {4: "NIBBLES", 8: "BYTES"}.get(codes.bits), False
    return None, False


def _scale_size(groups: torch.Tensor, num_scales: int) -> int | None:
    """Inputs that share a scale: all, or the largest power of two, and at least a block, that no group is cut by."""
    num_inputs = len(groups)
    if num_inputs % _GROUP:
        return None
    if num_scales == 1:
        return num_inputs
    ends = (groups.diff().nonzero().flatten() + 1).tolist()
    common = math.gcd(num_inputs, *ends)
    size = common & -common
    return size if size >= _GROUP else None


def _run_scales(matrix: QuantizedMatrix, groups: torch.Tensor, size: int, added: int) -> RunScales | None:
    """added: to the codes, and so to their zeros. None where a zero is no byte."""
    of_scale = groups[::size] if matrix.scales.shape[1] > 1 else groups.new_zeros(1)
    scales = matrix.scales.float().index_select(1, of_scale)
    if matrix.zeros is None:
        zeros = torch.full_like(scales, matrix.zero + added, dtype=torch.uint8)
    else:
        numbers = matrix.zeros.index_select(1, of_scale)
        if numbers.numel() and int(numbers.max()) > _LARGEST_ZERO:
            return None
        zeros = numbers.to(torch.uint8)
    shift = _ALL if size == matrix.num_inputs else (size // _GROUP).bit_length() - 1
    return RunScales(_by_run(scales), _by_run(zeros), shift)


def _by_run(of_outputs: torch.Tensor) -> torch.Tensor:
    """[num_outputs, n] -> [runs, n, 16]."""
    padded = F.pad(of_outputs, (0, 0, 0, -len(of_outputs) % LANES))
    return padded.view(-1, LANES, padded.shape[1]).transpose(1, 2).contiguous()


def _rows(kernels: BlockKernels, matrix: QuantizedMatrix, order: torch.Tensor | None, is_signed: bool) -> torch.Tensor:
    """[num_outputs, bytes] uint8, a copy."""
    codes = matrix.codes
    if isinstance(codes, ByteCodes):
        numbers = codes.tensor.view(torch.uint8)
        numbers = numbers if order is None else numbers.index_select(1, order)
        return numbers ^ 128 if is_signed else numbers.clone(memory_format=torch.contiguous_format)
    assert isinstance(codes, AwqCodes | WordCodes)
    places = codes.places()
    places = places if order is None else places._replace(in_at=places.in_at[order])
    rows = torch.empty(matrix.num_outputs, matrix.num_inputs * codes.bits // 8, dtype=torch.uint8)
    kernels.gather(places, codes.bits, rows)
    return rows
