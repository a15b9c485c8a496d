"""Quantized matrices as the C kernels take them: codes in blocks, a copy where they do not lie so, and scales for runs
of outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from ringcore.model_executor.linear_schemes.block_arrangements import BlockCodes
from ringcore.model_executor.linear_schemes.block_kernels import (
    LANES,
    BlockKernels,
    BlockLayout,
    KernelMatrix,
    RunScales,
    exact_form,
)
from ringcore.model_executor.linear_schemes.codes import AwqCodes, ByteCodes, Codes, WordCodes
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix
from ringcore.model_executor.weight import Derived

__all__ = ["MOST_INTEGERS", "padded_order", "scaled_blocks"]

_GROUP = 32  # inputs of a block
_LARGEST_ZERO = 255
MOST_INTEGERS = 1 << 16  # inputs whose sums, of products of 8 bits, are 32 bits
_ALL = 62  # the shift of a scale of all inputs


def scaled_blocks(
    kernels: BlockKernels,
    matrices: Sequence[QuantizedMatrix],
    orders: Sequence[torch.Tensor | None],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    by_integers: bool = False,
    derived: Derived | None = None,
) -> KernelMatrix | None:
    """Of the outputs of all matrices, which are of one format and size, one after the other; of several they must be
    whole runs. orders: in which the kernels see the inputs of each, sorted by group, as many of each; an input that
    comes again is of zeros (`padded_order`). dtype: of the inputs. by_integers: they are rounded by row, and the codes
    are INT8 with a scale for each output. derived: of codes that lie in blocks and change: what is recomputed of their
    scales, after the matrices' own. None where a block has several scales, or codes are neither integers nor
    e4m3, or sums may overflow, or a run has outputs of two matrices."""
    (first, *others), (kind, is_signed) = matrices, _kind(matrices[0])
    groups = [_groups(matrix, order) for matrix, order in zip(matrices, orders, strict=True)]
    size = min(_scale_size(of_one, first.scales.shape[1]) for of_one in groups)
    is_cut, num_inputs = bool(others) and first.num_outputs % LANES > 0, len(groups[0])
    if kind is None or size < _GROUP or is_cut or (by_integers and num_inputs > MOST_INTEGERS):
        return None
    make = _made if derived is None else derived.make
    scales = _run_scales(matrices, groups, size, 128 if is_signed else 0, make)
    if scales is None:
        return None
    if isinstance(first.codes, BlockCodes):
        rows = _joined_rows([matrix.codes for matrix in matrices])
    else:
        rows = _copied_rows(kernels, kind, matrices, orders)
    layout = BlockLayout(kind, _GROUP, _GROUP * first.codes.bits // 8, "integers" if by_integers else exact_form(dtype))
    return KernelMatrix(kernels, rows, layout, None if bias is None else make(bias.float), scales, num_inputs)


def _made(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    return compute()


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


def _kind(matrix: QuantizedMatrix) -> tuple[str | None, bool]:
    """(of the blocks, whether codes are signed)."""
    codes = matrix.codes
    if isinstance(codes, BlockCodes):
        return codes.kind, codes.number == "int8"
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


def _run_scales(
    matrices: Sequence[QuantizedMatrix],
    groups: Sequence[torch.Tensor],
    size: int,
    added: int,
    make: Callable[[Callable[[], torch.Tensor]], torch.Tensor],
) -> RunScales | None:
    """added: to the codes, and so to their zeros. None where a zero is no byte."""
    num_scales, least = matrices[0].scales.shape[1], matrices[0].least_zero if matrices[0].codes.bits == 8 else 0
    used = [of_one[::size] if num_scales > 1 else of_one.new_zeros(1) for of_one in groups]

    def scales() -> torch.Tensor:
        pairs = zip(matrices, used, strict=True)
        return torch.cat([_by_run(matrix.scales.float().index_select(1, of_scale)) for matrix, of_scale in pairs])

    def zeros() -> torch.Tensor:
        pairs = zip(matrices, used, strict=True)
        return torch.cat([_by_run(_zeros(matrix, of_scale, added - least)) for matrix, of_scale in pairs])

    if any(matrix.zeros is not None and _largest(matrix.zeros) - least > _LARGEST_ZERO for matrix in matrices):
        return None
    num_inputs = len(groups[0])
    shift = _ALL if size == num_inputs else (size // _GROUP).bit_length() - 1
    return RunScales(make(scales), make(zeros), shift, least)


def _zeros(matrix: QuantizedMatrix, of_scale: torch.Tensor, added: int) -> torch.Tensor:
    """[num_outputs, n] uint8."""
    if matrix.zeros is None:
        return torch.full((matrix.num_outputs, len(of_scale)), matrix.zero + added, dtype=torch.uint8)
    return (matrix.zeros.index_select(1, of_scale) + added).to(torch.uint8)


def _largest(zeros: torch.Tensor) -> int:
    return int(zeros.max()) if zeros.numel() else 0


def _by_run(of_outputs: torch.Tensor) -> torch.Tensor:
    """[num_outputs, n] -> [runs, n, 16]."""
    padded = F.pad(of_outputs, (0, 0, 0, -len(of_outputs) % LANES))
    return padded.view(-1, LANES, padded.shape[1]).transpose(1, 2).contiguous()


def _joined_rows(codes: Sequence[Codes]) -> torch.Tensor:
    """[outputs of all, bytes] uint8: of matrices that follow one another in the memory of one tensor."""
    rows = [one.rows for one in codes if isinstance(one, BlockCodes)]
    first, num_outputs = rows[0], sum(map(len, rows))
    assert all(one.data_ptr() == first.data_ptr() + i * first.nbytes for i, one in enumerate(rows))
    return first.as_strided((num_outputs, first.shape[1]), first.stride())


def _copied_rows(
    kernels: BlockKernels, kind: str, matrices: Sequence[QuantizedMatrix], orders: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """[outputs of all, bytes] uint8. orders: as in `scaled_blocks`."""
    first, order = matrices[0], orders[0]
    num_inputs = first.num_inputs if order is None else len(order)
    rows = torch.empty(len(matrices), first.num_outputs, num_inputs * first.codes.bits // 8, dtype=torch.uint8)
    for matrix, of_codes, out in zip(matrices, orders, rows, strict=True):
        _fill_rows(kernels, matrix, of_codes, kind == "BYTES" and isinstance(matrix.codes, ByteCodes), out)
    joined = rows.flatten(0, 1)
    kernels.interleave(kind, joined)
    return joined


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
