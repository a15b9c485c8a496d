"""The head of EAGLE-3 (arXiv 2503.01840): one decoder layer that predicts the token after the next.

At position p it has features, a linear function of the residual stream of three layers of the model there, and the
embedding of the token at p + 1. Its attention is causal over what it computed at earlier positions, in a KV cache of
its own. Where it goes on from its own token, its residual stream is in the place of features.
"""

from __future__ import annotations

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT, ForwardContext
from ringcore.attention.layer import Attention
from ringcore.checkpoint.eagle_head import LAYER_FAMILY, NUM_TAPS, EagleHeadSpec, read_vocabulary_map
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from ringcore.model_executor.layers.linear import ColumnParallelLinear
from ringcore.model_executor.layers.norm import RMSNorm, Unnormed
from ringcore.model_executor.layers.rotary import RotaryEmbedding
from ringcore.model_executor.linear_schemes.dense import all_dense
from ringcore.model_executor.linear_schemes.shard import OutputSlice
from ringcore.model_executor.models.decoder_layer import LayerInputs
from ringcore.model_executor.models.draft_head import DraftHead, HeadLayerBuilder, Rows
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import WeightedLayer

__all__ = ["EagleHead"]


class EagleHead(DraftHead):
    def __init__(
        self, head: EagleHeadSpec, index: int, tp: TensorParallel, dtype: torch.dtype, max_model_len: int, most: int
    ) -> None:
        """index: of its attention layer, after those of the model."""
        spec, self._spec = head.layer, head
        size, eps = spec.hidden_size, spec.rms_norm_eps
        super().__init__(size, head.taps, dtype, most)
        build = HeadLayerBuilder(
            *(index, spec, tp, dtype, LAYER_FAMILY, all_dense),
            checkpoint_name=head.layer_name,
            attention_inputs=2 * size,  # the embedding and the features
        )
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
        self._embed: Rows
        self._token_ids: torch.Tensor | None  # [draft_vocab_size] int64, of the draft vocabulary

    @property
    def attention(self) -> Attention:
        return self._attention.attention

    def _layers(self) -> list[WeightedLayer]:
        own = [] if self._embedding is None else [self._embedding]
        norms = [self._embedding_norm, self._features_norm, self._mlp_norm, self._norm]
        return [*own, self._fc, *norms, *self._attention.layers(), *self._mlp.layers(), self._lm_head]

    def _bind_model(self, device: torch.device, embed: Rows, compute_logits: Rows) -> None:
        self._rotary.bind(device)
        self._attention.bind_device(device)
        self._mlp.bind_device(device)
        self._embed = embed if self._embedding is None else self._embedding
        ids = read_vocabulary_map(self._spec)
        self._token_ids = None if ids is None else torch.from_numpy(ids).to(device)

    def features(self, tapped: torch.Tensor) -> torch.Tensor:
        return self._fc(tapped, NO_TOKEN_CONTEXT).float()

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """-> the residual stream after the layer."""
        embedded, normed = self._embedding_norm(self._embed(token_ids).float()), self._features_norm(features)
        stream = Residual(normed.float() if self._spec.norm_before_residual else features)
        inputs = LayerInputs(ctx, [self._rotary(positions)])
        self._attention.add_to(stream, self._as_is, Residual(torch.cat((embedded, normed), 1)), inputs)
        self._mlp.add_to(stream, self._mlp_norm, stream, inputs)
        return stream.rows

    def draft(self, states: torch.Tensor) -> torch.Tensor:
        places = self._lm_head(self._norm(states), NO_TOKEN_CONTEXT).argmax(-1)
        return places if self._token_ids is None else self._token_ids[places]
