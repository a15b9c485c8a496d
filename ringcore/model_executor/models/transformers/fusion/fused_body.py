"""Puts recognised parts into the body of a model: whole layers where it can, else sublayers and norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ringcore.attention.layer import AnyAttention
from ringcore.model_executor.models.transformers.attention_calls import AttentionCall
from ringcore.model_executor.models.transformers.fusion.coverage import is_of_module, modules_of
from ringcore.model_executor.models.transformers.fusion.fused_layer import FusedLayer
from ringcore.model_executor.models.transformers.fusion.fused_modules import FusedAttention, FusedMLP, FusedNorm
from ringcore.model_executor.models.transformers.fusion.parts import Parts
from ringcore.model_executor.models.transformers.fusion.plan import (
    AnyAttentionPlan,
    ModulePlan,
    RotaryPlan,
)
from ringcore.model_executor.models.transformers.fusion.recognised import Recognised
from ringcore.model_executor.weight import WeightedLayer

__all__ = ["FusedBody", "fuse"]


@dataclass(slots=True)
class FusedBody:
    """attentions: of those that are ours, by index of the layer. rotaries: what the rotations of a pass are, with the
    size of a head; None: no rotation."""

    modules: dict[str, FusedLayer | FusedAttention | FusedMLP | FusedNorm] = field(default_factory=dict)
    attentions: dict[int, AnyAttention] = field(default_factory=dict)
    rotaries: list[tuple[RotaryPlan | None, int]] = field(default_factory=list)

    def weighted(self) -> Iterator[WeightedLayer]:
        for module in self.modules.values():
            yield from module.weighted()

    def bind_device(self, device: torch.device) -> None:
        for module in self.modules.values():
            module.bind_device(device)


class _Unread(nn.Module):
    """In place of a rotary embedding that no layer of the model's own reads; a body may read its other attributes."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        for name, value in vars(replaced).items():
            if not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[()]:
        return ()


def fuse(
    body: nn.Module,
    found: Recognised,
    calls: Sequence[AttentionCall],
    parts: Callable[[float], Parts],
    index_of: Callable[[int, AnyAttentionPlan], int],
) -> FusedBody:
    """parts: by the scale of a layer. index_of: of a layer's attention, by that of the layer."""
    return _Fuser(found, calls, parts, index_of).fused(body)


class _Fuser:
    def __init__(
        self,
        found: Recognised,
        calls: Sequence[AttentionCall],
        parts: Callable[[float], Parts],
        index_of: Callable[[int, AnyAttentionPlan], int],
    ) -> None:
        self._found, self._calls, self._parts, self._index_of = found, calls, parts, index_of
        self._plans = [found.plans.get(path) for path in found.layers]
        self._body = FusedBody()

    def fused(self, body: nn.Module) -> FusedBody:
        found, modules, plain = self._found, self._body.modules, self._parts(1.0)
        taken = {name for plan in found.plans.values() for name in modules_of(plan)}
        for index, layer in enumerate(found.layers):
            for path, attention in found.attentions.items():
                if path.startswith(f"{layer}.") and attention.out not in taken:
                    call, place = self._calls[index], self._place(index, attention)
                    ours = plain.attention(path, attention, call, *place)
                    self._body.attentions[index] = ours.attention
                    modules[path] = FusedAttention(ours, plain.prologue(None), found.num_results[path])
                    taken.update(modules_of(attention))
        for path, mlp in found.mlps.items():
            if mlp.down not in taken and is_of_module(path, mlp):
                modules[path] = FusedMLP(plain.mlp(path, mlp), plain.prologue(None))
                taken.update(modules_of(mlp))
        final = found.final_norm if self._plans and self._plans[-1] is not None else None
        for path, norm in found.norms.items():
            if path not in taken and norm != final:
                modules[path] = FusedNorm(plain.norm(norm))
        layers = {path: self._layer(index, body) for index, path in enumerate(found.layers) if path in found.plans}
        for path, module in (modules | layers).items():
            body.set_submodule(path, module)
        modules.update(layers)
        if final is not None:
            body.set_submodule(final.path, nn.Identity())
        if len(self._body.attentions) == len(self._plans):
            for source in found.sources:
                body.set_submodule(source.path, _Unread(body.get_submodule(source.path)))
        return self._body

    def _layer(self, index: int, body: nn.Module) -> FusedLayer:
        found, plan = self._found, self._plans[index]
        assert plan is not None
        parts, is_last = self._parts(plan.scale), index + 1 == len(self._plans)
        place = () if isinstance(plan.attention, ModulePlan) else self._place(index, plan.attention)
        ours = parts.layer(plan, self._calls[index], *place)
        self._body.attentions.update((index, attention) for attention in ours.attention_layers())
        layer = FusedLayer(
            ours,
            body.get_submodule(plan.path),
            scale=plan.scale,
            continues=index > 0 and self._is_one_stream(index),
            is_continued=not is_last and self._is_one_stream(index + 1),
            final_norm=parts.prologue(found.final_norm) if is_last and found.final_norm is not None else None,
            num_results=found.num_results[plan.path],
        )
        for sublayer in (plan.attention, plan.mlp):
            if isinstance(sublayer, ModulePlan):  # under its name still: its tensors are the model's
                layer.add_module(sublayer.path.rpartition(".")[2], body.get_submodule(sublayer.path))
        return layer

    def _place(self, index: int, attention: AnyAttentionPlan) -> tuple[int, int]:
        """The indices of its attention and of its rotary embedding."""
        key = attention.rotary, attention.rotated_size(self._calls[index].head_size)
        if key not in self._body.rotaries:
            self._body.rotaries.append(key)
        return self._index_of(index, attention), self._body.rotaries.index(key)

    def _is_one_stream(self, index: int) -> bool:
        """Whether layer `index` and the one before have one residual stream."""
        before, plan = self._plans[index - 1], self._plans[index]
        continues = self._found.layers[index] in self._found.continues
        return continues and before is not None and plan is not None and before.scale == plan.scale
