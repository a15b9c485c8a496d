"""Products whose inputs are rounded to 8 bits first, as a quantized checkpoint asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from ringcore.attention.context import TokenContext
from ringcore.checkpoint.quantization import InputFormat
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.scaled_product import ScaledProduct
from ringcore.model_executor.linear_schemes.shard import LinearShard, Maxima

__all__ = ["InputRounding", "RoundedInputs"]

_LARGEST = {"fp8": 448.0, "int8": 127.0}
_LEAST_SCALE = 1e-12  # of rows of zeros


@dataclass(frozen=True, slots=True)
class InputRounding:
    """offset: of a rank's first input in its group. over_ranks: see `LinearShard.max_over_ranks`. scale: [1], the
    checkpoint's, for "tensor".

    A group that two ranks share has a scale on each.
    """

    format: InputFormat
    offset: int = 0
    over_ranks: Maxima | None = None
    scale: torch.Tensor | None = None

    @classmethod
    def of(cls, form: InputFormat, shard: LinearShard, scale: torch.Tensor | None) -> Self:
        return cls(form, shard.inputs.start % (form.group or 1), shard.max_over_ranks, scale)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, in] -> (codes [n, in] as float32 numbers, the scales that they are multiplied by: [n, 1], [n, in] of
        groups, or [1]).

        FP8 codes are rounded to the nearest, ties to even, and clamped to 448; INT8 codes to 127.
        """
        largest, rows = _LARGEST[self.format.number], x.float()
        scales = self._scales(rows, largest)
        codes = (rows / scales).clamp_(-largest, largest)
        return (codes.to(torch.float8_e4m3fn).float() if self.format.number == "fp8" else codes.round_()), scales

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] -> the numbers that the codes mean, of its dtype."""
        codes, scales = self(x)
        return (codes * scales).to(x.dtype)

    def _scales(self, rows: torch.Tensor, largest: float) -> torch.Tensor:
        match self.format.scale:
            case "token":
                maxima = rows.abs().amax(-1, keepdim=True)
                maxima = maxima if self.over_ranks is None else self.over_ranks(maxima)
                return (maxima / largest).clamp_(min=_LEAST_SCALE)
            case "group":
                group, num_inputs = self.format.group, rows.shape[1]
                padding = self.offset, -(self.offset + num_inputs) % group
                grouped = torch.nn.functional.pad(rows.abs(), padding)
                maxima = grouped.view(len(rows), -1, group).amax(-1)
                scales = (maxima / largest).clamp_(min=_LEAST_SCALE).repeat_interleave(group, -1)
                return scales[:, self.offset : self.offset + num_inputs]
            case "tensor":
                assert self.scale is not None
                return self.scale


class RoundedInputs(Product):
    """Where a row has one scale, the inner product is of its codes, which any float dtype holds exactly."""

    def __init__(
        self,
        inner: Product,
        rounding: InputRounding,
        bias: torch.Tensor | None,
        scaled: ScaledProduct | None = None,
    ) -> None:
        """inner: without a bias. scaled: what multiplies the codes of many rows, where there is one."""
        self._inner, self._rounding, self._bias, self._scaled = inner, rounding, bias, scaled

    def batch_invariant(self) -> RoundedInputs:
        """See `KernelProduct.batch_invariant`, of a product by kernels. The rounding of a row is its own."""
        assert isinstance(self._inner, KernelProduct)
        return RoundedInputs(self._inner.batch_invariant(), self._rounding, self._bias)

    def __call__(self, x: torch.Tensor, tokens: TokenContext, out: torch.Tensor | None = None) -> torch.Tensor:
        codes, scales = self._rounding(x)
        if self._rounding.format.scale == "group":
            product = self._inner((codes * scales).to(x.dtype), tokens)
        elif self._scaled is not None and len(x) >= self._scaled.MIN_ROWS:
            product = self._scaled(codes, scales, x.dtype)
        else:
            product = (self._inner(codes.to(x.dtype), tokens).float() * scales).to(x.dtype)
        if self._bias is not None:
            product = product + self._bias
        return product if out is None else out.copy_(product)

    def refresh(self) -> None:
        self._inner.refresh()
