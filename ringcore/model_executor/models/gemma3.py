"""Gemma 3, text only."""

from __future__ import annotations

import torch

from ringcore.attention.context import ForwardContext
from ringcore.checkpoint import ModelSpec
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.layers.rotary import Rotation
from ringcore.model_executor.models.decoder import DecoderLayer, DenseDecoder, Family, layer_norm
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import WeightedLayer

__all__ = ["Gemma3ForCausalLM"]


class Gemma3Layer(DecoderLayer):
    """Both contributions are normalised again before the residual add (post-norms)."""

    mlp_norm_name = "pre_feedforward_layernorm"

    def __init__(self, index: int, spec: ModelSpec, tp: TensorParallel, dtype: torch.dtype, family: Family) -> None:
        super().__init__(index, spec, tp, dtype, family)
        self.attention_out_norm = layer_norm(
            index, "attention_out_norm", "post_attention_layernorm", spec, dtype, family
        )
        self.mlp_out_norm = layer_norm(index, "mlp_out_norm", "post_feedforward_layernorm", spec, dtype, family)

    def layers(self) -> list[WeightedLayer]:
        return [*super().layers(), self.attention_out_norm, self.mlp_out_norm]

    def __call__(self, hidden: Residual, rotation: Rotation, ctx: ForwardContext) -> None:
        """As `DecoderLayer`."""
        attended = self.self_attention(self.input_norm, hidden, rotation, ctx)
        self.attention_out_norm.add_to(hidden, self.self_attention.o_proj(attended))
        self.mlp_out_norm.add_to(hidden, self.mlp.down_proj(self.mlp(self.mlp_norm, hidden)))


class Gemma3ForCausalLM(DenseDecoder):
    """Sliding-window layers interleaved with full-attention layers, each kind with its own rotary embedding."""

    family = Family(head_norm=True, norm_plus_one=True, activation="gelu_tanh")
    layer_class = Gemma3Layer

    def __init__(self, spec: ModelSpec, tp: TensorParallel, dtype: torch.dtype, max_model_len: int) -> None:
        super().__init__(spec, tp, dtype, max_model_len)
        # Rounded as the model was trained: the root of 1152 is 34 in bfloat16.
        self._embedding_scale = float(torch.tensor(spec.hidden_size**0.5).to(dtype))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids).mul_(self._embedding_scale)
