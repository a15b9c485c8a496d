"""RMS normalisation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from ringcore.kernels.partials import Partials, RowNorm
from ringcore.model_executor import ops
from ringcore.model_executor.layers.layer_norm import LayerNorm
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import Derived, Tensors, Uniform, Weight, WeightedLayer, WeightPart

__all__ = ["AnyNorm", "HeadNorm", "QKNorm", "RMSNorm", "Unnormed", "bind_rms_norm"]

_DUMMY = Uniform(0.8, 1.2)


def bind_rms_norm(
    weight: torch.Tensor, eps: float, *, plus_one: bool = False, derived: Derived | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`ops.rms_norm` with this weight, in the fastest form for its shape, dtype and device.

    plus_one: multiplies by 1 + weight, as Gemma does, rounded once: x and 1 + weight are float32 whatever the dtype.
    derived: collects what is computed from the weight.
    """
    derived = derived or Derived()
    if plus_one:
        normalise = bind_rms_norm(derived.make(lambda: 1 + weight.float()), eps, derived=derived)
        return normalise if weight.dtype == torch.float32 else functools.partial(_in_float32, normalise)
    if weight.dtype == torch.float32 and weight.device.type == "cpu":
        gain, floor = derived.make(lambda: ops.rms_norm_gain(weight)), ops.rms_norm_floor(weight, eps)
        return functools.partial(ops.rms_norm_by_gain, gain=gain, floor=floor)
    return functools.partial(ops.rms_norm, weight=weight, eps=eps)


