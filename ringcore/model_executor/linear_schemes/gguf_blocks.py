"""Matrices in the blocks of a GGUF file, and their expansion in plain torch: the same float32 numbers, to the last bit,
as the package `gguf` computes.

A block is of consecutive inputs of one output. `d` is its scale, `m` its smallest number, both float16; q are codes.
The K types have 256 numbers in a block, whose groups of 16 or 32 have scales and minima of their own, in few bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ringcore.checkpoint.quantization import GgufFormat
from ringcore.model_executor.weight import Derived

__all__ = ["GgufMatrix", "round_by_block"]

_ROUNDED = 32  # inputs that share a scale
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class GgufMatrix:
    """rows: [num_outputs, bytes of a row] uint8, as in the file."""

    def __init__(self, rows: torch.Tensor, form: GgufFormat) -> None:
        self._rows = rows
        self._block_numbers, self._block_bytes = form.block
        self._expand = _EXPAND[form.kind]
        self.derived = Derived()  # nothing is

    @property
    def num_outputs(self) -> int:
        return len(self._rows)

    @property
    def num_inputs(self) -> int:
        return self._rows.shape[1] // self._block_bytes * self._block_numbers

    def expanded(self, first: int = 0, end: int | None = None) -> torch.Tensor:
        """Of outputs `first` to `end`: [n, num_inputs] float32."""
        rows = self._rows[first:end]
        return self._expand(rows.view(-1, self._block_bytes)).view(len(rows), self.num_inputs)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """index: [n] int64 -> these outputs: [n, num_inputs] float32."""
        blocks = self._rows.index_select(0, index).view(-1, self._block_bytes)
        return self._expand(blocks).view(len(index), self.num_inputs)


def round_by_block(x: torch.Tensor) -> torch.Tensor:
    """x: [n, inputs], of whole blocks of 32 -> each to the nearest of 255 equidistant numbers, the largest of its block
    and 0 among them."""
    blocks = x.float().view(len(x), -1, _ROUNDED)
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = largest.new_tensor(127.0) / largest  # a number divided by a tensor is rounded twice
    codes = (blocks * torch.where(largest > 0, inverse, 0)).round_()
    return codes.mul_(largest / 127).view(x.shape).to(x.dtype)


# Each below: blocks [n, bytes] uint8 -> [n, ...] float32, the numbers of a block in order.


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """d, 16 bytes of two q: d * (q - 8)."""
    return _nibbles(blocks[:, 2:]).float().sub_(8).mul_(_halves(blocks[:, :2]))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """d, m, 16 bytes of two q: d * q + m."""
    return _nibbles(blocks[:, 4:]).float().mul_(_halves(blocks[:, :2])).add_(_halves(blocks[:, 2:4]))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """d, 4 bytes of the fifth bits, 16 bytes of two q: d * (q - 16)."""
    codes = _with_fifth_bits(blocks[:, 6:], blocks[:, 2:6])
    return codes.float().sub_(16).mul_(_halves(blocks[:, :2]))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """d, m, 4 bytes of the fifth bits, 16 bytes of two q: d * q + m."""
    codes = _with_fifth_bits(blocks[:, 8:], blocks[:, 4:8])
    return codes.float().mul_(_halves(blocks[:, :2])).add_(_halves(blocks[:, 2:4]))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """d, 32 q of 8 bits: d * q."""
    return blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks[:, :2]))


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    """d, 16 bytes of two q: d * the q-th number of a table."""
    table = torch.tensor(_IQ4_NL, dtype=torch.float32, device=blocks.device)
    codes = _nibbles(blocks[:, 2:])
    return table[codes.flatten().int()].view(codes.shape).mul_(_halves(blocks[:, :2]))


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """d, dmin, 12 bytes of scales and minima, 4 times 32 bytes of two q: (d * scale) * q - (dmin * minimum)."""
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return _scaled_with_minima(codes, blocks)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """As Q4_K, with 32 bytes of fifth bits before q: bit i of byte j belongs to number j of group i."""
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    fifth = (blocks[:, 16:48].unsqueeze(1) >> shifts).bitwise_and_(1)
    return _scaled_with_minima(codes | fifth << 4, blocks)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """2 times 64 bytes of the lower 4 bits of two q, 2 times 32 bytes of the upper 2 bits of four, 16 scales of 8 bits,
    d: (d * scale) * (q - 32)."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts).bitwise_and_(3)
    scales = blocks[:, 192:208].view(torch.int8).float().mul_(_halves(blocks[:, 208:]))
    return (low | high << 4).view(-1, 16, 16).float().sub_(32).mul_(scales.unsqueeze(-1))


def _scaled_with_minima(codes: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """codes: [n, 8, 32]. Of the 12 bytes from byte 4, the first four have the scales of groups 0 to 3 in 6 bits, the
    next four their minima, and the last four the lower 4 bits of both for groups 4 to 7, whose upper 2 bits are those
    left over before."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), 1).float().mul_(_halves(blocks[:, :2]))
    minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), 1).float().mul_(_halves(blocks[:, 2:4]))
    return codes.float().mul_(scales.unsqueeze(-1)).sub_(minima.unsqueeze(-1))


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., 2 * n]: the lower ones, then the upper ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _with_fifth_bits(packed: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """packed: [n, 16], bits: [n, 4], from the lowest -> [n, 32] codes of 5 bits."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    fifth = (bits.unsqueeze(-1) >> shifts).bitwise_and_(1).flatten(1)
    return _nibbles(packed) | fifth << 4


def _halves(two_bytes: torch.Tensor) -> torch.Tensor:
    """[n, 2] -> [n, 1] float32."""
    return two_bytes.contiguous().view(torch.float16).float()


_EXPAND: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
}
