"""Results on meta of the operations that a decoder has most of, without torch's own functions for them.

Those are in Python: each takes as long as ten operations, and the first one imports sympy. Together that is half of the
time that a worker takes to build a model of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ringcore.model_executor.models.transformers.operation_mode import OperationMode

__all__ = ["MetaShapes"]

_aten = torch.ops.aten


class MetaShapes(OperationMode):
    """To be entered before other modes, which then see each operation first. What is not as simple as the functions
    below say is torch's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result_of = _RESULTS.get(func)
        out = None if result_of is None else result_of(*args, **kwargs)
        return func(*args, **kwargs) if out is None else out


def _of_floats(*args: Any, **others: Any) -> torch.Tensor | None:
    """Point by point, of tensors of one float dtype, and numbers."""
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    dtype = tensors[0].dtype
    if others or not dtype.is_floating_point or any(tensor.dtype != dtype for tensor in tensors):
        return None
    if not all(type(one) in (int, float) for one in args if not isinstance(one, torch.Tensor)):
        return None
    return _broadcast(tensors, dtype)


def _of_numbers(*args: Any, **others: Any) -> torch.Tensor | None:
    """As `_of_floats`; also of tensors of one dtype of whole numbers, and such numbers."""
    found = _of_floats(*args, **others)
    if found is not None or others:
        return found
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    are_whole = all(tensor.dtype == torch.int64 for tensor in tensors)
    if not are_whole or not all(type(one) is int for one in args if not isinstance(one, torch.Tensor)):
        return None
    return _broadcast(tensors, torch.int64)


def _of_bools(*args: Any, **others: Any) -> torch.Tensor | None:
    are_bools = all(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in args)
    return _broadcast(args, torch.bool) if are_bools and not others else None


def _product(*args: Any, **others: Any) -> torch.Tensor | None:
    found = _of_numbers(*args, **others)
    return _of_bools(*args, **others) if found is None else found


def _compared(*args: Any, **others: Any) -> torch.Tensor | None:
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    return None if others else _broadcast(tensors, torch.bool)


def _broadcast(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
    """Beside tensors on meta there may be numbers as tensors of the host. None: they do not broadcast, as torch will
    say, or what is not contiguous does not come first, in the shape of the result, whose strides are then its."""
    on_meta = [tensor for tensor in tensors if tensor.is_meta]
    if not on_meta or any(tensor.ndim for tensor in tensors if not tensor.is_meta):
        return None
    first = on_meta[0]
    shape = _shape_of([tensor.shape for tensor in tensors])
    if shape is None:
        return None
    if all(tensor.is_contiguous() for tensor in tensors):
        return first.new_empty(shape, dtype=dtype)
    if list(first.shape) == shape and 0 not in first.stride():
        return torch.empty_strided(shape, _dense(first), dtype=dtype, device="meta")
    return None


def _dense(tensor: torch.Tensor) -> list[int]:
    """Strides without gaps, of dimensions in the order of its own."""
    strides, length = [0] * tensor.ndim, 1
    for dim in sorted(range(tensor.ndim), key=lambda dim: (tensor.stride(dim), -dim)):
        strides[dim], length = length, length * tensor.shape[dim]
    return strides


def _shape_of(shapes: Sequence[torch.Size]) -> list[int] | None:
    ndim, shape = max(map(len, shapes)), []
    for sizes in zip(*((1,) * (ndim - len(one)) + tuple(one) for one in shapes), strict=True):
        others = {size for size in sizes if size != 1}
        if len(others) > 1:
            return None
        shape.append(others.pop() if others else 1)
    return shape


def _mean(x: torch.Tensor, dims: Sequence[int] | None, keepdim: bool = False, **others: Any) -> torch.Tensor | None:
    if others or not dims or not x.is_meta or not x.dtype.is_floating_point or not x.is_contiguous():
        return None
    reduced = {dim if dim >= 0 else dim + x.ndim for dim in dims}
    if len(reduced) < len(dims) or not all(0 <= dim < x.ndim for dim in reduced):
        return None
    kept = [(1 if dim in reduced else size, dim not in reduced) for dim, size in enumerate(x.shape)]
    return x.new_empty([size for size, is_kept in kept if is_kept or keepdim])


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0, **others: Any) -> torch.Tensor | None:
    first = tensors[0]
    dim, formats = dim % max(1, first.ndim), {one.dtype for one in tensors} | {one.ndim for one in tensors}
    if others or len(formats) > 2 or not first.ndim or not all(_has_rows(tensor) for tensor in tensors):
        return None
    shape = list(first.shape)
    for tensor in tensors[1:]:
        if any(size != shape[at] for at, size in enumerate(tensor.shape) if at != dim):
            return None
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return first.new_empty(shape)


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0, **others: Any) -> torch.Tensor | None:
    if others or not -tensors[0].ndim <= dim <= tensors[0].ndim or len({tensor.shape for tensor in tensors}) > 1:
        return None
    return _cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    if condition.dtype != torch.bool or a.dtype != b.dtype or not a.dtype.is_floating_point:
        return None
    return _broadcast((a, b, condition), a.dtype)


