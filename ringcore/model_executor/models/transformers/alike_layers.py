"""Layers of a body that compute the same: a recorded pass computes one of them, and the others give what it gave.

Two entries of a list of layers are alike if their modules have the same classes, sizes and attributes. An attribute
that is the place of the entry in the list (`layer_idx`) may differ if nothing reads it while the layer is computed. A
layer is not computed if it is given what one that is alike was given: the same objects, but for one tensor, of which
the pass knows the size alone (the hidden states).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["Journal", "RepeatedLayers", "lists_of"]

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has

_Attribute = tuple[str, str]  # the path of the module within its layer, and the name


@dataclass(frozen=True, slots=True)
class Journal:
    """What a pass notes while a layer is computed, in order. moved: an entry as another layer would have noted it, by
    that one's modules by those of the one that was computed; None: as it is."""

    entries: list[Any]
    moved: Callable[[Any, Mapping[nn.Module, nn.Module]], Any] | None = None


@dataclass(frozen=True, slots=True)
class _Given:
    """In the place of a result: the argument at this place, as a leaf."""

    place: int


@dataclass(frozen=True, slots=True)
class _Computed:
    """What a layer was given and what came of it, as leaves."""

    given: Sequence[Any]
    structure: TreeSpec
    results: Sequence[Any]
    of_results: TreeSpec
    noted: Sequence[Sequence[Any]]  # by journal


class RepeatedLayers:
    """found: by name, the layers that were not computed, with the one that was."""

    def __init__(
        self, body: nn.Module, journals: Sequence[Journal], has_size_alone: Callable[[torch.Tensor], bool]
    ) -> None:
        """has_size_alone: whether a pass knows nothing more of a tensor."""
        self.found: dict[str, str] = {}
        self._journals, self._has_size_alone = journals, has_size_alone
        self._computed: dict[nn.Module, _Computed] = {}
        self._names = {module: name for name, module in body.named_modules()}
        self._entries = {id(journal.entries) for journal in journals}
        self._kinds = [kind for layers in lists_of(body) for kind in _kinds(layers)]

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Within it they are not computed."""
        layers: list[nn.Module] = []
        try:
            for kind, indices in self._kinds:
                first, *others = kind
                vars(first)["forward"] = self._computes(first, indices, first.forward)
                for layer in others:
                    vars(layer)["forward"] = self._repeats(layer, first, layer.forward)
                layers += kind
            yield
        finally:
            for layer in layers:
                del vars(layer)["forward"]

    def _computes(
        self, layer: nn.Module, indices: Collection[_Attribute], own: Callable[..., Any]
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given, structure = self._flat((args, kwargs))
            before = [len(journal.entries) for journal in self._journals]
            with _watched(layer, indices) as read:
                out = own(*args, **kwargs)
            results, of_results = tree_flatten(out)
            places = {id(leaf): _Given(place) for place, leaf in enumerate(given) if isinstance(leaf, torch.Tensor)}
            results = [places.get(id(one), one) for one in results]
            if not read and all(self._is_repeatable(one) for one in results):
                noted = [journal.entries[start:] for journal, start in zip(self._journals, before, strict=True)]
                self._computed[layer] = _Computed(given, structure, results, of_results, noted)
            return out

        return forward

    def _repeats(self, layer: nn.Module, first: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given, structure = self._flat((args, kwargs))
            computed = self._computed.get(first)
            if computed is None or structure != computed.structure or not self._are_same(given, computed.given):
                return own(*args, **kwargs)
            self.found[self._names[layer]] = self._names[first]
            modules = dict(zip(first.modules(), layer.modules(), strict=True))
            for journal, noted in zip(self._journals, computed.noted, strict=True):
                moved = journal.moved
                journal.entries.extend(noted if moved is None else [moved(entry, modules) for entry in noted])
            return tree_unflatten([_again(one, given) for one in computed.results], computed.of_results)

        return forward

    def _flat(self, arguments: object) -> tuple[list[Any], TreeSpec]:
        """A journal that is handed down is one leaf."""
        return tree_flatten(arguments, is_leaf=lambda leaf: id(leaf) in self._entries)

    def _are_same(self, given: Sequence[Any], others: Sequence[Any]) -> bool:
        differing = [pair for pair in zip(given, others, strict=True) if not _is_same(*pair)]
        return len(differing) <= 1 and all(self._have_same_size(*pair) for pair in differing)

    def _have_same_size(self, one: object, other: object) -> bool:
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return False
        is_alike = (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        return is_alike and self._has_size_alone(one) and self._has_size_alone(other)

    def _is_repeatable(self, result: object) -> bool:
        if isinstance(result, torch.Tensor):
            return self._has_size_alone(result)
        return isinstance(result, (_Given, *_PLAIN))


def _is_same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)


def _again(result: object, given: Sequence[Any]) -> object:
    if isinstance(result, _Given):
        return given[result.place]
    return torch.empty_like(result) if isinstance(result, torch.Tensor) else result


def lists_of(module: nn.Module) -> Iterator[nn.ModuleList]:
    """The lists of layers in it that are in no other one."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from lists_of(child)


