"""The router of a mixture bound to a GPU: of native layers and of transformers'."""

from __future__ import annotations

from functools import partial

import torch

from ringcore.kernels.expert_matrices import RouterForm, Routing
from ringcore.model_executor.residual import NormedRows

__all__ = ["BoundRouter"]


class BoundRouter:
    def __init__(
        self,
        weight: torch.Tensor,
        form: RouterForm,
        bias: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
    ) -> None:
        """As `kernels.router.route` takes them. The tensors are used as they are, so they may get new contents."""
        from ringcore.kernels import router

        self._weight = weight
        counters = router.new_router_counters(weight.device)
        self._route = partial(
            router.route, weight=weight, form=form, counters=counters, bias=bias, correction=correction
        )
        self._takes_norm = router.takes_norm

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return self._weight.dtype

    def __call__(self, x: NormedRows) -> Routing:
        """x: [n, hidden_size]. The norm of few tokens is a prologue, which leaves the rows that their experts read."""
        if not self._takes_norm(len(x), self._weight):
            return self._route(x.rows)
        rows, norm = x.stream
        normed = x.to_fill(self.dtype) if norm is not None and len(x) > 1 else None
        return self._route(rows, norm=norm, normed=normed)