def _clamp(x: torch.Tensor, *bounds: Any, **others: Any) -> torch.Tensor | None:
    return _of_floats(x, *(bound for bound in bounds if bound is not None), **others)


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor | None:
    return _of_floats(x)


def _layer_norm(
    x: torch.Tensor, normed: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The norm, and means and deviations of rows, in float32."""
    given = [one for one in (weight, bias) if one is not None]
    of_rows = x.ndim - len(normed)
    if not x.is_meta or not x.dtype.is_floating_point or x.dtype == torch.float64 or not x.is_contiguous():
        return None
    if of_rows < 0 or any(one.shape != x.shape[of_rows:] or one.dtype != x.dtype for one in given):
        return None
    if list(normed) != list(x.shape[of_rows:]) or not normed:
        return None
    mean, deviation = (x.new_empty([*x.shape[:of_rows], *([1] * len(normed))], dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), mean, deviation


def _has_rows(tensor: torch.Tensor) -> bool:
    """On meta, and in none of the formats of images, which a result would have too."""
    return tensor.is_meta and (tensor.ndim < 4 or tensor.is_contiguous() or tensor.stride(-1) == 1 < tensor.stride(1))


def _range(
    start: Any, end: Any, step: Any = 1, *, dtype: Any = None, device: Any = None, **_: Any
) -> torch.Tensor | None:
    if (
        any(type(one) is not int for one in (start, end, step))
        or step <= 0
        or end < start
        or device != torch.device("meta")
    ):
        return None
    return torch.empty(-(-(end - start) // step), dtype=dtype or torch.int64, device=device)


def _range_to(end: Any, **others: Any) -> torch.Tensor | None:
    return _range(0, end, **others)


def _mm(a: torch.Tensor, b: torch.Tensor, **others: Any) -> torch.Tensor | None:
    fit = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0] and a.dtype == b.dtype
    return a.new_empty(a.shape[0], b.shape[1]) if fit and a.is_meta and b.is_meta and not others else None


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **others: Any) -> torch.Tensor | None:
    out = _mm(a, b, **others)
    fits = out is not None and bias.is_meta and bias.shape == out.shape[1:] and bias.dtype == a.dtype
    return out if fits else None


def _bmm(a: torch.Tensor, b: torch.Tensor, **others: Any) -> torch.Tensor | None:
    fit = a.ndim == b.ndim == 3 and (a.shape[0], a.shape[2], a.dtype) == (*b.shape[:2], b.dtype)
    return b.new_empty(a.shape[0], a.shape[1], b.shape[2]) if fit and a.is_meta and b.is_meta and not others else None


def _embedding(weight: torch.Tensor, ids: torch.Tensor, *_: Any, **others: Any) -> torch.Tensor | None:
    return weight.new_empty([*ids.shape, weight.shape[1]]) if weight.is_meta and ids.is_meta else None


def _like(x: torch.Tensor, *, dtype: Any = None, device: Any = None, **others: Any) -> torch.Tensor | None:
    has_others = any(one is not None and one is not False for one in others.values())
    if has_others or not x.is_meta or device not in (None, x.device) or 0 in x.stride():
        return None
    return torch.empty_strided(x.shape, _dense(x), dtype=dtype or x.dtype, device="meta")


def _as_it_is(x: torch.Tensor, *_: Any, **others: Any) -> torch.Tensor | None:
    """On meta numbers are not drawn."""
    return x if x.is_meta else None


_COMPARISONS = ("le", "lt", "ge", "gt", "eq", "ne")
_RESULTS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((_aten.add.Tensor, _aten.sub.Tensor, _aten.rsub.Scalar, _aten.neg.default), _of_numbers),
    _aten.mul.Tensor: _product,
    **dict.fromkeys((_aten.bitwise_not.default, _aten.bitwise_and.Tensor, _aten.bitwise_or.Tensor), _of_bools),
    **dict.fromkeys(
        (_aten.div.Tensor, _aten.pow.Tensor_Scalar, _aten.pow.Scalar, _aten.reciprocal.default), _of_floats
    ),
    **dict.fromkeys((_aten.rsqrt.default, _aten.silu.default, _aten.sigmoid.default, _aten.tanh.default), _of_floats),
    **dict.fromkeys((_aten.cos.default, _aten.sin.default, _aten.exp.default), _of_floats),
    **{getattr(getattr(_aten, name), kind): _compared for name in _COMPARISONS for kind in ("Tensor", "Scalar")},
    **dict.fromkeys((_aten.normal_.default, _aten.uniform_.default), _as_it_is),
    _aten.mean.dim: _mean,
    _aten.gelu.default: _gelu,
    _aten.native_layer_norm.default: _layer_norm,
    **dict.fromkeys((_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default), _like),
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.where.self: _where,
    _aten.clamp.default: _clamp,
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.bmm.default: _bmm,
    _aten.embedding.default: _embedding,
    **dict.fromkeys((_aten.arange.start, _aten.arange.start_step), _range),
    _aten.arange.default: _range_to,
}
