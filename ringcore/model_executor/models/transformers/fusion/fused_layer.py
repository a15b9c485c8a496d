"""Our decoder layer as a module, in the place of the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ringcore.model_executor.layers.norm import AnyNorm
from ringcore.model_executor.models.decoder_layer import DecoderLayer
from ringcore.model_executor.models.persistent_decoder import PersistentDecoder
from ringcore.model_executor.models.transformers.fusion.forward_pass import ForwardPass
from ringcore.model_executor.models.transformers.fusion.module_sublayer import ModuleInputs
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import WeightedLayer

__all__ = ["FusedLayer"]


class FusedLayer(nn.Module):
    """Our layer, called as the model's. Several in a row share one residual stream, float32 whatever the dtype, in
    units of `scale`."""

    def __init__(
        self,
        layer: DecoderLayer,
        replaced: nn.Module,
        *,
        scale: float,
        continues: bool,
        is_continued: bool,
        final_norm: AnyNorm | None,
        num_results: int | None,
    ) -> None:
        """replaced: the model's layer, whose other attributes a body may read. continues, is_continued: whether the
        stream is that of the layer before, and goes on in the next. final_norm: of the body, after the last layer.
        num_results: of the tuple that it returns; None: a tensor."""
        super().__init__()
        self.layer, self.final_norm, self.scale = layer, final_norm, scale
        self._continues, self._is_continued = continues, is_continued
        self._num_results = num_results
        self._all_layers: PersistentDecoder | None = None
        for name, value in vars(replaced).items():
            if isinstance(value, str | int | float) and name not in vars(self):
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *args: Any, ringcore: ForwardPass, **kwargs: Any) -> Any:
        """hidden_states: [1, num_tokens, hidden_size]; not read where the stream continues."""
        stream = ringcore.stream
        if not self._continues or stream is None:
            stream = Residual(hidden_states[0].to(torch.float32, copy=True))
            if self.scale != 1:
                stream.rows.div_(self.scale)
        given = kwargs | {"ringcore": ringcore}
        inputs = ModuleInputs(ringcore.ctx, ringcore.rotations, (hidden_states, *args), given)
        if self._all_layers is not None:
            ringcore.is_computed = self._all_layers(stream, inputs)
        if not ringcore.is_computed:
            self.layer(stream, inputs)
        ringcore.stream, ringcore.ended = (stream if self._is_continued else None), stream
        out = hidden_states if self._is_continued else self._left(stream, hidden_states.dtype)
        return out if self._num_results is None else (out,)

    def begin_with(self, following: Sequence[FusedLayer]) -> None:
        """Once all are bound: this layer computes those that follow it too, in steps in which one launch can. They are
        the others of the body, and continue its stream."""
        if all(layer._continues for layer in following):
            self._all_layers = PersistentDecoder.of([self.layer, *(layer.layer for layer in following)])

    def _left(self, stream: Residual, dtype: torch.dtype) -> torch.Tensor:
        """What the body reads of the stream: [1, num_tokens, hidden_size]."""
        if self.final_norm is not None:
            return stream.normed(self.final_norm)[None]
        return self.in_units_of_body(stream).to(dtype)[None]

    def in_units_of_body(self, stream: Residual) -> torch.Tensor:
        """[num_tokens, hidden_size] float32."""
        return stream.rows if self.scale == 1 else stream.rows * self.scale

    def weighted(self) -> list[WeightedLayer]:
        return [*self.layer.layers(), *([] if self.final_norm is None else [self.final_norm])]

    def bind_device(self, device: torch.device) -> None:
        self.layer.bind_device(device)
