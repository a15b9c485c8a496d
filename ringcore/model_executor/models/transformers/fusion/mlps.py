"""Recognises MLPs by what they compute in a sample pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import torch

from ringcore.checkpoint.family import Activation
from ringcore.model_executor.layers.activation import Pointwise
from ringcore.model_executor.models.transformers.fusion.plan import GatedPlan, LinearRows, MLPPlan, PlainPlan
from ringcore.model_executor.models.transformers.fusion.sample_pass import (
    Call,
    NotRecognised,
    SampleLinear,
    SamplePass,
)
from ringcore.model_executor.models.transformers.fusion.trial import Trial

__all__ = ["find_mlp", "linears_of"]

_GATES: tuple[Activation, ...] = ("silu", "gelu_tanh")
_Linears = dict[str, SampleLinear]


def find_mlp(sample: SamplePass, trial: Trial, calls: Sequence[Call]) -> MLPPlan:
    """down(activation(gate(x)) * up(x)), gate and up in two linears or in the halves of one; or without a gate,
    down(activation(up(x))). calls: of a module, or of several one after the other. Raises `NotRecognised`."""
    path, linears = calls[0].name, linears_of(sample, *calls)
    if len(linears) not in (2, 3):
        raise NotRecognised(f"{path} has {len(linears)} linears")
    call = calls[0] if len(calls) == 1 else _joined(calls)
    plan = None
    for plan in _forms(linears, call.hidden.shape[-1]):
        if trial.sublayer_agrees(trial.parts().mlp(path, plan), call, []):
            return plan
    if plan is None:
        raise NotRecognised(f"{path} is no MLP, with a gate or without")
    known = _GATES if isinstance(plan, GatedPlan) else get_args(Pointwise)
    gated = "a gated MLP" if isinstance(plan, GatedPlan) else "an MLP"
    raise NotRecognised(f"{path} computes something else than {gated} with {' or '.join(known)}")


def linears_of(sample: SamplePass, *calls: Call) -> _Linears:
    """Within these calls, in the order of their own. Raises `NotRecognised` where one is called twice, or there is
    none."""
    of_linears = [one for call in calls for one in (*sample.within(call.name), call) if _is_linear(one)]
    found = {one.name: one.module for one in of_linears if isinstance(one.module, SampleLinear)}
    if not found or len(found) != len(of_linears):
        raise NotRecognised(f"{calls[0].name} calls {len(of_linears)} linears")
    return found


def _is_linear(call: Call) -> bool:
    return isinstance(call.module, SampleLinear)


def _forms(linears: Mapping[str, SampleLinear], hidden_size: int) -> Iterator[MLPPlan]:
    *inner, (down, down_linear) = linears.items()
    size, down_has_bias = down_linear.in_features, down_linear.bias is not None
    if any(linear.in_features != hidden_size for _, linear in inner):
        return
    has_biases = {linear.bias is not None for _, linear in inner}
    if len(inner) == 1 and inner[0][1].out_features == size:
        ((name, up),) = inner
        rows = LinearRows(name, size, 0, size)
        for activation in get_args(Pointwise):
            yield PlainPlan(rows, up.bias is not None, down, down_has_bias, activation)
        return
    if len(inner) == 2:
        halves = [LinearRows(name, linear.out_features, 0, linear.out_features) for name, linear in inner]
    else:
        ((name, packed),) = inner
        halves = [LinearRows(name, packed.out_features, start, size) for start in (0, size)]
    if len(has_biases) > 1 or any(half.length != size or half.start + size > half.num_outputs for half in halves):
        return
    for (gate, up_rows), activation in itertools.product(itertools.permutations(halves), _GATES):
        yield GatedPlan(gate, up_rows, has_biases == {True}, down, down_has_bias, activation)


def _joined(calls: Sequence[Call]) -> Call:
    """As though they were one: of rows, which a layer may have flattened."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(1, -1, x.shape[-1])

    return Call(calls[0].name, calls[0].module, (), {}, rows(calls[-1].result), rows(calls[0].hidden))
