"""The matrices of experts as one, for the kernels of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ringcore.model_executor.linear_schemes.codes import Codes, QuadCodes, WordCodes
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix
from ringcore.model_executor.weight import Derived

__all__ = ["joined"]


def joined(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Of the outputs of all, one after the other. Their codes are rows that follow one another in memory, and stay
    there; scales and zeros, whose outputs may be columns, are copied."""
    first, derived = matrices[0], Derived()

    def scales() -> torch.Tensor:
        for one in matrices:
            one.derived.refresh()
        return torch.cat([one.scales for one in matrices])

    def zeros() -> torch.Tensor:
        return torch.cat([one.zeros for one in matrices if one.zeros is not None])

    codes: Codes
    match first.codes:
        case QuadCodes(run=run):
            codes = QuadCodes(_following(first.codes.words, len(matrices)), run, first.num_inputs)
        case WordCodes(bits=bits):
            codes = WordCodes(_following(first.codes.words, len(matrices)), bits, first.num_inputs)
        case _:
            raise AssertionError(first.codes)
    all_scales = derived.make(scales)
    all_zeros = None if first.zeros is None else derived.make(zeros)
    return replace(first, codes=codes, scales=all_scales, zeros=all_zeros, derived=derived)


def _following(rows: torch.Tensor, num_matrices: int) -> torch.Tensor:
    """rows: of the first matrix -> those of all."""
    assert rows.is_contiguous()
    return rows.as_strided((num_matrices * len(rows), rows.shape[1]), rows.stride())
