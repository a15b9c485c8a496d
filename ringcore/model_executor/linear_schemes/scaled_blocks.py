"""Quantized matrices as the C kernels take them: a copy of the codes in blocks, and scales for runs of outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

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

__all__ = ["padded_order", "scaled_blocks"]

_GROUP = 32  # inputs of a block
_LARGEST_ZERO = 255
_MOST_INTEGERS = 1 << 16  # inputs whose sums, of products of 8 bits, are 32 bits
_ALL = 62  # the shift of a scale of all inputs


def scaled_blocks(
    kernels: BlockKernels,
    matrices: Sequence[QuantizedMatrix],
    orders: Sequence[torch.Tensor | None],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    by_integers: bool = False,
) -> KernelMatrix | None:
    """Of the outputs of all matrices, which are of one format and size, one after the other; of several they must be
    whole runs. orders: in which the kernels see the inputs of each, sorted by group, as many of each; an input that
    comes again is of zeros (`padded_order`). dtype: of the inputs. by_integers: they are rounded by row, and the codes
    are INT8 with a scale for each output. None where a block has several scales, or codes are neither integers nor
    e4m3, or sums may overflow, or a run has outputs of two matrices."""
    (first, *others), (kind, is_signed) = matrices, _kind(matrices[0])
    groups = [_groups(matrix, order) for matrix, order in zip(matrices, orders, strict=True)]
    size = min(_scale_size(of_one, first.scales.shape[1]) for of_one in groups)
    is_cut, num_inputs = bool(others) and first.num_outputs % LANES > 0, len(groups[0])
    if kind is None or size < _GROUP or is_cut or (by_integers and num_inputs > _MOST_INTEGERS):
        return None
    added = 128 if is_signed else 0
    scales = [_run_scales(matrix, of_one, size, added) for matrix, of_one in zip(matrices, groups, strict=True)]
    if any(of_one is None for of_one in scales):
        return None
    rows = torch.empty(len(matrices), first.num_outputs, num_inputs * first.codes.bits // 8, dtype=torch.uint8)
    for matrix, order, out in zip(matrices, orders, rows, strict=True):
        _fill_rows(kernels, matrix, order, is_signed, out)
    rows = rows.flatten(0, 1)
    kernels.interleave(kind, rows)
    num_bytes = _GROUP * first.codes.bits // 8
    layout = BlockLayout(kind, _GROUP, num_bytes, "integers" if by_integers else exact_form(dtype))
    return KernelMatrix(kernels, rows, layout, None if bias is None else bias.float(), _joined(scales))


def padded_order(matrix: QuantizedMatrix) -> tuple[torch.Tensor | None, tuple[int, int]]:
    """For a rank's share of consecutive inputs that begins or ends within a block: the order in which the first input
    and the last one come again, so that it is of whole blocks, and how often they do. None where it is."""
    num_inputs, groups = matrix.num_inputs, _groups(matrix, None)
    ends = groups.diff().nonzero().flatten() + 1
    before = -int(ends[0]) % _GROUP if len(ends) and matrix.scales.shape[1] > 1 else 0
    after = -(before + num_inputs) % _GROUP
    if not before and not after:
        return None, (0, 0)
    return torch.arange(-before, num_inputs + after).clamp_(0, num_inputs - 1), (before, after)


def _groups(matrix: QuantizedMatrix, order: torch.Tensor | None) -> torch.Tensor:
    groups = matrix.groups.of_inputs(matrix.num_inputs, torch.device("cpu"))
    return groups if order is None else groups[order]


def _joined(scales: Sequence[RunScales | None]) -> RunScales:
    known = [one for one in scales if one is not None]
    if len(known) == 1:
        return known[0]
    assert known[0].scales is not None
    joined = torch.cat([one.scales for one in known if one.scales is not None])
    return RunScales(joined, torch.cat([one.zeros for one in known]), known[0].shift)


def _kind(matrix: QuantizedMatrix) -> tuple[str | None, bool]:
    """(of the blocks, whether codes are signed)."""
    codes = matrix.codes
    if isinstance(codes, ByteCodes):
        return ("E4M3", False) if codes.is_fp8 else ("BYTES", True)
    if isinstance(codes, AwqCodes | WordCodes):
        return {4: "NIBBLES", 8: "BYTES"}.get(codes.bits), False
    return None, False


def _scale_size(groups: torch.Tensor, num_scales: int) -> int:
    """Inputs that share a scale: all, or the largest power of two that no group is cut by; 0 where the inputs are no
    whole blocks."""
    num_inputs = len(groups)
    if num_inputs % _GROUP:
        return 0
    if num_scales == 1:
        return num_inputs
    ends = (groups.diff().nonzero().flatten() + 1).tolist()
    common = math.gcd(num_inputs, *ends)
    return common & -common


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
    shift = _ALL if size == len(groups) else (size // _GROUP).bit_length() - 1
    return RunScales(_by_run(scales), _by_run(zeros), shift)


def _by_run(of_outputs: torch.Tensor) -> torch.Tensor:
    """[num_outputs, n] -> [runs, n, 16]."""
    padded = F.pad(of_outputs, (0, 0, 0, -len(of_outputs) % LANES))
    return padded.view(-1, LANES, padded.shape[1]).transpose(1, 2).contiguous()


def _fill_rows(
    kernels: BlockKernels, matrix: QuantizedMatrix, order: torch.Tensor | None, is_signed: bool, out: torch.Tensor
) -> None:
    """out: [num_outputs, bytes] uint8."""
    codes = matrix.codes
    if isinstance(codes, ByteCodes):
        numbers = codes.tensor.view(torch.uint8)
        numbers = numbers if order is None else numbers.index_select(1, order)
        if is_signed:
            torch.bitwise_xor(numbers, 128, out=out)
        else:
            out.copy_(numbers)
        return
    assert isinstance(codes, AwqCodes | WordCodes)
    places = codes.places()
    places = places if order is None else places._replace(in_at=places.in_at[order])
    kernels.gather(places, codes.bits, out)
