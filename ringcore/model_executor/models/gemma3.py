"""Gemma 3, text only."""

from __future__ import annotations

import torch

from ringcore.attention.context import ForwardContext
from ringcore.checkpoint import Family, ModelSpec
from ringcore.distributed.parallel import TensorParallel
from ringcore.families.gemma3 import GEMMA3
from ringcore.model_executor.layers.rotary import Rotation
from ringcore.model_executor.models.decoder import DecoderLayer, DenseDecoder, layer_norm
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import WeightedLayer

__all__ = ["Gemma3ForCausalLM"]


class Gemma3Layer(DecoderLayer):
    """Both contributions are normalised again before the residual add (post-norms)."""

    def __init__(self, index: int, spec: ModelSpec, tp: TensorParallel, dtype: torch.dtype, family: Family) -> None:
        super().__init__(index, spec, tp, dtype, family)
        norms = family.norms
        assert norms.attention_out is not None, "a layer with post-norms"
        assert norms.mlp_out is not None, "a layer with post-norms"
        self.attention_out_norm = layer_norm(index, "attention_out_norm", norms.attention_out, spec, dtype, family)
        self.mlp_out_norm = layer_norm(index, "mlp_out_norm", norms.mlp_out, spec, dtype, family)

    def layers(self) -> list[WeightedLayer]:
        return [*super().layers(), self.attention_out_norm, self.mlp_out_norm]

    def __call__(self, hidden: Residual, rotation: Rotation, ctx: ForwardContext) -> None:
        """As `DecoderLayer`."""
        attended = self.self_attention(self.input_norm, hidden, rotation, ctx)
        self.attention_out_norm.add_to(hidden, self.self_attention.o_proj(attended))
        self.mlp_out_norm.add_to(hidden, self.mlp.down_proj(self.mlp(self.mlp_norm, hidden)))


class Gemma3ForCausalLM(DenseDecoder):
    """Sliding-window layers interleaved with full-attention layers, each kind with its own rotary embedding."""

    family = GEMMA3
    layer_class = Gemma3Layer
