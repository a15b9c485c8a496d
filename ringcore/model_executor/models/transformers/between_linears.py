"""Whether a rank can compute its share of what lies between the linears of a module that the plan splits."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["is_share_by_share"]

_ROWS = 3
_TOLERANCE = 1e-4


def is_share_by_share(module: nn.Module, column: Iterable[str], row: Iterable[str], size: int) -> bool:
    """Whether the inputs of its `row` linears, from a first share of the outputs of its `column` linears, are the first
    share of what they are from all outputs. Activations and gates are; Gemma 3n's sparse ones, whose threshold is that
    of a whole row, are not. True also where it cannot be tried: its other tensors have no values yet.

    column, row: names of its children, each an nn.Linear that `size` divides.
    """
    with torch.device("cpu"), torch.no_grad():  # the model may be built on meta
        generator = torch.Generator().manual_seed(0)
        outputs = {name: _random_rows(_linear(module, name).out_features, generator) for name in column}
        shares = {name: rows[..., : rows.shape[-1] // size] for name, rows in outputs.items()}
        x = _random_rows(_linear(module, next(iter(outputs))).in_features, generator)
        names = list(row)
        try:
            whole, share = (_inputs(module, x, given, names) for given in (outputs, shares))
        except Exception:  # whatever a module asks of what stands for its linears
            return True
    return all(
        torch.allclose(one, every[..., : one.shape[-1]], rtol=_TOLERANCE, atol=_TOLERANCE)
        for one, every in zip(share, whole, strict=True)
    )


def _linear(module: nn.Module, name: str) -> nn.Linear:
    linear = module.get_submodule(name)
    assert isinstance(linear, nn.Linear), name
    return linear


def _random_rows(width: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(1, _ROWS, width, generator=generator)


def _inputs(
    module: nn.Module, x: torch.Tensor, outputs: dict[str, torch.Tensor], names: list[str]
) -> list[torch.Tensor]:
    """Of the linears `names`, where others have these outputs."""
    seen = {name: _Seen(_linear(module, name).out_features) for name in names}
    given = {name: _Given(rows) for name, rows in outputs.items()}
    trial = copy.copy(module)
    trial._modules = {**module._modules, **given, **seen}
    trial(x)
    return [seen[name].rows for name in names]


class _Given(nn.Module):
    """In place of a linear: these outputs."""

    def __init__(self, outputs: torch.Tensor) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._outputs


class _Seen(nn.Module):
    """In place of a linear: keeps its inputs."""

    rows: torch.Tensor

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self._num_outputs = num_outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = x
        return x.new_zeros(*x.shape[:-1], self._num_outputs)
