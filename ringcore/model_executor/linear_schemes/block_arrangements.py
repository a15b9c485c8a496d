"""How codes lie on a CPU that has C kernels: in blocks of 32 inputs, 16 outputs interleaved, in the memory of the
checkpoint's tensor, where an update writes them too. Scales and zeros are beside them (`scaled_blocks.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.arrangements import ColumnsArrangement
from ringcore.model_executor.linear_schemes.block_kernels import LANES, BlockKernels, block_kernels
from ringcore.model_executor.linear_schemes.codes import CodePlaces, Codes, WordCodes, fp8_numbers
from ringcore.model_executor.linear_schemes.quantized import Groups
from ringcore.model_executor.weight import Arrangement

__all__ = ["BlockCodes", "ColumnBlocks", "ForDevice", "RowBlocks", "are_in_blocks", "has_whole_blocks"]

_GROUP = 32  # inputs of a block
_UNITS = "NIBBLES"  # units of 4 bytes, whatever is in them
_SIGN = 128  # of INT8 codes, which are stored as codes + 128
_NIBBLE_ORDER = (0, 2, 1, 3)  # of each four inputs: two of a pair are 16 bits apart


def are_in_blocks(device: torch.device) -> bool:
    """Whether tensors there have an arrangement of this module."""
    return device.type == "cpu" and not ops.has_kernels(device) and block_kernels() is not None


def has_whole_blocks(num_inputs: int, groups: Groups) -> bool:
    """Whether these inputs are whole blocks of one scale each, in their own order."""
    if num_inputs % _GROUP or groups.index is not None:
        return False
    size, offset = groups.size, groups.offset
    return offset + num_inputs <= size or (size % _GROUP == 0 and offset % _GROUP == 0)


class BlockCodes(Codes):
    """rows: [num_outputs, bytes] uint8, contiguous, arranged; of a row there may be more than its codes."""

    def __init__(self, rows: torch.Tensor, bits: int, num_inputs: int, number: str = "unsigned") -> None:
        """number: "unsigned", "int8" or "fp8"."""
        self.rows, self.bits, self.number = rows, bits, number
        self.shape = (len(rows), num_inputs)

    @property
    def kind(self) -> str:
        """Of the kernels' blocks."""
        return "NIBBLES" if self.bits == 4 else "E4M3" if self.number == "fp8" else "BYTES"

    def numbers(self, first: int, end: int) -> torch.Tensor:
        codes = self.restored(first, end)[:, : self.shape[1] * self.bits // 8]
        if self.bits == 4:
            return from_nibbles(codes).float()
        if self.number == "fp8":
            return fp8_numbers(codes.view(torch.float8_e4m3fn))
        return codes.float() - (_SIGN if self.number == "int8" else 0)

    def restored(self, first: int, end: int) -> torch.Tensor:
        """Rows `first` to `end` that are not interleaved: [n, bytes]."""
        begin = first // LANES * LANES  # of whole runs
        rows = self.rows[begin : -(-end // LANES) * LANES].clone()
        _kernels().interleave(_UNITS, rows, is_restored=True)
        return rows[first - begin : end - begin]


def from_nibbles(rows: torch.Tensor) -> torch.Tensor:
    """[n, inputs / 2] uint8, blocks of NIBBLES that are not interleaved -> codes [n, inputs] uint8."""
    four = rows.reshape(len(rows), -1, 4, 4)[..., _NIBBLE_ORDER]
    return torch.stack((four & 15, four >> 4), 2).flatten(1)


def _kernels() -> BlockKernels:
    kernels = block_kernels()
    assert kernels is not None
    return kernels


def _gathered(places: CodePlaces, bits: int) -> torch.Tensor:
    """Blocks that are not interleaved: [num_outputs, bytes] uint8."""
    rows = torch.empty(len(places.out_at), len(places.in_at) * bits // 8, dtype=torch.uint8)
    _kernels().gather(places, bits, rows)
    return rows


class _InBlocks(Arrangement):
    def is_used_on(self, device: torch.device) -> bool:
        return are_in_blocks(device)


@dataclass(frozen=True, slots=True)
class RowBlocks(_InBlocks):
    """Of [num_outputs, bytes] in any dtype, an output's codes first, in the order of the inputs."""

    bits: int
    num_inputs: int
    number: str = "unsigned"

    def codes(self, tensor: torch.Tensor) -> BlockCodes:
        """The memory of an arranged tensor."""
        return BlockCodes(tensor.view(torch.uint8), self.bits, self.num_inputs, self.number)

    def arrange(self, tensor: torch.Tensor) -> None:
        rows, codes = self._rows(tensor)
        if self.bits == 4:
            codes.copy_(_gathered(WordCodes(codes.clone(), 4, self.num_inputs).places(), 4))
        if self.number == "int8":
            codes.bitwise_xor_(_SIGN)
        _kernels().interleave(_UNITS, rows)

    def restore(self, tensor: torch.Tensor) -> None:
        rows, codes = self._rows(tensor)
        _kernels().interleave(_UNITS, rows, is_restored=True)
        if self.bits == 4:
            numbers = from_nibbles(codes)
            codes.copy_(numbers[:, ::2] | numbers[:, 1::2] << 4)
        if self.number == "int8":
            codes.bitwise_xor_(_SIGN)

    def _rows(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = tensor.view(torch.uint8)
        return rows, rows[:, : self.num_inputs * self.bits // 8]


@dataclass(frozen=True, slots=True)
class ColumnBlocks(_InBlocks):
    """Of [inputs, outputs] in words: the outputs become rows."""

    columns: ColumnsArrangement

    def codes(self, tensor: torch.Tensor) -> BlockCodes:
        """The memory of an arranged tensor."""
        return BlockCodes(self._rows(tensor), self.columns.bits, self.columns.num_inputs)

    def arrange(self, tensor: torch.Tensor) -> None:
        rows = self._rows(tensor)
        rows.copy_(_gathered(self.columns.places(tensor.clone()), self.columns.bits))
        _kernels().interleave(_UNITS, rows)

    def restore(self, tensor: torch.Tensor) -> None:
        rows = self._rows(tensor)
        _kernels().interleave(_UNITS, rows, is_restored=True)
        numbers = from_nibbles(rows) if self.columns.bits == 4 else rows.clone()
        tensor.copy_(self.columns.words(numbers, tensor))

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.columns.rows(tensor).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class ForDevice(Arrangement):
    """One order for the kernels of a GPU, another one for those of a CPU; None: that of the checkpoint."""

    of_gpu: Arrangement | None
    of_cpu: Arrangement | None

    def is_used_on(self, device: torch.device) -> bool:
        used = self.of_gpu if ops.has_kernels(device) else self.of_cpu
        return used is not None and used.is_used_on(device)

    def arrange(self, tensor: torch.Tensor) -> None:
        if (used := self._used(tensor)) is not None:
            used.arrange(tensor)

    def restore(self, tensor: torch.Tensor) -> None:
        if (used := self._used(tensor)) is not None:
            used.restore(tensor)

    def _used(self, tensor: torch.Tensor) -> Arrangement | None:
        return self.of_gpu if ops.has_kernels(tensor.device) else self.of_cpu
