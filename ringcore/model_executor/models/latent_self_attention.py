"""Latent attention as the sublayer of a decoder layer (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

import torch

from ringcore.attention.layer import AnyAttention, LatentAttention
from ringcore.model_executor.layers.latent_heads import LatentHeads
from ringcore.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from ringcore.model_executor.layers.norm import AnyNorm, RMSNorm
from ringcore.model_executor.models.decoder_layer import LayerInputs, ProjectedSublayer
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import WeightedLayer

__all__ = ["LatentSelfAttention"]


class LatentSelfAttention(ProjectedSublayer):
    """Projections, rotary embedding and attention of one layer, on this rank's heads; latents are whole on every
    rank."""

    def __init__(
        self,
        attention: LatentAttention,
        down_proj: ColumnParallelLinear,
        kv_norm: RMSNorm,
        up: LatentHeads,
        o_proj: RowParallelLinear,
        *,
        rotary: int,
        q_norm: RMSNorm | None = None,
        q_up_proj: ColumnParallelLinear | None = None,
    ) -> None:
        """down_proj: the queries of this rank's heads, or their own latent, then the latent of keys and values and the
        rotated part of the key. q_norm, q_up_proj: from the queries' latent to the heads, where there is one. The pairs
        that are rotated are interleaved, at the end of each head. rotary: the index of the rotary embedding."""
        super().__init__(o_proj)
        self.attention, self.down_proj, self.up, self.o_proj = attention, down_proj, up, o_proj
        self.rotary, self._kv_norm, self._q_norm, self._q_up_proj = rotary, kv_norm, q_norm, q_up_proj

    def layers(self) -> list[WeightedLayer]:
        of_queries = [part for part in (self._q_norm, self._q_up_proj) if part is not None]
        return [self.down_proj, *of_queries, self._kv_norm, self.up, self.o_proj]

    def attention_layers(self) -> list[AnyAttention]:
        return [self.attention]

    def _before(self, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        """[n, num_heads * v_head_dim]."""
        ctx, attention = inputs.ctx, self.attention
        row = attention.kv_lora_rank + attention.qk_rope_head_dim
        down = self.down_proj.after_norm(norm, hidden, ctx.tokens)
        q, kv = down[:, :-row], down[:, -row:]
        if self._q_up_proj is not None and self._q_norm is not None:
            q = self._q_up_proj(self._q_norm(q.contiguous()), ctx.tokens)
        query = q.view(len(q), attention.num_heads, -1)
        rotation = inputs.rotations[self.rotary]
        rotation.rotate(query[..., -attention.qk_rope_head_dim :])
        rows = rotation.latent_rows(kv, self._kv_norm, attention.kv_write_target(ctx))
        return attention(query, rows, self.up, ctx).reshape(len(hidden), -1)
