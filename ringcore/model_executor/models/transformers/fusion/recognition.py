"""Recognises the decoder layers of a model of transformers by what they compute, not by what they are called.

A copy of the model with random weights is run once (`sample_pass`). How the calls of a layer follow each other, and
which rows of which linear a head depends on, suggests a plan (`plan`); our layer by that plan is run on the same input,
and the layer is recognised if and only if the results agree.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ringcore.model_executor import ops
from ringcore.model_executor.models.transformers.attention_calls import AttentionCall
from ringcore.model_executor.models.transformers.fusion.body_trial import check_body
from ringcore.model_executor.models.transformers.fusion.latents import find_latent_attention
from ringcore.model_executor.models.transformers.fusion.mlps import find_mlp
from ringcore.model_executor.models.transformers.fusion.module_sublayer import Argument, Arguments
from ringcore.model_executor.models.transformers.fusion.norms import find_norms
from ringcore.model_executor.models.transformers.fusion.plan import (
    AnyAttentionPlan,
    LayerNorms,
    LayerPlan,
    MLPPlan,
    ModulePlan,
    NormPlan,
    of_other_layer,
)
from ringcore.model_executor.models.transformers.fusion.recognised import Recognised, RotarySource
from ringcore.model_executor.models.transformers.fusion.sample_pass import (
    Call,
    NotRecognised,
    SampleLinear,
    SamplePass,
    run_sample,
)
from ringcore.model_executor.models.transformers.fusion.sublayers import find_attention
from ringcore.model_executor.models.transformers.fusion.trial import Trial

__all__ = ["recognise"]


def recognise(
    body: PreTrainedModel,
    calls: Sequence[AttentionCall],
    num_positions: int,
    in_mask: bool = False,
    alike: Mapping[str, str] | None = None,
) -> Recognised:
    """body: on meta; calls: its attention calls, one a layer; num_positions: of the model. in_mask and alike: see
    `Body`; None: each layer is looked at."""
    names = {module: name for name, module in body.named_modules()}
    layers: list[str] = []
    try:
        layers += [_layer_around(body, names[call.module]) for call in calls]
        attentions = [_child_of(layer, names[call.module]) for layer, call in zip(layers, calls, strict=True)]
        sample = run_sample(body, layers, attentions, num_positions, in_mask)
        trial = Trial(sample, body.config.get_text_config().hidden_size)
        with ops.without_cpu_kernels():
            found = _Search(sample, trial).result(layers, attentions, calls, alike or {})
            check_body(sample, trial, found, calls)
        sample.calls.clear()  # their arguments refer to the sample, which is large
        return found
    except NotRecognised as error:
        return Recognised(tuple(layers), reasons={"": str(error)})


class _Search:
    def __init__(self, sample: SamplePass, trial: Trial) -> None:
        self._sample, self._trial = sample, trial
        self._norms = find_norms(sample)
        self._plans: dict[str, LayerPlan] = {}
        self._attentions: dict[str, AnyAttentionPlan] = {}
        self._mlps: dict[str, MLPPlan] = {}
        self._reasons: dict[str, str] = {}
        self._last_form = 0  # of the layer before, which is tried first

    def result(
        self,
        layers: Sequence[str],
        attentions: Sequence[str],
        calls: Sequence[AttentionCall],
        alike: Mapping[str, str],
    ) -> Recognised:
        """alike: see `Body`. Of these layers is what was found of the other one; the whole body is tried afterwards."""
        call_of = dict(zip(layers, calls, strict=True))
        for layer, attention, call in zip(layers, attentions, calls, strict=True):
            other = alike.get(layer, "")
            if other in self._plans and replace(call_of[other], module=call.module) == call:
                self._take_over(other, layer)
                continue
            self._find_sublayers(layer, attention, call)
            try:
                self._plans[layer] = self._layer(layer, attention, call)
            except NotRecognised as error:
                self._reasons[layer] = str(error)
        of_layers = [self._sample.of(layer) for layer in layers]
        continues = {
            layer
            for layer, before, call in zip(layers[1:], of_layers, of_layers[1:], strict=False)
            if call.tensors()[0] is before.result
        }
        called = {call.name for call in self._sample.calls if isinstance(call.module, SampleLinear)}
        return Recognised(
            tuple(layers),
            self._plans,
            self._attentions,
            self._mlps,
            self._norms,
            self._final_norm(of_layers[-1]),
            self._reasons,
            {call.name: len(call.output) if isinstance(call.output, tuple) else None for call in self._sample.calls},
            tuple(_source(call) for call in self._sample.rotaries),
            frozenset(called),
            frozenset(continues),
        )

    def _take_over(self, other: str, layer: str) -> None:
        """What was found of another layer that computes the same."""
        name = re.compile(rf"{re.escape(other)}\b")
        kinds: list[dict[str, Any]] = [self._plans, self._attentions, self._mlps]
        for kind in kinds:
            found = {path: plan for path, plan in kind.items() if name.match(path)}
            kind.update((name.sub(layer, path), of_other_layer(plan, other, layer)) for path, plan in found.items())
        reasons = {path: reason for path, reason in self._reasons.items() if name.match(path)}
        self._reasons.update((name.sub(layer, path), name.sub(layer, reason)) for path, reason in reasons.items())

    def _find_sublayers(self, layer: str, attention: str, call: AttentionCall) -> None:
        try:
            self._attentions[attention] = self._attention(attention, call)
        except NotRecognised as error:
            self._reasons[attention] = str(error)
        for calls in self._sublayers(layer):
            path = calls[0].name
            if path != attention:
                try:
                    self._mlps[path] = find_mlp(self._sample, self._trial, calls)
                except NotRecognised as error:
                    self._reasons[path] = str(error)
                    self._find_inner_mlps(path)

    def _find_inner_mlps(self, path: str) -> None:
        """Those of a sublayer that is none itself: the shared experts of a mixture."""
        for calls in self._sublayers(path):
            if len(calls) == 1 and not isinstance(calls[0].module, SampleLinear):
                with suppress(NotRecognised):
                    self._mlps[calls[0].name] = find_mlp(self._sample, self._trial, calls)

    def _attention(self, path: str, call: AttentionCall) -> AnyAttentionPlan:
        latents = find_latent_attention(self._sample, self._trial, path, call, self._norms)
        return latents or find_attention(self._sample, self._trial, path, call, self._norms)

    def _children(self, layer: str) -> list[Call]:
        return [one for one in self._sample.within(layer) if _parent(one.name) == layer and not _is_identity(one)]

    def _sublayers(self, layer: str) -> list[list[Call]]:
        """The calls of its children but norms: linears one after the other, and what has no tensors, are one."""
        found: list[list[Call]] = []
        goes_on = False
        for one in self._children(layer):
            is_part = isinstance(one.module, SampleLinear) or _is_bare(one.module)
            if one.name in self._norms:
                is_part = False
            elif is_part and goes_on:
                found[-1].append(one)
            else:
                found.append([one])
            goes_on = is_part
        return found

    def _layer(self, layer: str, attention: str, call: AttentionCall) -> LayerPlan:
        """By the order of the calls of its children. Raises `NotRecognised`."""
        whole = self._sample.of(layer)
        if isinstance(whole.output, tuple) and len(whole.output) != 1:
            raise NotRecognised(f"{layer} returns {len(whole.output)} results")
        children, sublayers = self._children(layer), self._sublayers(layer)
        if len({one.name for one in children}) < len(children):
            raise NotRecognised(f"{layer} calls a part of it twice")
        if [calls[0].name == attention for calls in sublayers] != [True, False]:
            raise NotRecognised(f"{layer} is not attention and then an MLP")
        ours = self._attentions.get(attention), self._mlps.get(sublayers[1][0].name)
        plan = LayerPlan(
            layer,
            ours[0] or _module(sublayers[0], whole),
            ours[1] or _module(sublayers[1], whole),
        )
        first, second, last = (children.index(one) for one in (sublayers[0][0], sublayers[1][0], sublayers[1][-1]))
        norms = [self._norms.get(one.name) for one in children]
        placements = _placements(norms[:first], norms[first + 1 : second], norms[last + 1 :])
        scales = [1.0, *(value for value in vars(whole.module).values() if isinstance(value, float) and value > 0)]
        forms = [*enumerate(itertools.product(placements, scales))]
        for index, ((placed, is_parallel), scale) in sorted(forms, key=lambda form: form[0] != self._last_form):
            candidate = replace(plan, norms=placed, scale=scale, is_parallel=is_parallel)
            if self._agrees(candidate, whole, call):
                self._last_form = index
                return candidate
        raise NotRecognised(f"{layer} is not two sublayers with norms, each added to its input")

    def _agrees(self, plan: LayerPlan, whole: Call, call: AttentionCall) -> bool:
        attention, rotations, index = plan.attention, [], 0
        if not isinstance(attention, ModulePlan):
            size = attention.rotated_size(call.head_size)
            rotations, index = [self._trial.rotation(attention.rotary, size)], self._trial.index_of(attention)
        ours = self._trial.parts(plan.scale).layer(plan, call, index)
        return self._trial.layer_agrees(ours, whole, rotations, plan.scale)

    def _final_norm(self, last: Call) -> NormPlan | None:
        """If nothing but this norm is known to read the last layer's output."""
        readers = [call.name for call in self._sample.calls if any(x is last.result for x in call.tensors())]
        return self._norms.get(readers[0]) if len(readers) == 1 else None


