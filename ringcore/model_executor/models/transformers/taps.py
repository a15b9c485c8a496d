"""Hidden states of a model's layers, for a head that drafts: hooks around them call its `tap`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringcore.model_executor.models.draft_head import DraftHead
from ringcore.model_executor.models.transformers.body import Body
from ringcore.model_executor.models.transformers.fusion.forward_pass import pass_of
from ringcore.model_executor.models.transformers.fusion.fused_layer import FusedLayer
from ringcore.model_executor.models.transformers.refusal import Refused

__all__ = ["tap_layers"]


def tap_layers(body: Body, layers: Sequence[str], num_layers: int, head: DraftHead) -> None:
    """layers: their names in the body, which has our layers. Raises `Refused` where they are not all known, and for a
    model whose embeddings heads are not trained for."""
    body.check_table()
    if len(layers) != num_layers:
        reason = f"{num_layers - len(layers)} of its layers are in no list of layers, whose hidden states are read"
        raise Refused(f"{reason} for a head that drafts")
    for tap in head.taps:
        if tap < num_layers:
            layer = body.module.get_submodule(layers[tap])
            layer.register_forward_pre_hook(_Before(head, tap), with_kwargs=True)
        elif tap == num_layers:
            body.module.get_submodule(layers[-1]).register_forward_hook(_After(head, tap), with_kwargs=True)


@dataclass(frozen=True, slots=True)
class _Before:
    head: DraftHead
    tap: int

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream = pass_of(args, kwargs).stream
        if stream is not None and isinstance(layer, FusedLayer):
            self.head.tap(self.tap, layer.in_units_of_body(stream))
        else:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.head.tap(self.tap, hidden[0])


@dataclass(frozen=True, slots=True)
class _After:
    """The last layer: its output before the final norm, which our layer computes too."""

    head: DraftHead
    tap: int

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(layer, FusedLayer):
            stream = pass_of(args, kwargs).ended
            assert stream is not None
            rows: torch.Tensor = layer.in_units_of_body(stream)
        else:
            rows = (output[0] if isinstance(output, tuple) else output)[0]
        self.head.tap(self.tap, rows)
