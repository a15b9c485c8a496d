"""What the experts of a module of transformers compute between their two matrices, by trying it.

A module of its experts interface says how its tensors lie (`is_transposed`, `has_bias`, `has_gate`); its gate is code.
It is given rows of several magnitudes, and compared with our forms, whose limits are looked for among its numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringcore.kernels.mixtures.expert_matrices import Activate, ExpertGate

__all__ = ["ExpertForm", "form_of", "is_experts"]

_FLAGS = ("has_gate", "has_bias", "is_transposed")
_AGREES = 1e-5  # of float32; the forms differ by more than 0.01 somewhere


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """activate: an `ExpertGate` where it is recognised. is_split: each entry of its result depends on one entry of the
    gate and one of up alone, so that a rank may have a share of the intermediate size. normalise: see `experts`."""

    activate: Activate
    normalise: Activate | None
    is_split: bool

    @property
    def gate(self) -> ExpertGate | None:
        """None: its activation is an operation of its own."""
        return self.activate if isinstance(self.activate, ExpertGate) else None


def is_experts(module: nn.Module) -> bool:
    """Whether it is a module of transformers' experts interface."""
    return all(flag in vars(module) for flag in _FLAGS)


def form_of(module: Any) -> ExpertForm:
    """Of a module that may be on meta."""
    own: Activate = module._apply_gate if module.has_gate else module.act_fn
    normalise = module.post_expert_norm if vars(module).get("has_post_expert_norm") else None
    size = 32
    rows = torch.randn(48, 2 * size if module.has_gate else size, generator=torch.Generator().manual_seed(0))
    rows *= torch.tensor([0.1, 1.0, 10.0, 1000.0]).repeat(12)[:, None]
    try:
        expected = own(rows.clone())
    except RuntimeError:  # it reads weights of its own, on meta: it stays the model's, unsplit
        return ExpertForm(own, normalise, is_split=False)
    for gate in _gates(module):
        if torch.allclose(gate(rows), expected, _AGREES, _AGREES):
            return ExpertForm(gate, normalise, normalise is None)
    half = size // 2
    columns = torch.arange(half)
    first = own(rows[:, torch.cat([columns, size + columns]) if module.has_gate else columns])
    return ExpertForm(own, normalise, normalise is None and torch.equal(first, expected[:, :half]))


def _gates(module: Any) -> Iterator[ExpertGate]:
    """All that it might compute: the plain ones first."""
    if not module.has_gate:
        return
    numbers = sorted({value for value in vars(module).values() if type(value) is float})
    plain = itertools.product((False, True), (False, True))
    for is_gelu, is_interleaved in plain:
        yield ExpertGate(is_gelu=is_gelu, is_interleaved=is_interleaved)
    limits, alphas = [one for one in numbers if one > 0], [1.0, *numbers]
    for limit, alpha, offset, is_interleaved in itertools.product(limits, alphas, (0.0, 1.0), (False, True)):
        yield ExpertGate(alpha=alpha, limit=limit, offset=offset, is_interleaved=is_interleaved)
