"""Paged attention by torch's own kernels on a CPU: the reference of every other backend.

The cache of a layer is head-major (`torch_sdpa_pages.PageLayout`), so that
- the blocks of any set of sequences are gathered by one lookup of rows of block_size * head_size numbers (measured 3
times as fast as an index_select along the block dimension), and
- consecutive blocks of a head are one [tokens, head_size] matrix, which is read in place.

`plan` sorts a step's sequences into three kinds:

    query_len 1               decode: sequences of similar length are padded into one batch; a long one whose blocks
                              are consecutive is read in place
    nothing is cached         prompt: this step's keys and values, the cache is not read
    a part is cached          chunk (chunked prefill): tiles of query rows, each against the context up to its last row

With a sliding window of W tokens position p sees p - W + 1 to p. Length is then the visible length, and blocks wholly
before the window are not read. Each tile of a chunk attends to the window of its rows alone, and a prompt longer than W
is computed as such tiles of this step's keys and values.

Nothing masked may be NaN or infinite: softmax gives it the weight 0, and 0 * NaN is NaN. Masked places are the null
block, slots past a sequence's end, and slots before its window in the window's first block. They hold only finite
numbers, because pages are zeroed when allocated and only `forward` writes them, with keys and values of tokens: these
are finite, or the worker that saw a non-finite hidden state overwrites them before the next step. (In float16 a finite
hidden state can have a key that overflowed, so there `forward` clamps what it writes.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.nn import functional

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.backends.torch_sdpa_pages import PageLayout
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
from ringcore.kernels.dtypes import TORCH_DTYPES
from ringcore.kv_cache.spec import KVCacheSpec, SlidingWindowSpec

__all__ = ["TorchSdpaBackend"]


class TorchSdpaBackend(AttentionBackend):
    """`torch.nn.functional.scaled_dot_product_attention` over gathered or viewed blocks."""

    name: ClassVar[str] = "torch_sdpa"

    def __init__(self, spec: KVCacheSpec, num_heads: int, sharing_specs: Sequence[KVCacheSpec] = ()) -> None:
        super().__init__(spec, num_heads, sharing_specs)
        self._group = num_heads // spec.num_kv_heads  # query heads that share a KV head
        self._layout = PageLayout(spec, sharing_specs)
        self._window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        self._planner = Planner(spec, self._window, self._layout.has_contiguous_blocks)
        self._clamps = spec.dtype == "float16"

    @classmethod
    def refusal(cls, spec: KVCacheSpec, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it runs on a CPU, not on {device.type}"
        if spec.dtype not in TORCH_DTYPES:
            return f"it has no dtype {spec.dtype}"
        return None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return self._layout.shape(num_blocks)

    def plan(self, metadata: AttentionMetadata) -> list[WorkItem]:
        return self._planner.plan(metadata)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        plan: object,
        scale: float,
    ) -> torch.Tensor:
        assert isinstance(plan, list)
        assert key is not None, "this backend needs the step's keys and values"
        assert value is not None
        self._write(key, value, kv_cache, metadata.slot_mapping)
        out = query.new_empty(query.shape)
        for item in plan:
            match item:
                case DecodeOne():
                    self._decode_one_forward(item, query, kv_cache, scale, out)
                case DecodeBatch():
                    self._decode_batch_forward(item, query, kv_cache, scale, out)
                case Prompts():
                    self._prompts_forward(item, query, key, value, scale, out)
                case Chunk():
                    self._chunk_forward(item, query, key, value, kv_cache, scale, out)
        return out

    def _write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        if self._clamps:
            key, value = torch.nan_to_num(key), torch.nan_to_num(value)
        self._layout.write(kv_cache, slots, (key, value))

    def _decode_one_forward(
        self, item: DecodeOne, query: torch.Tensor, kv_cache: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        # KV heads as the batch, the query heads that share one as rows: the output has the right layout.
        rows = query[item.token].view(self.spec.num_kv_heads, 1, self._group, self.spec.head_size)
        keys, values = item.context.read(kv_cache).unbind(0)  # [num_kv_heads, 1, num_tokens, head_size]
        attended = functional.scaled_dot_product_attention(rows, keys, values, scale=scale)
        out[item.token] = attended.view(self.num_heads, self.spec.head_size)

    def _decode_batch_forward(
        self, item: DecodeBatch, query: torch.Tensor, kv_cache: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        shape = (item.batch, self.spec.num_kv_heads, self._group, self.spec.head_size)
        tokens = query if item.tokens is None else query.index_select(0, item.tokens)
        # The query heads that share a KV head as rows: a quarter faster than the kernel's own grouping.
        rows = tokens.view(shape)
        keys, values = item.gather.read(kv_cache, item.batch)[:, :, :, item.first : item.end].transpose(1, 2).unbind(0)
        attended = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=item.mask, scale=scale)
        if item.tokens is None:
            out.view(shape).copy_(attended)
        else:
            out.index_copy_(0, item.tokens, attended.reshape(tokens.shape))

    def _prompts_forward(
        self,
        item: Prompts,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        tokens = slice(item.first_token, item.first_token + item.batch * item.query_len)
        q, k, v, o = (
            x[tokens].view(item.batch, item.query_len, -1, self.spec.head_size).transpose(1, 2)
            for x in (query, key, value, out)
        )
        o.copy_(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=self._group > 1)
        )

    def _chunk_forward(
        self,
        item: Chunk,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        if item.context is not None:
            keys, values = item.context.read(kv_cache).transpose(1, 2).unbind(0)
        else:
            new = slice(item.first_token, item.first_token + item.query_len)
            keys, values = (x[new].transpose(0, 1).unsqueeze(0) for x in (key, value))
        num_seen = keys.shape[2]  # [1, num_kv_heads, num_seen, head_size]
        for offset in range(0, item.query_len, TILE_ROWS):
            rows = min(TILE_ROWS, item.query_len - offset)
            end = num_seen - item.query_len + offset + rows
            first = 0 if self._window is None else max(0, end - rows - self._window + 1)
            tokens = slice(item.first_token + offset, item.first_token + offset + rows)
            attended = functional.scaled_dot_product_attention(
                query[tokens].transpose(0, 1).unsqueeze(0),
                keys[:, :, first:end],
                values[:, :, first:end],
                attn_mask=item.mask[-rows:, first - end :],
                scale=scale,
                enable_gqa=self._group > 1,
            )
            out[tokens] = attended[0].transpose(0, 1)