def _module(calls: Sequence[Call], whole: Call) -> ModulePlan:
    """The sublayer as the model's own module. Raises `NotRecognised`."""
    if len(calls) > 1:
        raise NotRecognised(f"{calls[0].name} and what follows is no MLP")
    return ModulePlan(calls[0].name, _arguments(calls[0], whole))


def _arguments(own: Call, whole: Call) -> Arguments:
    """How a sublayer's arguments follow from those of its layer. Raises `NotRecognised`."""
    known: list[tuple[int | str, object]] = [*enumerate(whole.args), *whole.kwargs.items()]

    def argument(value: object) -> Argument:
        for key, given in known:
            if given is value and value is not None:
                return Argument(key)
        if value is None or isinstance(value, bool | int | float | str):
            return Argument(None, value)
        raise NotRecognised(f"{own.name} is given what its layer computes")

    is_positional = bool(own.args)
    hidden = None if is_positional else next(iter(own.kwargs))
    return Arguments(
        hidden,
        tuple(argument(value) for value in own.args[1:]),
        {name: argument(value) for name, value in own.kwargs.items() if name != hidden},
    )


def _placements(
    before: Sequence[NormPlan | None], between: Sequence[NormPlan | None], after: Sequence[NormPlan | None]
) -> Iterator[tuple[LayerNorms, bool]]:
    """What each norm may be, by where it is called: before, between and after the sublayers; and whether these are
    parallel."""
    if max(len(before), len(after)) <= 1 and len(between) <= 2:
        (first,), (last,) = before or (None,), after or (None,)
        middle = [tuple(between)] if len(between) == 2 else [(None, *between), (*between, None)]
        for attention_out, mlp in middle if between else [(None, None)]:
            yield LayerNorms(first, attention_out, mlp, last), False
    match before, between, after:
        case [one], [], []:
            yield LayerNorms(one), True
        case ([one], [other], []) | ([one, other], [], []):
            yield LayerNorms(one, mlp=other), True
            if not between:
                yield LayerNorms(other, mlp=one), True


def _is_identity(call: Call) -> bool:
    """A dropout layer, which does nothing here."""
    return _is_bare(call.module) and isinstance(call.output, torch.Tensor) and torch.equal(call.output, call.hidden)


def _is_bare(module: nn.Module) -> bool:
    """Without tensors."""
    has_linears = any(isinstance(one, SampleLinear) for one in module.modules())
    return not has_linears and next(module.parameters(), None) is None


def _source(call: Call) -> RotarySource:
    return RotarySource(call.name, call.args, call.kwargs)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _layer_around(body: nn.Module, path: str) -> str:
    """The entry of a list of layers around a module. Raises `NotRecognised`."""
    parts = path.split(".")
    for end in range(1, len(parts)):
        if isinstance(body.get_submodule(".".join(parts[:end])), nn.ModuleList):
            return ".".join(parts[: end + 1])
    raise NotRecognised(f"{path} is in no list of layers")


def _child_of(layer: str, path: str) -> str:
    """The child of a layer around a module, or the module itself."""
    return ".".join(path.split(".")[: layer.count(".") + 2])
