"""A sublayer that stays the model's own module, on the residual stream of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringcore.model_executor.layers.norm import AnyNorm
from ringcore.model_executor.models.decoder_layer import LayerInputs, Sublayer
from ringcore.model_executor.residual import NormedRows, Residual
from ringcore.model_executor.weight import WeightedLayer

__all__ = ["Argument", "Arguments", "ModuleInputs", "ModuleSublayer"]


@dataclass(frozen=True, slots=True)
class Argument:
    """A constant, or the argument of the layer under `key`: a position or a keyword."""

    key: int | str | None
    constant: object = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of a sublayer's call in its layer, but the first, which is the hidden rows. hidden: its keyword, None where
    it is passed by position."""

    hidden: str | None
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]


@dataclass(frozen=True, slots=True)
class ModuleInputs(LayerInputs):
    """And the arguments of the layer."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


class ModuleSublayer(Sublayer):
    def __init__(self, module: nn.Module, arguments: Arguments) -> None:
        self._module, self._arguments = module, arguments

    def layers(self) -> list[WeightedLayer]:
        return []  # its tensors are those of the model

    def __call__(self, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        assert isinstance(inputs, ModuleInputs)
        rows, given = hidden.normed(norm)[None], self._arguments
        args = [_value(argument, inputs) for argument in given.args]
        kwargs = {name: _value(argument, inputs) for name, argument in given.kwargs.items()}
        if given.hidden is None:
            args.insert(0, rows)
        else:
            kwargs[given.hidden] = rows
        out = self._module(*args, **kwargs)
        contribution: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return contribution.view(rows.shape)[0]  # some experts return one row a token

    def add_to(self, stream: Residual, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> None:
        """By the `BoundMixture` of a module that has one."""
        mixture = vars(self._module).get("ringcore")
        if mixture is not None:
            mixture.add_to(stream, NormedRows(hidden, norm))
        else:
            super().add_to(stream, norm, hidden, inputs)


def _value(argument: Argument, inputs: ModuleInputs) -> Any:
    match argument.key:
        case None:
            return argument.constant
        case int():
            return inputs.args[argument.key]
        case str():
            assert inputs.kwargs is not None
            return inputs.kwargs[argument.key]
