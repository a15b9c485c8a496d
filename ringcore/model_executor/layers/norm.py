"""Root-mean-square normalisation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from ringcore.model_executor import ops
from ringcore.model_executor.weight import Tensors, Weight, WeightPart

__all__ = ["HeadNorm", "RMSNorm", "bind_rms_norm"]


def bind_rms_norm(
    weight: torch.Tensor, eps: float, *, plus_one: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`ops.rms_norm` with this weight, in the fastest form that works for its shape, dtype and device.

    plus_one: by 1 + weight, as Gemma has it, and rounded once: x and the sum are taken in float32 whatever the dtype.
    """
    if plus_one:
        normalise = bind_rms_norm(1 + weight.float(), eps)
        return normalise if weight.dtype == torch.float32 else functools.partial(_in_float32, normalise)
    if weight.dtype == torch.float32 and weight.device.type == "cpu":
        gain, floor = ops.rms_norm_gain(weight, eps)
        return functools.partial(ops.rms_norm_by_gain, gain=gain, floor=floor)
    return functools.partial(ops.rms_norm, weight=weight, eps=eps)


def _in_float32(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return function(x.float()).to(x.dtype)


def _norm_weight(name: str, checkpoint_name: str, size: int, dtype: torch.dtype) -> Weight:
    part = WeightPart(f"{checkpoint_name}.weight", (size,), 0, 0, size)
    return Weight(f"{name}.weight", (size,), dtype, (part,), "norm")


class RMSNorm:
    """Normalises rows of `size`, of the residual stream say, which is float32 also where `dtype` is not; the result is
    of `dtype`, rounded once. Whole on every rank. `plus_one`: see `bind_rms_norm`."""

    def __init__(
        self, name: str, checkpoint_name: str, size: int, eps: float, dtype: torch.dtype, *, plus_one: bool = False
    ) -> None:
        self._weight = _norm_weight(name, checkpoint_name, size, dtype)
        self.eps = eps
        self._plus_one = plus_one
        self._normalise: Callable[[torch.Tensor], torch.Tensor]
        self._has_kernel: bool
        self.gain: torch.Tensor  # [size]: what rows are multiplied by

    def weights(self) -> list[Weight]:
        return [self._weight]

    def bind(self, tensors: Tensors) -> None:
        """Takes its tensor out of the dict."""
        weight = tensors.pop(self._weight.name)
        self.gain = 1 + weight.float() if self._plus_one else weight
        self._has_kernel = ops.has_kernels(weight.device)
        if self._has_kernel:
            from ringcore.kernels.rms_norm import rms_norm

            self._normalise = functools.partial(rms_norm, weight=self.gain, eps=self.eps, dtype=weight.dtype)
        elif weight.dtype == torch.float32:
            self._normalise = bind_rms_norm(weight, self.eps, plus_one=self._plus_one)
        else:
            in_float32 = bind_rms_norm(self.gain.float(), self.eps)
            self._normalise = lambda x: in_float32(x.float()).to(weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, size] -> a new tensor [n, size] of the layer's dtype."""
        return self._normalise(x)

    def add_to(self, hidden: torch.Tensor, x: torch.Tensor) -> None:
        """hidden [n, size] += the norm of x [n, size], in place."""
        if self._has_kernel:
            from ringcore.kernels.rms_norm import rms_norm

            rms_norm(x, self.gain, self.eps, add_to=hidden)
        else:
            hidden.add_(self._normalise(x))


class HeadNorm:
    """Normalises each head of q and k, side by side in one tensor, q and k with a weight of their own.

    `order`: a permutation of the entries of a head, as in `ColumnParallelLinear.output_order`. `plus_one`: see
    `bind_rms_norm`.
    """

    def __init__(
        self,
        name: str,
        checkpoint_names: tuple[str, str],
        num_heads: tuple[int, int],
        head_dim: int,
        eps: float,
        dtype: torch.dtype,
        order: torch.Tensor,
        *,
        plus_one: bool = False,
    ) -> None:
        self._weights = [
            _norm_weight(f"{name}.{which}", checkpoint_name, head_dim, dtype)
            for which, checkpoint_name in zip(("q", "k"), checkpoint_names, strict=True)
        ]
        self._num_heads = num_heads
        self.eps = eps
        self._order = order
        self._plus_one = plus_one
        self._normalise: Callable[[torch.Tensor], torch.Tensor]
        self.gain: torch.Tensor  # [2, head_dim]: what q's and k's heads are multiplied by

    def weights(self) -> Sequence[Weight]:
        return self._weights

    def bind(self, tensors: Tensors) -> None:
        """Takes its tensors out of the dict."""
        rows = [tensors.pop(weight.name) for weight in self._weights]
        rows = [row[self._order.to(row.device)] for row in rows]
        by_head = [row.expand(heads, -1) for row, heads in zip(rows, self._num_heads, strict=True)]
        self._normalise = bind_rms_norm(torch.cat(by_head), self.eps, plus_one=self._plus_one)
        self.gain = 1 + torch.stack(rows).float() if self._plus_one else torch.stack(rows)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, q heads + k heads, head_dim] -> a new tensor of that shape."""
        return self._normalise(x)
