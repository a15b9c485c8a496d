"""Recognises RMS norms by what they compute."""

from __future__ import annotations

import torch
from torch import nn

from ringcore.model_executor.models.transformers.fusion.plan import NormPlan
from ringcore.model_executor.models.transformers.fusion.sample_pass import SamplePass
from ringcore.model_executor.ops import rms_norm

__all__ = ["find_norms"]

_USUAL_EPS = (1e-6, 1e-5)
# Of the rows that are tried: at the smaller ones eps matters.
_MAGNITUDES = (1e-3, 1.0, 30.0)
_TOLERANCE = 1e-5


def find_norms(sample: SamplePass) -> dict[str, NormPlan]:
    """By path, the modules that compute x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight), of their only
    argument."""
    found: dict[str, NormPlan] = {}
    known: dict[tuple[object, ...], NormPlan | None] = {}
    of_one = {call.module for call in sample.calls if len(call.args) + len(call.kwargs) == 1}
    for path, module in sample.body.named_modules():
        own = dict(module.named_parameters())
        if module not in of_one or set(own) != {"weight"} or own["weight"].dim() != 1:
            continue
        if own["weight"].is_meta:  # within a sublayer for which something else stands
            continue
        size, floats = own["weight"].numel(), _floats(module)
        key = (type(module), size, floats)
        if key not in known:  # of one module for all that differ in nothing but values
            known[key] = _recognised(path, module, own["weight"], floats)
        plan = known[key]
        if plan is not None:
            found[path] = NormPlan(path, size, plan.eps, plan.plus_one)
    return found


def _floats(module: nn.Module) -> tuple[float, ...]:
    return tuple(value for value in vars(module).values() if isinstance(value, float))


def _recognised(path: str, module: nn.Module, weight: torch.Tensor, floats: tuple[float, ...]) -> NormPlan | None:
    unit = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(len(weight)))
    rows = torch.cat([magnitude * unit for magnitude in _MAGNITUDES])
    try:
        theirs = module(rows)
    except Exception:  # whatever the module wants besides rows: it is no norm of rows alone
        return None
    if not isinstance(theirs, torch.Tensor) or theirs.shape != rows.shape:
        return None
    for eps in (*floats, *_USUAL_EPS):
        for plus_one in (False, True):
            ours = rms_norm(rows, weight + float(plus_one), eps)
            if torch.allclose(ours, theirs, rtol=_TOLERANCE, atol=_TOLERANCE):
                return NormPlan(path, len(weight), eps, plus_one)
    return None