def _in_float32(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return function(x.float()).to(x.dtype)


def _norm_weight(
    name: str, checkpoint_name: str, size: int, dtype: torch.dtype, order: tuple[int, ...] | None = None
) -> Weight:
    split = WeightPart(f"{checkpoint_name}.weight", (size,), 0, 0, size, order=order)
    return Weight(f"{name}.weight", (size,), dtype, (split,), _DUMMY)


def _qk_weights(
    name: str,
    checkpoint_names: tuple[str, str],
    sizes: tuple[int, int],
    dtype: torch.dtype,
    order: tuple[int, ...],
) -> list[Weight]:
    """Of the norms of q and of k."""
    return [
        _norm_weight(f"{name}.{which}", checkpoint_name, size, dtype, order)
        for which, checkpoint_name, size in zip(("q", "k"), checkpoint_names, sizes, strict=True)
    ]


class RMSNorm(WeightedLayer):
    """Normalises rows of `size`, such as the residual stream, which is float32 for every `dtype`; the result is of
    `dtype`, rounded once. Replicated on every rank. `plus_one`: see `bind_rms_norm`."""

    def __init__(
        self, name: str, checkpoint_name: str, size: int, eps: float, dtype: torch.dtype, *, plus_one: bool = False
    ) -> None:
        self._weight = _norm_weight(name, checkpoint_name, size, dtype)
        self.eps = eps
        self._plus_one = plus_one
        self._derived = Derived()
        self._normalise: Callable[..., torch.Tensor]
        self._has_kernel: bool
        self._add: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        self.gain: torch.Tensor  # [size]: what rows are multiplied by

    def weights(self) -> list[Weight]:
        return [self._weight]

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        weight = tensors.pop(self._weight.name)
        derived = self._derived = Derived()
        self.gain = derived.make(lambda: 1 + weight.float()) if self._plus_one else weight
        self._has_kernel = ops.has_kernels(weight.device)
        if self._has_kernel:
            from ringcore.kernels.rms_norm import rms_norm

            self._normalise = functools.partial(rms_norm, weight=self.gain, eps=self.eps, dtype=weight.dtype)
        elif (kernels := ops.cpu_kernels(weight.device)) is not None:
            gain, eps, dtype = derived.make(lambda: self.gain.float()), self.eps, weight.dtype
            self._normalise = lambda x: kernels.rms_norm(x.float(), gain, eps, dtype)
            self._add = lambda x, to: kernels.add_rms_norm(x.float(), gain, eps, dtype, to)
        elif weight.dtype == torch.float32:
            self._normalise = bind_rms_norm(weight, self.eps, plus_one=self._plus_one, derived=derived)
        else:
            in_float32 = bind_rms_norm(derived.make(lambda: self.gain.float()), self.eps, derived=derived)
            self._normalise = lambda x: in_float32(x.float()).to(weight.dtype)

    def refresh(self) -> None:
        self._derived.refresh()

    def __call__(self, x: torch.Tensor, partials: Partials | None = None) -> torch.Tensor:
        """x: [n, size] -> a new tensor [n, size] of the layer's dtype.

        partials: first x += their sum, or its norm, in place (a deferred add); x is float32.
        """
        if partials is None:
            return self._normalise(x)
        if self._has_kernel:
            return self._normalise(x, partials=partials)
        return self._normalise(ops.add_partials(x, partials))

    def add_to(self, hidden: Residual, partials: Partials) -> None:
        """hidden [n, size] += the norm of the partials' sum [n, size]; deferred where a kernel adds it."""
        if self._has_kernel:
            rows, normed = hidden.rows, partials._replace(norm=RowNorm(self.gain, self.eps))
            if rows.dtype == torch.float32:
                hidden.defer_add(normed)
            else:
                ops.add_partials(rows, normed)
        elif self._add is not None:
            self._add(partials.total(), hidden.rows)
        else:
            hidden.rows.add_(self._normalise(partials.total()))


class Unnormed(WeightedLayer):
    """In place of a norm before a sublayer that has none: rows are rounded to `dtype`."""

    gain = None
    eps = 0.0

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def weights(self) -> list[Weight]:
        return []

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        pass

    def __call__(self, x: torch.Tensor, partials: Partials | None = None) -> torch.Tensor:
        """As `RMSNorm`."""
        return x.to(self._dtype) if partials is None else ops.add_partials(x, partials, self._dtype)


AnyNorm = RMSNorm | LayerNorm | Unnormed


class HeadNorm(WeightedLayer):
    """Normalises each head of q and k, concatenated in one tensor, q and k with a weight of their own (QK norm).

    `order`: of the entries of a head, as in `WeightPart`. `plus_one`: see `bind_rms_norm`.
    """

    def __init__(
        self,
        name: str,
        checkpoint_names: tuple[str, str],
        num_heads: tuple[int, int],
        head_dim: int,
        eps: float,
        dtype: torch.dtype,
        order: tuple[int, ...],
        *,
        plus_one: bool = False,
    ) -> None:
        self._weights = _qk_weights(name, checkpoint_names, (head_dim, head_dim), dtype, order)
        self._num_heads = num_heads
        self.eps = eps
        self._plus_one = plus_one
        self._derived = Derived()
        self._normalise: Callable[[torch.Tensor], torch.Tensor]
        self.gain: torch.Tensor  # [2, head_dim]: what q's and k's heads are multiplied by
        self.float_gain: torch.Tensor  # the same in float32

    def weights(self) -> Sequence[Weight]:
        return self._weights

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        rows = [tensors.pop(weight.name) for weight in self._weights]
        derived = self._derived = Derived()
        by_head = [row.expand(heads, -1) for row, heads in zip(rows, self._num_heads, strict=True)]
        weight = derived.make(lambda: torch.cat(by_head))
        self._normalise = bind_rms_norm(weight, self.eps, plus_one=self._plus_one, derived=derived)
        self.gain = derived.make(lambda: 1 + torch.stack(rows).float() if self._plus_one else torch.stack(rows))
        self.float_gain = derived.make(lambda: self.gain.float())

    def refresh(self) -> None:
        self._derived.refresh()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, q heads + k heads, head_dim] -> a new tensor of that shape."""
        return self._normalise(x)


class QKNorm(WeightedLayer):
    """Normalises all heads of q together, and all of k, each with a weight of its own. On one rank alone: the mean is
    over heads.

    `order`: of the entries of a head, as in `WeightPart`. `plus_one`: see `bind_rms_norm`.
    """

    def __init__(
        self,
        name: str,
        checkpoint_names: tuple[str, str],
        sizes: tuple[int, int],
        eps: float,
        dtype: torch.dtype,
        order: tuple[int, ...],
        *,
        plus_one: bool = False,
    ) -> None:
        """sizes: of all heads of q, and of k."""
        self._weights = _qk_weights(name, checkpoint_names, sizes, dtype, order)
        self._sizes, self._eps, self._plus_one = sizes, eps, plus_one
        self._derived = Derived()
        self._normalise: Callable[[torch.Tensor], None]

    def weights(self) -> Sequence[Weight]:
        return self._weights

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        weights = [tensors.pop(weight.name) for weight in self._weights]
        derived = self._derived = Derived()
        if ops.has_kernels(weights[0].device):
            from ringcore.kernels.attention.qk_norm import qk_norm

            gain = derived.make(lambda: torch.cat(weights).float().add_(float(self._plus_one)))
            self._normalise = functools.partial(qk_norm, gain=gain, sizes=self._sizes, eps=self._eps)
            return
        norms = [bind_rms_norm(w, self._eps, plus_one=self._plus_one, derived=derived) for w in weights]
        self._normalise = functools.partial(_in_place, norms, self._sizes)

    def refresh(self) -> None:
        self._derived.refresh()

    def __call__(self, qkv: torch.Tensor) -> None:
        """qkv: [n, q's size + k's size + any more], contiguous; its q and k are overwritten."""
        self._normalise(qkv)


def _in_place(norms: Sequence[Callable[[torch.Tensor], torch.Tensor]], sizes: Sequence[int], x: torch.Tensor) -> None:
    parts = torch.split_with_sizes(x[:, : sum(sizes)], list(sizes), 1)
    for normalise, part in zip(norms, parts, strict=True):
        part.copy_(normalise(part))
