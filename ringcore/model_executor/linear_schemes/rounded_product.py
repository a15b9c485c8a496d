"""FP8 weights times rows that are rounded to FP8, on a GPU: one row by one kernel, more after a kernel that rounds
them, many by cuBLAS."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ringcore.attention.context import TokenContext
from ringcore.checkpoint.family import Activation
from ringcore.kernels.packed_weight import stored_as
from ringcore.model_executor.linear_schemes.kernel_product import Choose
from ringcore.model_executor.linear_schemes.product import Gate, Product
from ringcore.model_executor.linear_schemes.scaled_product import ScaledProduct
from ringcore.model_executor.residual import Norm, Residual
from ringcore.model_executor.weight import Derived

if TYPE_CHECKING:
    from ringcore.kernels.packed_weight import PackedWeight
    from ringcore.kernels.round_rows import RowNorm
    from ringcore.kernels.skinny_times import Numbers

__all__ = ["RoundedProduct"]


class RoundedProduct(Product):
    """A norm before it is computed in float32 with the rounding, and not rounded to 16 bits between them."""

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        row_group: int,
        scaled: ScaledProduct | None,
        derived: Derived,
    ) -> None:
        """row_group: inputs that share a scale of a row. scaled: of many rows, where there is one."""
        from ringcore.kernels import round_rows, skinny_configs, skinny_linear, skinny_tiles

        self._weight, self._bias, self._derived = weight, bias, derived
        self._row_group, self._scaled = row_group, scaled
        self._min_scaled = None if scaled is None else scaled.MIN_ROWS
        self._counters = skinny_linear.new_split_k_counters(weight)
        self._choose: Choose = skinny_configs.choose_rounded
        self._in_kernel = skinny_tiles.PackedFmaConfig
        self._round, self._row_norm = round_rows.round_rows, round_rows.RowNorm
        self._skinny = skinny_linear.skinny_linear

    @property
    def stored_as(self) -> tuple[str, str, Numbers]:
        """See `packed_weight.stored_as`."""
        _, storage, numbers = stored_as(self._weight)
        return "rounded", f"{storage} rounded in groups of {self._row_group}", numbers

    def with_choice(self, around: Callable[[Choose], Choose]) -> RoundedProduct:
        """The same product with another choice of tiles."""
        made = copy.copy(self)
        made._choose = around(self._choose)
        return made

    def __call__(self, x: torch.Tensor, tokens: TokenContext, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._multiply(x, out=out)

    def after_norm(self, norm: Norm, hidden: Residual, tokens: TokenContext) -> torch.Tensor:
        return self._multiply(*self._before(norm, hidden))

    def gated_after_norm(self, norm: Norm, hidden: Residual, gate: Gate, tokens: TokenContext) -> torch.Tensor:
        if self._is_many(len(hidden)):
            return gate(self.after_norm(norm, hidden, tokens))
        return self._multiply(*self._before(norm, hidden), gate.activation)

    def add_to(self, hidden: Residual, x: torch.Tensor, tokens: TokenContext) -> None:
        if self._is_many(len(x)):
            hidden.rows.add_(self._multiply(x))
        else:
            self._multiply(x, out=hidden.rows, adds=True)

    def partial(self, x: torch.Tensor, tokens: TokenContext) -> torch.Tensor:
        is_many = self._is_many(len(x))
        out = None if is_many else x.new_empty(len(x), len(self._weight), dtype=torch.float32)
        return self._multiply(x, out=out)

    def refresh(self) -> None:
        self._derived.refresh()

    def _is_many(self, num_rows: int) -> bool:
        return self._min_scaled is not None and num_rows >= self._min_scaled

    def _before(self, norm: Norm, hidden: Residual) -> tuple[torch.Tensor, RowNorm | None]:
        """The rows, and the norm that remains to be computed with the rounding."""
        if norm.gain is None:
            return hidden.normed(norm), None
        return hidden.rows, self._row_norm(norm.gain, norm.eps)

    def _multiply(
        self,
        x: torch.Tensor,
        norm: RowNorm | None = None,
        activation: Activation | None = None,
        *,
        out: torch.Tensor | None = None,
        adds: bool = False,
    ) -> torch.Tensor:
        """adds: to `out`."""
        num_weights, num_inputs = self._weight.shape
        group, dtype = self._row_group, self._weight.dtype
        if self._is_many(len(x)):
            product = self._by_cublas(x, norm)
            return product if out is None else out.copy_(product)
        num_outputs = num_weights if activation is None else num_weights // 2
        by_fma = len(x) == 1 and self._weight.has_chunks
        config = self._choose(num_outputs, num_inputs, len(x), is_gated=activation is not None, by_fma=by_fma)
        if config is None:
            return x.new_empty(0, num_outputs, dtype=dtype) if out is None else out
        in_kernel = isinstance(config, self._in_kernel)
        return self._skinny(
            x if in_kernel else self._round(x, group, norm, dtype),
            self._weight,
            config,
            norm=norm if in_kernel else None,
            row_group=group if in_kernel else None,
            bias=self._bias,
            activation=activation,
            add_to=out if adds else None,
            out=None if adds else out,
            counters=self._counters,
        )

    def _by_cublas(self, x: torch.Tensor, norm: RowNorm | None) -> torch.Tensor:
        assert self._scaled is not None
        padding = -len(x) % self._scaled.ROWS if self._scaled.has_blocks else 0
        rows = torch.nn.functional.pad(x, (0, 0, 0, padding)) if padding else x
        rounded = self._round(rows, self._row_group, norm, self._weight.dtype, by_group=self._scaled.has_blocks)
        product = self._scaled(rounded.codes, rounded.scales, self._weight.dtype)[: len(x)]
        return product if self._bias is None else product.add_(self._bias)
