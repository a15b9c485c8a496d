"""Logits from hidden rows: the model's own forward pass over another body."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from ringcore.model_executor.models.transformers.body import Body
from ringcore.model_executor.models.transformers.meta_shapes import MetaShapes
from ringcore.model_executor.models.transformers.refusal import Refused, in_one_line

__all__ = ["check_head", "head_of", "logits_of"]


class _BodyOutput(MoeModelOutputWithPast):  # type: ignore[misc]  # transformers is not type-checked
    """Hidden states alone: of all else that a head may pass on to its caller there is none."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenHidden(nn.Module):
    """Stands for a model's body in its head: the hidden states that it is given are the result."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **_: Any) -> _BodyOutput:
        return _BodyOutput(last_hidden_state=inputs_embeds)


def head_of(body: Body) -> PreTrainedModel:
    """What the model computes after its body (projection, scale, softcap), as a module that shares its parts."""
    return body.replaced(_GivenHidden())


def logits_of(head: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """hidden: [n, hidden_size] -> [n, vocab_size]."""
    logits: torch.Tensor = head(inputs_embeds=hidden[None], use_cache=False).logits[0]
    return logits


def check_head(head: PreTrainedModel, linear: nn.Module | None, hidden_size: int, vocab_size: int) -> bool:
    """Whether the logits are the linear's product of hidden rows, with nothing before or after it. linear: of the head,
    on meta. Raises `Refused` for a head that needs more than hidden rows."""
    hidden = torch.empty(3, hidden_size, dtype=head.config.dtype, device="meta")
    products: list[torch.Tensor] = []

    def note(_: nn.Module, args: tuple[torch.Tensor, ...], product: torch.Tensor) -> None:
        if args[0]._base is hidden:  # or what a transform made of it
            products.append(product)

    try:
        with MetaShapes(), linear.register_forward_hook(note) if linear else nullcontext():
            logits = head(inputs_embeds=hidden[None], use_cache=False).logits
        shape = tuple(logits[0].shape)
    except Exception as error:  # whatever the model's own code raises
        raise Refused(f"its logits need more than the last hidden states: {in_one_line(error)}") from error
    if shape != (3, vocab_size):
        raise Refused(f"it has {shape[-1]} logits, but its configuration says vocab_size {vocab_size}")
    return any(product is logits for product in products)