def _kinds(layers: nn.ModuleList) -> list[tuple[list[nn.Module], Collection[_Attribute]]]:
    """Two layers or more that are alike, and the attributes that are their places."""
    indices = _indices(layers)
    kinds: dict[object, list[nn.Module]] = {}
    for layer in dict.fromkeys(layers):
        if "forward" in vars(layer):
            continue
        kinds.setdefault(_kind(layer, indices), []).append(layer)
    return [(kind, indices) for kind in kinds.values() if len(kind) > 1]


def _indices(layers: nn.ModuleList) -> set[_Attribute]:
    """The attributes that are the place of their layer in each that has them."""
    found, others = set[_Attribute](), set[_Attribute]()
    for place, layer in enumerate(layers):
        for path, module in layer.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    (found if value == place else others).add((path, name))
    return found - others


def _kind(layer: nn.Module, indices: Collection[_Attribute]) -> object:
    """The same of two layers that are alike."""
    return tuple(
        (
            path,
            type(module),
            _sizes(module._parameters),
            _sizes(module._buffers),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            tuple(
                (name, _value(value))
                for name, value in vars(module).items()
                if name not in _OF_MODULES and (path, name) not in indices
            ),
        )
        for path, module in layer.named_modules()
    )


def _sizes(tensors: Mapping[str, torch.Tensor | None]) -> object:
    return tuple((name, None if one is None else (one.shape, one.dtype)) for name, one in tensors.items())


def _value(value: object) -> object:
    """Of an attribute: equal where that is. What is no number, word or list is the same object or not equal."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), *map(_value, value)
    if isinstance(value, dict):
        return type(value), *((_value(key), _value(one)) for key, one in value.items())
    if isinstance(value, partial):
        return type(value), value.func, _value(value.args), _value(value.keywords)
    return type(value), id(value)


@contextmanager
def _watched(layer: nn.Module, attributes: Collection[_Attribute]) -> Iterator[set[_Attribute]]:
    """Notes which of these attributes are read: for its time the classes of their modules have properties."""
    read = set[_Attribute]()

    def noted(attribute: _Attribute) -> property:
        def look(module: nn.Module) -> object:
            read.add(attribute)
            return vars(module)[attribute[1]]

        return property(look)

    classes: dict[nn.Module, type[nn.Module]] = {}
    try:
        for path, module in layer.named_modules():
            names = [name for of_path, name in attributes if of_path == path and name in vars(module)]
            own = {name: noted((path, name)) for name in names}
            if own:
                classes[module] = type(module)
                object.__setattr__(module, "__class__", type(type(module).__name__, (type(module),), own))
        yield read
    finally:
        for module, of_module in classes.items():
            object.__setattr__(module, "__class__", of_module)
