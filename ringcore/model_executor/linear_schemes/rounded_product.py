"""FP8 weights times rows that are rounded to FP8, on a GPU: one row by one kernel, more after a kernel that rounds
them, many by cuBLAS."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ringcore.attention.context import TokenContext
from ringcore.checkpoint.family import Activation
from ringcore.kernels.linears.packed_weight import BLOCK, Fp8Blocks, stored_as
from ringcore.kernels.partials import Partials, RowNorm
from ringcore.model_executor.linear_schemes.kernel_product import Choose
from ringcore.model_executor.linear_schemes.product import Gate, Product
from ringcore.model_executor.linear_schemes.scaled_product import ScaledProduct
from ringcore.model_executor.residual import Norm, Residual
from ringcore.model_executor.weight import Derived

if TYPE_CHECKING:
    from ringcore.kernels.linears.packed_weight import PackedWeight
    from ringcore.kernels.linears.skinny_tiles import Config
    from ringcore.kernels.linears.skinny_times import Numbers

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
        from ringcore.kernels.linears import round_rows, skinny_linear, skinny_tiles, tma_configs

        self._weight, self._bias, self._derived = weight, bias, derived
        self._row_group, self._scaled = row_group, scaled
        self._min_scaled = None if scaled is None else scaled.MIN_ROWS
        self._counters = skinny_linear.new_split_k_counters(weight)
        self._choose: Choose = tma_configs.rounded_chooser(weight, row_group)
        self._in_kernel = skinny_tiles.PackedFmaConfig
        self._round = round_rows.round_rows
        self._skinny = skinny_linear.skinny_linear
        self._is_invariant = False

    @property
    def fp8_blocks(self) -> tuple[Fp8Blocks, torch.Tensor | None] | None:
        """The weight and the bias, where any kernel may multiply them by rows that it rounds in blocks; None: scales
        are others, or the product is batch-invariant."""
        blocks = self._weight.fp8_blocks
        if blocks is None or self._row_group != BLOCK or self._is_invariant:
            return None
        return blocks, self._bias

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

    def batch_invariant(self) -> RoundedProduct:
        """See `KernelProduct.batch_invariant`."""
        from ringcore.kernels.linears.invariant_tiles import InvariantTiles

        made, tiles = copy.copy(self), InvariantTiles(self._weight, rounds_rows=True)

        def choose(num_outputs: int, num_inputs: int, num_rows: int, **options: bool) -> Config | None:
            return tiles.choose(num_rows) if num_rows else None

        made._choose, made._scaled, made._min_scaled, made._is_invariant = choose, None, None, True
        return made

    def __call__(self, x: torch.Tensor, tokens: TokenContext, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._multiply(x, out=out)

    def after_norm(self, norm: Norm, hidden: Residual, tokens: TokenContext) -> torch.Tensor:
        return self._multiply(hidden, norm)

    def gated_after_norm(self, norm: Norm, hidden: Residual, gate: Gate, tokens: TokenContext) -> torch.Tensor:
        if self._is_many(len(hidden)):
            return gate(self.after_norm(norm, hidden, tokens))
        return self._multiply(hidden, norm, gate.activation)

    def add_to(self, hidden: Residual, x: torch.Tensor, tokens: TokenContext) -> None:
        rows = hidden.rows
        if not self._is_many(len(x)):
            defer = hidden.defer_add if rows.dtype == torch.float32 else None
            self._multiply(x, out=rows, adds=True, defer=defer)
        elif rows.dtype == torch.float32:
            hidden.defer_add(Partials(self._multiply(x)[None]))
        else:
            rows.add_(self._multiply(x))

    def unreduced(self, x: torch.Tensor, tokens: TokenContext) -> Partials:
        deferred: list[Partials] = []
        product = self._multiply(x, defer=deferred.append)
        return deferred[0] if deferred else Partials(product[None])

    def partial(self, x: torch.Tensor, tokens: TokenContext) -> torch.Tensor:
        is_many = self._is_many(len(x))
        out = None if is_many else x.new_empty(len(x), len(self._weight), dtype=torch.float32)
        return self._multiply(x, out=out)

    def refresh(self) -> None:
        self._derived.refresh()

    def _is_many(self, num_rows: int) -> bool:
        return self._min_scaled is not None and num_rows >= self._min_scaled

    def _multiply(
        self,
        x: torch.Tensor | Residual,
        norm: Norm | None = None,
        activation: Activation | None = None,
        *,
        out: torch.Tensor | None = None,
        adds: bool = False,
        defer: Callable[[Partials], None] | None = None,
    ) -> torch.Tensor:
        """adds: to `out`. x: the residual stream, and that alone, is normalised first."""
        num_weights, num_inputs = self._weight.shape
        group, dtype = self._row_group, self._weight.dtype
        if self._is_many(len(x)):
            product = self._by_cublas(x, norm)
            return product if out is None else out.copy_(product)
        num_outputs = num_weights if activation is None else num_weights // 2
        by_fma = len(x) == 1 and self._weight.has_chunks
        config = self._choose(num_outputs, num_inputs, len(x), is_gated=activation is not None, by_fma=by_fma)
        in_kernel = isinstance(config, self._in_kernel)
        rows, partials, row_norm = self._before(x, norm, adds=in_kernel or config is None)
        if config is None:
            return rows.new_empty(0, num_outputs, dtype=dtype) if out is None else out
        return self._skinny(
            rows if in_kernel else self._round(rows, group, row_norm, dtype, partials=partials),
            self._weight,
            config,
            norm=row_norm if in_kernel else None,
            row_group=group if in_kernel else None,
            bias=self._bias,
            activation=activation,
            add_to=out if adds else None,
            out=None if adds else out,
            counters=self._counters,
            defer=defer,
        )

    def _before(
        self, x: torch.Tensor | Residual, norm: Norm | None, *, adds: bool
    ) -> tuple[torch.Tensor, Partials | None, RowNorm | None]:
        """Rows, and what remains to be computed before the rounding: a deferred add, unless it `adds`, and the norm."""
        if not isinstance(x, Residual):
            return x, None, None
        assert norm is not None
        if norm.gain is None:
            return x.normed(norm), None, None
        rows, partials = (x.rows, None) if adds or x.adds_norm else x.take()
        return rows, partials, RowNorm(norm.gain, norm.eps)

    def _by_cublas(self, x: torch.Tensor | Residual, norm: Norm | None) -> torch.Tensor:
        assert self._scaled is not None
        dtype, has_blocks = self._weight.dtype, self._scaled.has_blocks
        padding = -len(x) % self._scaled.ROWS if has_blocks else 0
        rows, partials, row_norm = self._before(x, norm, adds=padding > 0)
        if padding:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
        rounded = self._round(rows, self._row_group, row_norm, dtype, partials=partials, by_group=has_blocks)
        product = self._scaled(rounded.codes, rounded.scales, dtype)[: len(x)]
        return product if self._bias is None else product.add_(self._bias)
