"""Recognises norms by what they compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ringcore.model_executor.models.transformers.fusion.plan import NormPlan
from ringcore.model_executor.models.transformers.fusion.sample_pass import Call, SamplePass
from ringcore.model_executor.ops import rms_norm

__all__ = ["find_norms"]

_USUAL_EPS = (1e-6, 1e-5)
# Of the rows that are tried: at the smaller ones eps matters.
_MAGNITUDES = (1e-3, 1.0, 30.0)
_TOLERANCE = 1e-5


def find_norms(sample: SamplePass) -> dict[str, NormPlan]:
    """By path, the modules that compute x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight), of their only argument;
    or this of x - mean(x) instead of x, perhaps with a bias, or without a weight."""
    found: dict[str, NormPlan] = {}
    known: dict[tuple[object, ...], NormPlan | None] = {}
    calls = {call.module: call for call in sample.calls if len(call.args) + len(call.kwargs) == 1}
    for path, module in sample.body.named_modules():
        own = dict(module.named_parameters())
        if module not in calls or not _may_be_norm(module, own):
            continue
        size, floats = _size(calls[module], own), _floats(module)
        key = (type(module), size, floats, *own)
        if key not in known:  # of one module for all that differ in nothing but values
            known[key] = _recognised(path, module, size, own, floats)
        plan = known[key]
        if plan is not None:
            found[path] = NormPlan(path, size, plan.eps, plan.plus_one, plan.is_centred, plan.has_weight, plan.has_bias)
    return found


def _may_be_norm(module: nn.Module, own: Mapping[str, torch.Tensor]) -> bool:
    """By its tensors: a vector, perhaps another one, or none. On meta it is within a sublayer for which something else
    stands."""
    if not own:
        return next(module.children(), None) is None
    is_named = "weight" in own and set(own) <= {"weight", "bias"}
    return is_named and all(tensor.dim() == 1 and not tensor.is_meta for tensor in own.values())


def _size(call: Call, own: Mapping[str, torch.Tensor]) -> int:
    return own["weight"].numel() if own else call.hidden.shape[-1]


def _floats(module: nn.Module) -> tuple[float, ...]:
    return tuple(value for value in vars(module).values() if isinstance(value, float))


def _recognised(
    path: str, module: nn.Module, size: int, own: Mapping[str, torch.Tensor], floats: tuple[float, ...]
) -> NormPlan | None:
    unit = torch.randn(4, size, generator=torch.Generator().manual_seed(size))
    rows = torch.cat([magnitude * unit for magnitude in _MAGNITUDES])
    try:
        theirs = module(rows.clone())
    except Exception:  # whatever the module wants besides rows: it is no norm of rows alone
        return None
    if not isinstance(theirs, torch.Tensor) or theirs.shape != rows.shape:
        return None
    for eps in (*floats, *_USUAL_EPS):
        for plan in _forms(path, size, own, eps):
            if torch.allclose(_computed(plan, rows, own), theirs, rtol=_TOLERANCE, atol=_TOLERANCE):
                return plan
    return None


def _forms(path: str, size: int, own: Mapping[str, torch.Tensor], eps: float) -> Iterator[NormPlan]:
    has_weight, has_bias = "weight" in own, "bias" in own
    for plus_one in (False, True) if has_weight else (False,):
        if has_weight and not has_bias:
            yield NormPlan(path, size, eps, plus_one)
        yield NormPlan(path, size, eps, plus_one, True, has_weight, has_bias)


def _computed(plan: NormPlan, rows: torch.Tensor, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    factor = own["weight"] + float(plan.plus_one) if plan.has_weight else None
    if plan.is_centred:
        return nn.functional.layer_norm(rows, (plan.size,), factor, own.get("bias"), plan.eps)
    assert factor is not None, plan
    return rms_norm(rows, factor, plan.eps)
