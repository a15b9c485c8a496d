"""A layer of multi-token prediction of the model's checkpoint (DeepSeek-V3, arXiv 2412.19437, in MiMo's form): a
decoder layer over the model's residual stream after its last layer and the embedding of the next token. Embedding and
LM head are the model's."""

from __future__ import annotations

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT, ForwardContext
from ringcore.attention.layer import Attention
from ringcore.checkpoint import Family
from ringcore.checkpoint.mtp_head import MtpHeadSpec
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.layers.linear import ColumnParallelLinear
from ringcore.model_executor.layers.rotary import RotaryEmbedding
from ringcore.model_executor.linear_schemes.dense import all_dense
from ringcore.model_executor.linear_schemes.shard import OutputSlice
from ringcore.model_executor.models.decoder_layer import DecoderLayer, LayerInputs
from ringcore.model_executor.models.draft_head import DraftHead, HeadLayerBuilder, Rows
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import WeightedLayer

__all__ = ["MtpHead"]


class MtpHead(DraftHead):
    def __init__(
        self,
        head: MtpHeadSpec,
        family: Family,
        index: int,
        tp: TensorParallel,
        dtype: torch.dtype,
        max_model_len: int,
        most: int,
    ) -> None:
        """index: of its attention layer, after those of the model."""
        spec = head.layer
        size = spec.hidden_size
        super().__init__(size, [spec.num_layers], dtype, most)
        build = HeadLayerBuilder(
            *(index, spec, tp, dtype, family, all_dense), checkpoint_name=head.layer_name, attention_inputs=size
        )
        self._embedding_norm = build.norm("token_norm", "token_layernorm")
        self._features_norm = build.norm("hidden_norm", "hidden_layernorm")
        whole = OutputSlice(build.in_checkpoint("input_proj"), size, 0, size)  # on every rank
        given = build.in_model("input_proj"), [whole], 2 * size
        self._input_proj = ColumnParallelLinear(*given, bias=False, dtype=dtype, scheme_of=all_dense)
        names = family.norms
        norms = build.norm("input_norm", names.input), build.norm("mlp_norm", names.mlp)
        self._layer = DecoderLayer(norms[0], build.self_attention(), norms[1], build.gated_mlp())
        self._norm = build.norm("norm", "final_layernorm")
        self._rotary = RotaryEmbedding(spec.head_dim, spec.rope, max_model_len)
        self._embed: Rows
        self._compute_logits: Rows

    @property
    def attention(self) -> Attention:
        (attention,) = self._layer.attention_layers()
        assert isinstance(attention, Attention)
        return attention

    def _layers(self) -> list[WeightedLayer]:
        inputs = [self._embedding_norm, self._features_norm, self._input_proj]
        return [*inputs, *self._layer.layers(), self._norm]

    def _bind_model(self, device: torch.device, embed: Rows, compute_logits: Rows) -> None:
        self._rotary.bind(device)
        self._layer.bind_device(device)
        self._embed, self._compute_logits = embed, compute_logits

    def features(self, tapped: torch.Tensor) -> torch.Tensor:
        return tapped.float()

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """-> the normalised output of the layer. At position 0 the embedding counts as 0."""
        embedded = self._embed(token_ids).float().masked_fill_(positions[:, None] == 0, 0)
        both = torch.cat((self._features_norm(features), self._embedding_norm(embedded)), 1)
        stream = Residual(self._input_proj(both, NO_TOKEN_CONTEXT).float())
        self._layer(stream, LayerInputs(ctx, [self._rotary(positions)]))
        return stream.normed(self._norm).float()

    def draft(self, states: torch.Tensor) -> torch.Tensor:
        return self._compute_logits(states.to(self._dtype)).argmax(-1)
