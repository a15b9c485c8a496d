"""A model of a few layers, among them one of every kind that the whole has.

Configurations name kinds of layers in many ways (lists with an entry a layer, a first layer with experts, every so
many), so the layers of the whole model are compared as transformers builds them. Two are of a kind if their modules
have the same classes, sizes and attributes, and the configuration's lists the same entries for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import msgspec
import torch
from torch import nn

from ringcore.checkpoint import TransformersSpec
from ringcore.model_executor.models.transformers.alike_layers import lists_of
from ringcore.model_executor.models.transformers.body import Body
from ringcore.model_executor.models.transformers.construction import on_meta
from ringcore.model_executor.models.transformers.refusal import Refused

__all__ = ["few_layers"]

_PLAIN = (bool, int, float, str, type(None))
_Attribute = tuple[str, str]  # the path of the module within its layer, and the name


def few_layers(spec: TransformersSpec) -> TransformersSpec:
    """The first layers; the whole where these would be others in a smaller model, or where it cannot be built."""
    try:
        whole = _Layers(spec)
        by_layer = [name for name, entries in whole.fields.items() if len(entries) == spec.num_layers]
        places = whole.places()
        kinds = whole.kinds(by_layer, places)
        num_layers = 1 + max((kinds.index(kind) for kind in kinds), default=0)
        few = spec.first_layers(num_layers)
        return few if _Layers(few).kinds(by_layer, places) == kinds[:num_layers] else spec
    except Refused:
        return spec


class _Layers:
    """Of a model on meta. fields: the lists of its configuration. Raises `Refused`."""

    def __init__(self, spec: TransformersSpec) -> None:
        model = on_meta(spec, torch.bfloat16)
        fields = vars(model.config.get_text_config())
        self.fields = {name: value for name, value in fields.items() if isinstance(value, list | tuple)}
        self._lists = [layers for layers in lists_of(Body(model).module) if len(layers) == spec.num_layers]

    def places(self) -> set[_Attribute]:
        """The attributes that are another number in every layer that has them: its index, or a number made of that."""
        found: dict[_Attribute, list[object]] = {}
        for layer in chain.from_iterable(self._lists):
            for path, name, value in _attributes(layer):
                found.setdefault((path, name), []).append(value)
        return {
            attribute
            for attribute, values in found.items()
            if all(type(one) in (int, float) for one in values) and len(set(values)) == len(values)
        }

    def kinds(self, by_layer: Sequence[str], places: set[_Attribute]) -> list[object]:
        """By layer, the same of two of a kind. by_layer: the lists with an entry a layer. places: see there."""
        found = [[_kind(layer, places) for layer in layers] for layers in self._lists]
        found += [[msgspec.json.encode(one) for one in self.fields.get(name, ())] for name in by_layer]
        return list(zip(*found, strict=False))  # a list that did not follow the number of layers ends later


def _kind(layer: nn.Module, places: set[_Attribute]) -> object:
    modules = [(path, type(one), _sizes(one._parameters), _sizes(one._buffers)) for path, one in layer.named_modules()]
    return tuple(modules), tuple(one for one in _attributes(layer) if one[:2] not in places)


def _sizes(tensors: Mapping[str, torch.Tensor | None]) -> Sequence[object]:
    return tuple((name, None if one is None else (one.shape, one.dtype)) for name, one in tensors.items())


def _attributes(layer: nn.Module) -> Iterator[tuple[str, str, object]]:
    """Numbers and words of its modules: (path, name, value)."""
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, _PLAIN):
                yield path, name, value
