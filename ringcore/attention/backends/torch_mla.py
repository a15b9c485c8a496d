"""Attention over paged latents by torch's kernels on a CPU: the reference of other backends of latents.

A step's sequences are sorted as in `torch_sdpa_plan`, over one KV head whose keys and values are the rows of the cache.
Decodes and short chunks read these rows with absorbed queries. Prompts, and chunks of so many tokens that less is
computed that way, attend with expanded heads, a few of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch

from ringcore.attention.backend import LatentBackend, LatentUpProjection
from ringcore.attention.backends.torch_sdpa_attend import attend, attend_prompts
from ringcore.attention.backends.torch_sdpa_plan import (
    TILE_ROWS,
    Chunk,
    DecodeBatch,
    DecodeOne,
    Planner,
    Prompts,
    WorkItem,
)
from ringcore.attention.metadata import AttentionMetadata
from ringcore.attention.spec import AttentionSpec
from ringcore.kv_cache.spec import DTYPE_BYTES, KVCacheSpec, MLASpec

__all__ = ["TorchMLABackend"]

_MAX_EXPANDED = 1 << 24  # numbers of keys and values that exist at a time, unless one head has more


class TorchMLABackend(LatentBackend):
    name: ClassVar[str] = "torch_mla"

    def __init__(
        self, spec: KVCacheSpec, layers: Sequence[AttentionSpec], sharing_specs: Sequence[KVCacheSpec] = ()
    ) -> None:
        super().__init__(spec, layers, sharing_specs)
        self._planner = Planner(spec, has_contiguous_blocks=True)

    @classmethod
    def refusal(
        cls,
        spec: KVCacheSpec,
        layers: Sequence[AttentionSpec],
        device: torch.device,
        sharing_specs: Sequence[KVCacheSpec] = (),
    ) -> str | None:
        if not isinstance(spec, MLASpec):
            return "it attends over latents, not over keys and values of heads"
        if device.type != "cpu":
            return f"it runs on a CPU, not on {device.type}"
        if spec.dtype not in DTYPE_BYTES:
            return f"it has no dtype {spec.dtype}"
        if not all(layer.is_plain for layer in layers):
            return "it has neither softcap nor sinks"
        if not all(isinstance(other, MLASpec) for other in sharing_specs):
            return "layers that share its memory have keys and values of heads, which lie apart on a CPU"
        return None

    def plan(self, metadata: AttentionMetadata) -> list[WorkItem]:
        return self._planner.plan(metadata)

    def forward(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        up: LatentUpProjection,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        plan: object,
        layer: AttentionSpec,
    ) -> torch.Tensor:
        assert isinstance(plan, list)
        call = _Call(query, rows, up, (kv_cache[None, None, :, None],), layer)
        out = query.new_empty(len(query), self.num_heads, up.v_head_dim)
        for item in plan:
            match item:
                case DecodeOne():
                    out[item.token] = self._decode_one_forward(item, call)
                case DecodeBatch():
                    tokens = slice(None) if item.tokens is None else item.tokens
                    out[tokens] = self._decode_batch_forward(item, call)
                case Prompts():
                    tokens = slice(item.first_token, item.first_token + item.batch * item.query_len)
                    self._prompts_forward(item, call, tokens, out[tokens])
                case Chunk():
                    tokens = slice(item.first_token, item.first_token + item.query_len)
                    self._chunk_forward(item, call, tokens, out[tokens])
        return out

    def _decode_one_forward(self, item: DecodeOne, call: _Call) -> torch.Tensor:
        (context,) = item.context.read(call.parts)  # [1, 1, num_tokens, row]
        queries = self._absorbed(call.query[item.token, None], call.up)[None]
        return self._values(attend(queries, context, context, call.layer, None)[0], call.up)[0]

    def _decode_batch_forward(self, item: DecodeBatch, call: _Call) -> torch.Tensor:
        tokens = call.query if item.tokens is None else call.query.index_select(0, item.tokens)
        (found,) = item.gather.read(call.parts, item.batch, item.first, item.end)
        context = found.transpose(0, 1)  # [batch, 1, columns, row]
        queries = self._absorbed(tokens, call.up).unsqueeze(1)  # the heads as rows of one KV head
        return self._values(attend(queries, context, context, call.layer, None, item.mask).squeeze(1), call.up)

    def _prompts_forward(self, item: Prompts, call: _Call, tokens: slice, out: torch.Tensor) -> None:
        def batched(x: torch.Tensor) -> torch.Tensor:
            return x.view(item.batch, item.query_len, *x.shape[1:]).transpose(1, 2)

        for heads, keys, values in self._expanded(call.rows[tokens], call.up):
            queries = call.query[tokens, heads].contiguous()
            attended = attend_prompts(
                batched(queries), batched(keys), batched(values), call.layer, None, enable_gqa=False
            )
            out[:, heads] = attended.transpose(1, 2).reshape(len(out), -1, values.shape[-1])

    def _chunk_forward(self, item: Chunk, call: _Call, tokens: slice, out: torch.Tensor) -> None:
        assert item.context is not None, "without a window a prompt is no chunk"
        context = item.context.read(call.parts)[0][0, 0]  # [num_seen, row]
        queries = call.query[tokens]
        if item.query_len < self.expands_from(call.up):
            keys = context[None, None]
            attended = self._tiles(item, self._absorbed(queries, call.up), keys, keys, call.layer)
            out.copy_(self._values(attended, call.up))
            return
        for heads, keys, values in self._expanded(context, call.up):
            seen = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
            out[:, heads] = self._tiles(item, queries[:, heads], *seen, call.layer)

    def _tiles(
        self, item: Chunk, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: AttentionSpec
    ) -> torch.Tensor:
        """queries: [query_len, heads, size], at the end of keys [1, heads or 1, num_seen, size] -> [query_len, heads,
        v_size]."""
        num_seen, tiles = keys.shape[2], []
        for offset in range(0, item.query_len, TILE_ROWS):
            tile = queries[offset : offset + TILE_ROWS].transpose(0, 1)[None]
            end = num_seen - item.query_len + offset + tile.shape[2]
            mask = item.mask[-tile.shape[2] :, -end:]
            seen = keys[:, :, :end], values[:, :, :end]
            tiles.append(attend(tile, *seen, layer, None, mask, enable_gqa=keys.shape[1] < tile.shape[1])[0])
        return torch.cat(tiles, 1).transpose(0, 1)

    def _absorbed(self, queries: torch.Tensor, up: LatentUpProjection) -> torch.Tensor:
        """[n, num_heads, qk_nope_head_dim + qk_rope_head_dim] -> [n, num_heads, row]"""
        rotated = queries[..., -self.spec.qk_rope_head_dim :]
        return torch.cat((up.absorbed(queries[..., : -self.spec.qk_rope_head_dim]), rotated), -1)

    def _values(self, attended: torch.Tensor, up: LatentUpProjection) -> torch.Tensor:
        """Rows weighted by each head, [n, num_heads, row], of which the latents count -> [n, num_heads, v_head_dim]."""
        return up.values(attended[..., : self.spec.kv_lora_rank])

    def _expanded(
        self, rows: torch.Tensor, up: LatentUpProjection
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """By some heads at a time, their keys [n, heads, qk_head_dim] and values [n, heads, v_head_dim]."""
        latents, shared = rows[:, : self.spec.kv_lora_rank], rows[:, None, self.spec.kv_lora_rank :]
        per_head = len(rows) * (up.qk_nope_head_dim + up.v_head_dim + shared.shape[-1])
        step = max(1, _MAX_EXPANDED // per_head)
        for first in range(0, self.num_heads, step):
            heads = slice(first, min(first + step, self.num_heads))
            keys, values = up.expanded(latents, heads)
            yield heads, torch.cat((keys, shared.expand(-1, keys.shape[1], -1)), -1), values


class _Call(NamedTuple):
    """The tensors of one `forward`."""

    query: torch.Tensor
    rows: torch.Tensor
    up: LatentUpProjection
    parts: tuple[torch.Tensor]  # the cache as `torch_sdpa_pages` has keys and values: of one kind
    layer: AttentionSpec
