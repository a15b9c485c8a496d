"""Layer normalisation."""

from __future__ import annotations

import torch

from ringcore.kernels.partials import Partials
from ringcore.model_executor import ops
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import Derived, Tensors, Uniform, Weight, WeightedLayer, WeightPart

__all__ = ["LayerNorm"]

_WEIGHT, _BIAS = Uniform(0.8, 1.2), Uniform(-0.05, 0.05)


class LayerNorm(WeightedLayer):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias of rows of `size`, computed in float32; the result is of
    `dtype`, rounded once. Replicated on every rank.

    Towards a product it has no gain, so that none takes it for its prologue.
    """

    gain = None

    def __init__(
        self,
        name: str,
        tensors: tuple[str | None, str | None],
        size: int,
        eps: float,
        dtype: torch.dtype,
        *,
        plus_one: bool = False,
    ) -> None:
        """tensors: the names in the checkpoint of weight and bias; None: it has none. plus_one: multiplies by
        1 + weight."""
        self.eps = eps
        self._size, self._dtype, self._plus_one = size, dtype, plus_one
        self._weight, self._bias = (
            None if stored is None else _vector(f"{name}.{leaf}", stored, size, dtype, init)
            for leaf, stored, init in zip(("weight", "bias"), tensors, (_WEIGHT, _BIAS), strict=True)
        )
        self._derived = Derived()
        self._factor: torch.Tensor | None = None  # [size] float32, as the next
        self._shift: torch.Tensor | None = None

    def weights(self) -> list[Weight]:
        return [weight for weight in (self._weight, self._bias) if weight is not None]

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        derived = self._derived = Derived()
        self._factor = self._shift = None
        if self._weight is not None:
            weight = tensors.pop(self._weight.name)
            self._factor = derived.make(lambda: weight.float() + float(self._plus_one))
        if self._bias is not None:
            bias = tensors.pop(self._bias.name)
            self._shift = derived.make(bias.float)

    def refresh(self) -> None:
        self._derived.refresh()

    def __call__(self, x: torch.Tensor, partials: Partials | None = None) -> torch.Tensor:
        """x: [n, size] -> a new tensor [n, size] of the layer's dtype. partials: as those of `RMSNorm`."""
        if partials is not None:
            x = ops.add_partials(x, partials)
        normed = torch.nn.functional.layer_norm(x.float(), (self._size,), self._factor, self._shift, self.eps)
        return normed.to(self._dtype)

    def add_to(self, hidden: Residual, partials: Partials) -> None:
        """hidden [n, size] += the norm of the partials' sum [n, size]."""
        hidden.rows.add_(self(partials.total()))


def _vector(name: str, checkpoint_name: str, size: int, dtype: torch.dtype, init: Uniform) -> Weight:
    return Weight(name, (size,), dtype, (WeightPart(checkpoint_name, (size,), 0, 0, size),), init)
