"""The product of a rank's share of inputs that begins or ends within a block, of which another rank has the rest."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from ringcore.attention.context import TokenContext
from ringcore.kernels.partials import Partials
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.residual import Residual

__all__ = ["padded_product"]


def padded_product(inner: Product, padding: tuple[int, int]) -> Product:
    """inner: of so many inputs more, before and after the share, which are 0."""
    return _Padded(inner, padding) if any(padding) else inner


class _Padded(Product):
    def __init__(self, inner: Product, padding: tuple[int, int]) -> None:
        self._inner, self._padding = inner, padding

    def __call__(self, x: torch.Tensor, tokens: TokenContext, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._inner(F.pad(x, self._padding), tokens, out)

    def add_to(self, hidden: Residual, x: torch.Tensor, tokens: TokenContext) -> None:
        self._inner.add_to(hidden, F.pad(x, self._padding), tokens)

    def unreduced(self, x: torch.Tensor, tokens: TokenContext) -> Partials:
        return self._inner.unreduced(F.pad(x, self._padding), tokens)

    def partial(self, x: torch.Tensor, tokens: TokenContext) -> torch.Tensor:
        return self._inner.partial(F.pad(x, self._padding), tokens)

    def refresh(self) -> None:
        self._inner.refresh()
