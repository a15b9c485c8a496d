"""The dense decoder that all families share: pre-norm, rotary attention over KV heads, a gated MLP."""

from __future__ import annotations

from typing import ClassVar

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT, ForwardContext, TokenContext
from ringcore.checkpoint import Family, ModelSpec
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from ringcore.model_executor.layers.norm import RMSNorm
from ringcore.model_executor.layers.rotary import RotaryEmbedding
from ringcore.model_executor.linear_schemes.scheme import SchemeOf
from ringcore.model_executor.models.base import CausalLM
from ringcore.model_executor.models.decoder_layer import DecoderLayer, LayerInputs
from ringcore.model_executor.models.layer_builder import LayerBuilder
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import Tensors, Weight, WeightedLayer

__all__ = ["DenseDecoder"]


class DenseDecoder(CausalLM):
    """The whole model; a family sets its record and, where a layer computes something else, composes its layers."""

    family: ClassVar[Family]

    def __init__(
        self, spec: ModelSpec, tp: TensorParallel, dtype: torch.dtype, max_model_len: int, scheme_of: SchemeOf
    ) -> None:
        size = spec.hidden_size
        self.vocab_size = spec.vocab_size
        self.embed_tokens = VocabParallelEmbedding(
            "embed_tokens", "model.embed_tokens", spec.vocab_size, size, dtype=dtype, tp=tp
        )
        # Rounded as the model was trained: the root of 1152 is 34 in bfloat16.
        scale = float(torch.tensor(size**0.5).to(dtype))
        self._embedding_scale = scale if self.family.scaled_embeddings else None
        ropes = [spec.rope] if spec.sliding_rope is None else [spec.rope, spec.sliding_rope]
        self.rotaries = [RotaryEmbedding(spec.head_dim, rope, max_model_len) for rope in ropes]
        self.layers = [
            self.build_layer(LayerBuilder(index, spec, tp, dtype, self.family, scheme_of))
            for index in range(spec.num_layers)
        ]
        self.norm = RMSNorm("norm", "model.norm", size, spec.rms_norm_eps, dtype, plus_one=self.family.norm_plus_one)
        tied = self.embed_tokens if spec.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(
            "lm_head", "lm_head", spec.vocab_size, size, dtype=dtype, tp=tp, tied=tied, scheme_of=scheme_of
        )
        self.attention_layers = [attention for layer in self.layers for attention in layer.attention_layers()]

    def build_layer(self, build: LayerBuilder) -> DecoderLayer:
        """One layer: a family with other sublayers composes them here."""
        names = build.family.norms
        return DecoderLayer(
            build.norm("input_norm", names.input),
            build.post_normed(build.self_attention(), "attention_out_norm", names.attention_out),
            build.norm("mlp_norm", names.mlp),
            build.post_normed(build.gated_mlp(), "mlp_out_norm", names.mlp_out),
        )

    def _weighted(self) -> list[WeightedLayer]:
        """Every layer with weights, the embedding before the LM head that may share its table."""
        inner = [weighted for layer in self.layers for weighted in layer.layers()]
        return [self.embed_tokens, *inner, self.norm, self.lm_head]

    def weights(self) -> list[Weight]:
        return [weight for layer in self._weighted() for weight in layer.weights()]

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        """Pops from `tensors` layer by layer, so that a weight and its packed copy coexist only briefly."""
        for layer in self._weighted():
            layer.bind(tensors, updatable)
        device = self.embed_tokens.table.device
        for rotary in self.rotaries:
            rotary.bind(device)
        for decoder_layer in self.layers:
            decoder_layer.bind_device(device)
        assert not len(tensors), "a declared weight was not bound"

    def refresh(self) -> None:
        for layer in self._weighted():
            layer.refresh()

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [n] int64 -> a new tensor [n, hidden_size], the input of the first layer."""
        embedded = self.embed_tokens(input_ids)
        return embedded if self._embedding_scale is None else embedded.mul_(self._embedding_scale)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids and positions: [num_tokens] int64 -> hidden states [num_tokens, hidden_size], normalised."""
        inputs = LayerInputs(ctx, [rotary(positions) for rotary in self.rotaries])
        # The residual stream is float32 whatever the dtype: each layer adds to it twice, and 16 bits would round it
        # each time. In a simulation of every rounding, SmolLM2's log-probabilities in bfloat16 are 0.0165 off in the
        # mean with a stream of bfloat16, and 0.0082 with this one.
        hidden = Residual(self.embed(input_ids).float())
        for layer in self.layers:
            layer(hidden, inputs)
        return hidden.normed(self.norm)

    def compute_logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None, tokens: TokenContext = NO_TOKEN_CONTEXT
    ) -> torch.Tensor:
        """hidden: [n, hidden_size] -> logits [n, vocab_size], float32, complete and equal on every rank; in `out`,
        contiguous, where given. tokens: of the rows of `hidden`."""
        return self.lm_head(hidden, tokens, out)
