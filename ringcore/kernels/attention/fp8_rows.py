"""Keys and values in FP8: of each head and token e4m3 codes, and one power of 2 that scales them.

A row of n numbers is n codes, then the exponent in a byte, biased by 127: number i is code i times 2^(byte - 127). That
is the smallest power with which no code is above 448, the largest of e4m3. Codes have exponents of their own, so a
scale that is no power of 2 would make them no more exact, and this one rounds nothing when it is multiplied. A row
depends on its numbers alone: not on other tokens, nor on the step that computed it.
"""

from __future__ import annotations

import torch

__all__ = ["from_rows", "largest_number", "rounded", "to_rows"]


def largest_number(dtype: torch.dtype) -> float:
    """To which larger numbers of `dtype` are cut: what they would be rounded up to is infinite there."""
    return 1.875 * 2.0 ** (15 if dtype == torch.float16 else 127)


def to_rows(numbers: torch.Tensor) -> torch.Tensor:
    """[..., n] in a float dtype -> [..., n + 1] uint8. Infinity is `largest_number` of the dtype, and NaN is 0."""
    bound = largest_number(numbers.dtype)
    numbers = torch.nan_to_num(numbers.float()).clamp_(-bound, bound)
    largest = numbers.abs().amax(-1, keepdim=True)
    # Of the largest number's own exponent and mantissa: one more where the mantissa is above 1.75, since 448 is 1.75 *
    # 2^8. In bits, the sum then carries into the exponent.
    exponents = ((largest.view(torch.int32) + 0x1FFFFF) >> 23).sub_(8).clamp_(min=1)
    codes = (numbers * (254 - exponents << 23).view(torch.float32)).to(torch.float8_e4m3fn)
    return torch.cat((codes.view(torch.uint8), exponents.to(torch.uint8)), -1)


def from_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., n + 1] uint8 -> [..., n] in `dtype`; bytes that are 0 are zeros."""
    computed = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32  # which have every power of 2
    codes = rows[..., :-1].view(torch.float8_e4m3fn).to(computed)
    return codes.mul_((rows[..., -1:].to(torch.int32) << 23).view(torch.float32).to(computed)).to(dtype)


def rounded(numbers: torch.Tensor) -> torch.Tensor:
    """What is read where `numbers` were written."""
    return from_rows(to_rows(numbers), numbers.dtype)
