"""A head that drafts: a decoder layer over hidden states of a model, with a KV cache of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ringcore.attention.context import ForwardContext, TokenContext
from ringcore.attention.layer import AnyAttention
from ringcore.model_executor.layers.linear import ColumnParallelLinear
from ringcore.model_executor.linear_schemes.shard import OutputSlice
from ringcore.model_executor.models.layer_builder import LayerBuilder
from ringcore.model_executor.residual import Norm, Residual
from ringcore.model_executor.weight import SeenTensors, Tensors, Weight, WeightedLayer

__all__ = ["DraftHead", "HeadLayerBuilder"]

Rows = Callable[[torch.Tensor], torch.Tensor]  # [n] or [n, size] -> [n, size]


class _FiniteLinear(ColumnParallelLinear):
    """Zero where it is not finite: keys and values stay in pages that another layer may get."""

    def after_norm(self, norm: Norm, hidden: Residual, tokens: TokenContext) -> torch.Tensor:
        return torch.nan_to_num_(super().after_norm(norm, hidden, tokens), 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class HeadLayerBuilder(LayerBuilder):
    """Of the layer of a head."""

    checkpoint_name: str = ""  # of the layer
    attention_inputs: int = 0  # that q, k and v are computed from

    def in_model(self, name: str) -> str:
        return f"draft_head.{name}"

    def in_checkpoint(self, name: str) -> str:
        return f"{self.checkpoint_name}.{name}"

    def column_linear(self, name: str, outputs: Sequence[OutputSlice], *, bias: bool) -> ColumnParallelLinear:
        if name != "qkv_proj":
            return LayerBuilder.column_linear(self, name, outputs, bias=bias)
        given = self.in_model(name), outputs, self.attention_inputs
        return _FiniteLinear(*given, bias=bias, dtype=self.dtype, scheme_of=self.scheme_of)


class DraftHead(ABC):
    """One rank's, built without weights. At position p it has what the model has computed there and the token at p + 1,
    and predicts the token at p + 2; from its own token it goes on with what it has computed itself."""

    tapped: torch.Tensor  # [most, taps * hidden_size]: what the model's last forward pass has written

    def __init__(self, hidden_size: int, taps: Sequence[int], dtype: torch.dtype, most: int) -> None:
        """taps: the layers of the model before which its residual stream is taken, that many being after the last, and
        one more after the final norm. most: the most tokens of a step of the model."""
        self.hidden_size, self.taps, self._dtype, self._most = hidden_size, tuple(taps), dtype, most

    @property
    @abstractmethod
    def attention(self) -> AnyAttention: ...

    @abstractmethod
    def _layers(self) -> list[WeightedLayer]: ...

    @abstractmethod
    def _bind_model(self, device: torch.device, embed: Rows, compute_logits: Rows) -> None:
        """After the weights are bound."""

    def weights(self) -> list[Weight]:
        return [weight for layer in self._layers() for weight in layer.weights()]

    def bind(self, tensors: Tensors, embed: Rows, compute_logits: Rows, updatable: bool = False) -> None:
        """embed, compute_logits: the model's. updatable: see `CausalLM.bind`."""
        seen = SeenTensors(tensors)
        for layer in self._layers():
            layer.bind(seen, updatable)
        self._bind_model(seen.device, embed, compute_logits)
        width = len(self.taps) * self.hidden_size
        self.tapped = torch.zeros(self._most, width, dtype=self._dtype, device=seen.device)

    def refresh(self) -> None:
        """See `CausalLM.refresh`."""
        for layer in self._layers():
            layer.refresh()

    def tap(self, layer: int, rows: torch.Tensor) -> None:
        """Called by the model before each of `taps`, after its last layer and after its final norm, with its residual
        stream or what was made of it, [n, hidden_size]."""
        for place, tap in enumerate(self.taps):
            if tap == layer:
                self.tapped[: len(rows), place * self.hidden_size : (place + 1) * self.hidden_size].copy_(rows)

    @abstractmethod
    def features(self, tapped: torch.Tensor) -> torch.Tensor:
        """Rows of `tapped` -> [n, hidden_size] float32."""

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """token_ids: [n] int64, those after `positions` [n] int64. features: [n, hidden_size] float32, overwritten ->
        what is in the place of features at the next position, likewise."""

    @abstractmethod
    def draft(self, states: torch.Tensor) -> torch.Tensor:
        """states: [n, hidden_size] float32, a result of `forward`; not changed -> the likeliest tokens [n] int64."""
