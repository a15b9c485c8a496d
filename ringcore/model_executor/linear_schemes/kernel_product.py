"""The product on a GPU: of 16-bit weights few rows by fused kernels (`skinny_linear`), many rows by cuBLAS; of
quantized weights by kernels that expand them in their tiles, many rows by cuBLAS after a kernel that expands them."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ringcore.attention.context import TokenContext
from ringcore.checkpoint.family import Activation
from ringcore.kernels.linears.packed_weight import stored_as
from ringcore.kernels.partials import Partials, RowNorm
from ringcore.model_executor.linear_schemes.product import Gate, Product
from ringcore.model_executor.residual import Norm, Residual
from ringcore.model_executor.weight import Derived

if TYPE_CHECKING:
    from ringcore.kernels.linears.packed_weight import PackedWeight
    from ringcore.kernels.linears.skinny_tiles import Config
    from ringcore.kernels.linears.skinny_times import Numbers

__all__ = ["Choose", "KernelProduct", "sums_in_float32"]

_log = logging.getLogger(__name__)

# The tiles of a product, by outputs, inputs and rows: None: not by `skinny_linear`.
Choose = Callable[..., "Config | None"]


class KernelProduct(Product):
    """A fused kernel rounds once, at its end."""

    def __init__(
        self,
        weight: torch.Tensor | PackedWeight,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
        derived: Derived | None = None,
    ) -> None:
        """out_dtype: of `__call__`, for a linear without bias; None: the weight's. derived: of a quantized weight."""
        from ringcore.kernels.linears import (
            expand_weight,
            int8_gemv_configs,
            skinny_configs,
            skinny_linear,
            skinny_tiles,
            tma_configs,
        )

        assert bias is None or out_dtype is None
        self.weight = weight.contiguous() if isinstance(weight, torch.Tensor) else weight
        self._derived = derived
        self._bias = bias
        self._out_dtype = out_dtype
        self._counters = skinny_linear.new_split_k_counters(weight)
        self._choose: Choose = tma_configs.chooser(weight) if isinstance(weight, torch.Tensor) else weight.choose
        of_one_row = int8_gemv_configs.int8_gemv_config
        self._int8_gemv = None if isinstance(weight, torch.Tensor) else of_one_row(weight)
        self._choose_split_k = skinny_configs.choose_split_k
        self._defers = True  # splits, to the next norm
        self._is_invariant = False
        self._takes_norm = skinny_tiles.FmaConfig, skinny_tiles.PackedFmaConfig, skinny_tiles.Int8GemvConfig
        self._skinny = skinny_linear.skinny_linear
        self._expand = expand_weight.expand_weight

    @property
    def stored_as(self) -> tuple[str, str, Numbers]:
        """See `packed_weight.stored_as`."""
        return stored_as(self.weight)

    @property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The weight and the bias, where any kernel may multiply them; None: the weight is quantized, or the product
        batch-invariant."""
        return (self.weight, self._bias) if isinstance(self.weight, torch.Tensor) and not self._is_invariant else None

    @property
    def has_int8_gemv(self) -> bool:
        """Whether `use_int8_gemv` may be called."""
        return self._int8_gemv is not None

    def use_int8_gemv(self) -> None:
        """From now on one row is multiplied by `int8_gemv`."""
        choose = self._choose

        def with_int8_gemv(num_outputs: int, num_inputs: int, num_rows: int, **how: bool) -> Config | None:
            return self._int8_gemv if num_rows == 1 else choose(num_outputs, num_inputs, num_rows, **how)

        self._choose = with_int8_gemv

    def with_choice(self, around: Callable[[Choose], Choose]) -> KernelProduct:
        """The same product with another choice of tiles."""
        made = copy.copy(self)
        made._choose = around(self._choose)
        return made

    def batch_invariant(self) -> KernelProduct:
        """The same product by tiles that agree, never by cuBLAS: a row has the same bits in any number of rows."""
        from ringcore.kernels.linears.invariant_tiles import InvariantTiles

        made, tiles = copy.copy(self), InvariantTiles(self.weight)

        def choose(num_outputs: int, num_inputs: int, num_rows: int, *, is_gated: bool = False) -> Config | None:
            return tiles.choose(num_rows) if num_rows else None

        made._choose, made._defers, made._int8_gemv, made._is_invariant = choose, False, None, True
        return made

    def __call__(self, x: torch.Tensor, tokens: TokenContext, out: torch.Tensor | None = None) -> torch.Tensor:
        """out: of the dtype that `__call__` returns."""
        if out is None and self._out_dtype is not None:
            out = x.new_empty(len(x), len(self.weight), dtype=self._out_dtype)
        fused = self._by_kernel(x, out=out)
        return self._by_cublas(x, out) if fused is None else fused

    def after_norm(self, norm: Norm, hidden: Residual, tokens: TokenContext) -> torch.Tensor:
        fused = self._by_kernel(hidden, norm)
        return self._by_cublas(hidden.normed(norm)) if fused is None else fused

    def gated_after_norm(self, norm: Norm, hidden: Residual, gate: Gate, tokens: TokenContext) -> torch.Tensor:
        fused = self._by_kernel(hidden, norm, gate.activation)
        return gate(self._by_cublas(hidden.normed(norm))) if fused is None else fused

    def add_to(self, hidden: Residual, x: torch.Tensor, tokens: TokenContext) -> None:
        rows = hidden.rows
        defer = hidden.defer_add if self._defers and rows.dtype == torch.float32 else None
        if self._by_kernel(x, add_to=rows, defer=defer) is not None:
            return
        if self._bias is not None or rows.dtype != torch.float32 or not sums_in_float32(x.dtype, x.device):
            rows.add_(self._by_cublas(x))
            return
        partials = self._split_k_by_cublas(x)
        if partials is not None:
            hidden.defer_add(partials)
        else:
            torch.addmm(rows, x, self._dense().t(), out_dtype=torch.float32, out=rows)

    def unreduced(self, x: torch.Tensor, tokens: TokenContext) -> Partials:
        deferred: list[Partials] = []
        fused = self._by_kernel(x, defer=deferred.append if self._defers else None)
        if deferred:
            return deferred[0]
        if fused is not None:
            return Partials(fused[None])
        has_sums = self._bias is None and sums_in_float32(x.dtype, x.device)
        partials = self._split_k_by_cublas(x) if has_sums else None
        return Partials(self._by_cublas(x)[None]) if partials is None else partials

    def partial(self, x: torch.Tensor, tokens: TokenContext) -> torch.Tensor:
        out = x.new_empty(len(x), len(self.weight), dtype=torch.float32)
        fused = self._by_kernel(x, out=out)
        return self._by_cublas(x) if fused is None else fused

    def refresh(self) -> None:
        if self._derived is not None:
            self._derived.refresh()

    def _by_kernel(
        self,
        x: torch.Tensor | Residual,
        norm: Norm | None = None,
        activation: Activation | None = None,
        *,
        add_to: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        defer: Callable[[Partials], None] | None = None,
    ) -> torch.Tensor | None:
        """None, and nothing computed, where cuBLAS is faster. x: the residual stream, and that alone, is normalised
        first."""
        num_weights, num_inputs = self.weight.shape
        num_outputs = num_weights if activation is None else num_weights // 2
        config = self._choose(num_outputs, num_inputs, len(x), is_gated=activation is not None)
        if config is None:
            return None
        row_norm = None
        if isinstance(x, Residual):
            assert norm is not None
            if isinstance(config, self._takes_norm) and norm.gain is not None:
                x, row_norm = x.rows, RowNorm(norm.gain, norm.eps)
            else:
                x = x.normed(norm)
        return self._skinny(
            x,
            self.weight,
            config,
            bias=self._bias,
            norm=row_norm,
            activation=activation,
            add_to=add_to,
            out=out,
            counters=self._counters,
            defer=defer,
        )

    def _dense(self) -> torch.Tensor:
        return self.weight if isinstance(self.weight, torch.Tensor) else self._expand(self.weight)

    def _split_k_by_cublas(self, x: torch.Tensor) -> Partials | None:
        """None: not faster than without splits."""
        num_splits = self._choose_split_k(*self.weight.shape, len(x))
        return Partials(_split_k_linear(x, self._dense(), num_splits)) if num_splits > 1 else None

    def _by_cublas(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._out_dtype is not None and x.is_cuda:
            return torch.mm(x, self._dense().t(), out_dtype=self._out_dtype, out=out)
        product = torch.nn.functional.linear(x, self._dense(), self._bias)
        if out is not None:
            return out.copy_(product)
        return product if self._out_dtype is None else product.to(self._out_dtype)


def _split_k_linear(x: torch.Tensor, weight: torch.Tensor, num_splits: int) -> torch.Tensor:
    """x [n, in] times weight [out, in], split over the inputs: partials [num_splits, n, out] float32."""
    size = x.shape[1] // num_splits
    rows = x.view(-1, num_splits, size).transpose(0, 1)
    columns = weight.view(-1, num_splits, size).permute(1, 2, 0)
    return torch.bmm(rows, columns, out_dtype=torch.float32)


@functools.cache
def sums_in_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's cuBLAS multiplies 16-bit inputs to float32, and adds to float32 in place. Tried once per process:
    the operations are recent, and a build without them does the product and the sum separately."""
    if device.type != "cuda":
        return False
    x = torch.ones(8, 16, dtype=dtype, device=device)
    total = torch.ones(8, 8, device=device)
    try:
        torch.addmm(total, x, x.t(), out_dtype=torch.float32, out=total)
        partials = _split_k_linear(x, x, 2)
    except (RuntimeError, TypeError) as error:
        _log.warning(
            "no fused float32 accumulation in cuBLAS, so residual adds are separate kernels, which is slower: %s", error
        )
        return False
    return bool((total == 17).all() and (partials == 8).all())
