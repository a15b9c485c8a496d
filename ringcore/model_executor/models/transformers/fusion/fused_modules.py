"""Our sublayers and norms as modules, in layers that are not ours as a whole: the residual stream is the model's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ringcore.attention.context import ForwardContext
from ringcore.model_executor.layers.layer_norm import LayerNorm
from ringcore.model_executor.layers.norm import AnyNorm, RMSNorm
from ringcore.model_executor.models.decoder_layer import GatedMLP, LayerInputs, PlainMLP, SelfAttention
from ringcore.model_executor.models.latent_self_attention import LatentSelfAttention
from ringcore.model_executor.models.transformers.fusion.forward_pass import ForwardPass
from ringcore.model_executor.models.transformers.handed_down import handed_down
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import WeightedLayer

__all__ = ["FusedAttention", "FusedMLP", "FusedNorm"]

_NO_CONTEXT = ForwardContext((), {}, {})


class FusedAttention(nn.Module):
    def __init__(
        self, sublayer: SelfAttention | LatentSelfAttention, unnormed: AnyNorm, num_results: int | None
    ) -> None:
        """num_results: of the tuple that the model's own returns, of which all but the first are None; None: a
        tensor."""
        super().__init__()
        self.sublayer, self._unnormed, self._num_results = sublayer, unnormed, num_results

    def forward(self, *args: Any, ringcore: ForwardPass | None = None, **kwargs: Any) -> Any:
        """Its first argument is the hidden rows [1, num_tokens, hidden_size]."""
        hidden: torch.Tensor = next(iter((*args, *kwargs.values())))
        given: ForwardPass = handed_down(ringcore, *args, *kwargs.values())
        inputs = LayerInputs(given.ctx, given.rotations)
        out = self.sublayer(self._unnormed, Residual(hidden[0]), inputs)[None]
        return out if self._num_results is None else (out, *[None] * (self._num_results - 1))

    def weighted(self) -> list[WeightedLayer]:
        return self.sublayer.layers()

    def bind_device(self, device: torch.device) -> None:
        self.sublayer.bind_device(device)


class FusedMLP(nn.Module):
    def __init__(self, sublayer: GatedMLP | PlainMLP, unnormed: AnyNorm) -> None:
        super().__init__()
        self.sublayer, self._unnormed = sublayer, unnormed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size], as its result."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        return self.sublayer(self._unnormed, Residual(rows), LayerInputs(_NO_CONTEXT, ())).view(hidden.shape)

    def add_to(self, stream: Residual, rows: torch.Tensor) -> None:
        """stream [n, hidden_size] += self(rows)."""
        self.sublayer.add_to(stream, self._unnormed, Residual(rows), LayerInputs(_NO_CONTEXT, ()))

    def weighted(self) -> list[WeightedLayer]:
        return self.sublayer.layers()

    def bind_device(self, device: torch.device) -> None:
        self.sublayer.bind_device(device)


class FusedNorm(nn.Module):
    def __init__(self, norm: RMSNorm | LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size], as its result."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()  # some models normalise a slice of a projection
        return self.norm(rows).view(x.shape)

    def weighted(self) -> list[WeightedLayer]:
        return [self.norm]

    def bind_device(self, device: torch.device) -> None:
        pass
