"""A layer of multi-token prediction of the model's checkpoint (DeepSeek-V3, arXiv 2412.19437): a decoder layer over
what the model has computed and the embedding of the next token. Embedding and LM head are the model's."""

from __future__ import annotations

from abc import abstractmethod

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT, ForwardContext
from ringcore.attention.layer import AnyAttention
from ringcore.checkpoint import Family, ModelSpec
from ringcore.checkpoint.mtp_head import MtpHeadSpec
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.layers.linear import ColumnParallelLinear
from ringcore.model_executor.layers.norm import RMSNorm
from ringcore.model_executor.layers.rotary import RotaryEmbedding
from ringcore.model_executor.linear_schemes.dense import all_dense
from ringcore.model_executor.linear_schemes.shard import OutputSlice
from ringcore.model_executor.models.decoder_layer import DecoderLayer, LayerInputs
from ringcore.model_executor.models.draft_head import DraftHead, HeadLayerBuilder, Rows
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import SeenTensors, Tensors, Weight, WeightedLayer

__all__ = ["MtpHead", "MtpLayer", "NativeMtpLayer"]


class MtpLayer(WeightedLayer):
    """The decoder layer."""

    attention: AnyAttention

    @abstractmethod
    def __call__(self, rows: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """rows: [n, hidden_size] float32, overwritten -> the residual stream after the layer, likewise."""


class NativeMtpLayer(MtpLayer):
    def __init__(
        self, head: MtpHeadSpec, family: Family, index: int, tp: TensorParallel, dtype: torch.dtype, max_model_len: int
    ) -> None:
        spec, names = head.layer, family.norms
        assert isinstance(spec, ModelSpec), head
        given = index, spec, tp, dtype, family, all_dense
        build = HeadLayerBuilder(*given, checkpoint_name=head.layer_name, attention_inputs=spec.hidden_size)
        norms = build.norm("input_norm", names.input), build.norm("mlp_norm", names.mlp)
        attention = build.self_attention()
        self.attention = attention.attention
        self._layer = DecoderLayer(norms[0], attention, norms[1], build.gated_mlp())
        self._rotary = RotaryEmbedding(spec.head_dim, spec.rope, max_model_len)

    def weights(self) -> list[Weight]:
        return [weight for layer in self._layer.layers() for weight in layer.weights()]

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        seen = SeenTensors(tensors)
        for layer in self._layer.layers():
            layer.bind(seen, updatable)
        self._rotary.bind(seen.device)
        self._layer.bind_device(seen.device)

    def refresh(self) -> None:
        for layer in self._layer.layers():
            layer.refresh()

    def __call__(self, rows: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        stream = Residual(rows)
        self._layer(stream, LayerInputs(ctx, [self._rotary(positions)]))
        return stream.rows


class MtpHead(DraftHead):
    def __init__(self, head: MtpHeadSpec, layer: MtpLayer, dtype: torch.dtype, most: int) -> None:
        size, form = head.layer.hidden_size, head.form
        super().__init__(size, head.taps, dtype, most)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(f"draft_head.{name}", f"{head.layer_name}.{name}", size, head.norm_eps, dtype)

        self._form, self._layer = form, layer
        self._embedding_norm, self._features_norm = norm(form.embedding_norm), norm(form.features_norm)
        whole = OutputSlice(f"{head.layer_name}.{form.input_proj}", size, 0, size)  # on every rank
        given = f"draft_head.{form.input_proj}", [whole], 2 * size
        self._input_proj = ColumnParallelLinear(*given, bias=False, dtype=dtype, scheme_of=all_dense)
        self._norm = norm(form.norm)
        self._embed: Rows
        self._compute_logits: Rows

    @property
    def attention(self) -> AnyAttention:
        return self._layer.attention

    def _layers(self) -> list[WeightedLayer]:
        return [self._embedding_norm, self._features_norm, self._input_proj, self._layer, self._norm]

    def _bind_model(self, device: torch.device, embed: Rows, compute_logits: Rows) -> None:
        self._embed, self._compute_logits = embed, compute_logits

    def features(self, tapped: torch.Tensor) -> torch.Tensor:
        return tapped.float()

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """At position 0 the embedding counts as 0."""
        embedded = self._embed(token_ids).float().masked_fill_(positions[:, None] == 0, 0)
        both = self._embedding_norm(embedded), self._features_norm(features)
        joined = torch.cat(both if self._form.embedding_first else both[::-1], 1)
        stream = self._layer(self._input_proj(joined, NO_TOKEN_CONTEXT).float(), positions, ctx)
        return self._norm(stream).float() if self._form.is_normalised else stream

    def draft(self, states: torch.Tensor) -> torch.Tensor:
        normed = states.to(self._dtype) if self._form.is_normalised else self._norm(states)
        return self._compute_logits(normed).argmax(-1)
