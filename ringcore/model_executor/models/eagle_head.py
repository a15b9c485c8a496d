"""The head of EAGLE-3 (arXiv 2503.01840): one decoder layer that predicts the token after the next.

At position p it has features, a linear function of the residual stream of three layers of the model there, and the
embedding of the token at p + 1. Its attention is causal over what it computed at earlier positions, in a KV cache of
its own. Where it goes on from its own token, its residual stream is in the place of features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT, ForwardContext, TokenContext
from ringcore.attention.layer import Attention
from ringcore.checkpoint.draft_head import LAYER_FAMILY, NUM_TAPS, DraftHeadSpec, read_vocabulary_map
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from ringcore.model_executor.layers.linear import ColumnParallelLinear
from ringcore.model_executor.layers.norm import RMSNorm, Unnormed
from ringcore.model_executor.layers.rotary import RotaryEmbedding
from ringcore.model_executor.linear_schemes.dense import all_dense
from ringcore.model_executor.linear_schemes.shard import OutputSlice
from ringcore.model_executor.models.decoder_layer import LayerInputs
from ringcore.model_executor.models.layer_builder import LayerBuilder
from ringcore.model_executor.residual import Norm, Residual
from ringcore.model_executor.weight import SeenTensors, Tensors, Weight, WeightedLayer

__all__ = ["EagleHead"]

Embed = Callable[[torch.Tensor], torch.Tensor]  # ids [n] int64 -> a new tensor [n, hidden_size]


class _FiniteLinear(ColumnParallelLinear):
    """Zero where it is not finite: keys and values stay in pages that another layer may get."""

    def after_norm(self, norm: Norm, hidden: Residual, tokens: TokenContext) -> torch.Tensor:
        return torch.nan_to_num_(super().after_norm(norm, hidden, tokens), 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class _HeadBuilder(LayerBuilder):
    checkpoint_name: str = ""  # of the layer

    def in_model(self, name: str) -> str:
        return f"draft_head.{name}"

    def in_checkpoint(self, name: str) -> str:
        return f"{self.checkpoint_name}.{name}"

    def column_linear(self, name: str, outputs: Sequence[OutputSlice], *, bias: bool) -> ColumnParallelLinear:
        if name != "qkv_proj":
            return LayerBuilder.column_linear(self, name, outputs, bias=bias)
        num_inputs = 2 * self.spec.hidden_size  # the embedding and the features
        name = self.in_model(name)
        return _FiniteLinear(name, outputs, num_inputs, bias=bias, dtype=self.dtype, scheme_of=self.scheme_of)


class EagleHead:
    """One rank's, built without weights."""

    def __init__(
        self, head: DraftHeadSpec, index: int, tp: TensorParallel, dtype: torch.dtype, max_model_len: int, most: int
    ) -> None:
        """index: of its attention layer, after those of the model. most: the most tokens of a step of the model."""
        spec, self._spec, self._dtype, self._most = head.layer, head, dtype, most
        self.hidden_size = size = spec.hidden_size
        build = _HeadBuilder(index, spec, tp, dtype, LAYER_FAMILY, all_dense, checkpoint_name=head.layer_name)
        eps = spec.rms_norm_eps
        whole = OutputSlice("fc", size, 0, size)  # on every rank
        given = "draft_head.fc", [whole], NUM_TAPS * size
        self._fc = ColumnParallelLinear(*given, bias=False, dtype=dtype, scheme_of=all_dense)
        names = "draft_head.embed_tokens", "embed_tokens"
        own = VocabParallelEmbedding(*names, spec.vocab_size, size, dtype=dtype, tp=tp)
        self._embedding = own if head.has_embedding else None
        self._embedding_norm = build.norm("input_layernorm", "input_layernorm")
        self._features_norm = build.norm("hidden_norm", "hidden_norm")
        self._attention = build.self_attention()
        self._mlp_norm = build.norm("post_attention_layernorm", "post_attention_layernorm")
        self._mlp = build.gated_mlp()
        self._norm = RMSNorm("draft_head.norm", "norm", size, eps, dtype)
        names = "draft_head.lm_head", "lm_head"
        self._lm_head = ParallelLMHead(
            *names, head.draft_vocab_size, size, dtype=dtype, tp=tp, tied=None, scheme_of=all_dense
        )
        self._rotary, self._as_is = RotaryEmbedding(spec.head_dim, spec.rope, max_model_len), Unnormed(dtype)
        self._embed: Embed
        self._token_ids: torch.Tensor | None  # [draft_vocab_size] int64, of the draft vocabulary
        self.tapped: torch.Tensor  # [most, NUM_TAPS * hidden_size]: what the model's last forward pass has written

    @property
    def attention(self) -> Attention:
        return self._attention.attention

    def _layers(self) -> list[WeightedLayer]:
        own = [] if self._embedding is None else [self._embedding]
        norms = [self._embedding_norm, self._features_norm, self._mlp_norm, self._norm]
        return [*own, self._fc, *norms, *self._attention.layers(), *self._mlp.layers(), self._lm_head]

    def weights(self) -> list[Weight]:
        return [weight for layer in self._layers() for weight in layer.weights()]

    def bind(self, tensors: Tensors, embed: Embed) -> None:
        """embed: the model's embedding, where it has none of its own."""
        seen = SeenTensors(tensors)
        for layer in self._layers():
            layer.bind(seen)
        device = seen.device
        self._rotary.bind(device)
        self._attention.bind_device(device)
        self._mlp.bind_device(device)
        self._embed = embed if self._embedding is None else self._embedding
        ids = read_vocabulary_map(self._spec)
        self._token_ids = None if ids is None else torch.from_numpy(ids).to(device)
        self.tapped = torch.zeros(self._most, NUM_TAPS * self.hidden_size, dtype=self._dtype, device=device)

    def tap(self, layer: int, stream: Residual) -> None:
        """Called by the model before each of its layers, and after the last, with its residual stream."""
        for place, tap in enumerate(self._spec.taps):
            if tap == layer:
                columns = slice(place * self.hidden_size, (place + 1) * self.hidden_size)
                self.tapped[: len(stream), columns].copy_(stream.rows)

    def features(self, tapped: torch.Tensor) -> torch.Tensor:
        """Rows of `tapped` [n, NUM_TAPS * hidden_size] -> [n, hidden_size] float32."""
        return self._fc(tapped, NO_TOKEN_CONTEXT).float()

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """token_ids: [n] int64, those after `positions` [n] int64. features: [n, hidden_size] float32, overwritten ->
        the residual stream after the layer, likewise, which is in the place of features at the next position."""
        embedded, normed = self._embedding_norm(self._embed(token_ids).float()), self._features_norm(features)
        stream = Residual(normed.float() if self._spec.norm_before_residual else features)
        inputs = LayerInputs(ctx, [self._rotary(positions)])
        self._attention.add_to(stream, self._as_is, Residual(torch.cat((embedded, normed), 1)), inputs)
        self._mlp.add_to(stream, self._mlp_norm, stream, inputs)
        return stream.rows

    def draft(self, stream: torch.Tensor) -> torch.Tensor:
        """stream: [n, hidden_size] float32, a result of `forward`; not changed -> the likeliest tokens [n] int64."""
        places = self._lm_head(self._norm(stream), NO_TOKEN_CONTEXT).argmax(-1)
        return places if self._token_ids is None else self._token_ids[places]
