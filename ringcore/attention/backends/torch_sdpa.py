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
is computed as such tiles of this step's keys and values. With chunked attention the tokens of each chunk are a sequence
of their own, which begins with the chunk (`torch_sdpa_step`).

Nothing masked may be NaN or infinite: softmax gives it the weight 0, and 0 * NaN is NaN. Masked places are the null
block, slots past a sequence's end, and slots before its window in the window's first block. They hold only finite
numbers, because pages are zeroed when allocated and only `forward` writes them, with keys and values of tokens: these
are finite, or the worker that saw a non-finite hidden state overwrites them before the next step. (In float16 a finite
hidden state can have a key that overflowed, so there `forward` clamps what it writes.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.backends.torch_sdpa_attend import attend, attend_prompts
from ringcore.attention.backends.torch_sdpa_pages import PageLayout, Parts
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
from ringcore.kernels.attention.fp8_rows import from_rows, to_rows
from ringcore.kernels.dtypes import TORCH_DTYPES
from ringcore.kv_cache.spec import DTYPE_BYTES, KVCacheSpec, MLASpec, SlidingWindowSpec

__all__ = ["TorchSdpaBackend"]


class TorchSdpaBackend(AttentionBackend):
    """`torch.nn.functional.scaled_dot_product_attention` over gathered or viewed blocks."""

    name: ClassVar[str] = "torch_sdpa"

    def __init__(
        self, spec: KVCacheSpec, layers: Sequence[AttentionSpec], sharing_specs: Sequence[KVCacheSpec] = ()
    ) -> None:
        super().__init__(spec, layers, sharing_specs)
        self._group = self.num_heads // spec.num_kv_heads  # query heads that share a KV head
        self._layout = PageLayout(self.spec, sharing_specs)
        self._window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        self._planner = Planner(spec, self._layout.has_contiguous_blocks)
        self._clamps = spec.dtype == "float16" and not self.spec.is_fp8
        self._dtype = TORCH_DTYPES[spec.dtype]

    @classmethod
    def refusal(
        cls,
        spec: KVCacheSpec,
        layers: Sequence[AttentionSpec],
        device: torch.device,
        sharing_specs: Sequence[KVCacheSpec] = (),
    ) -> str | None:
        if isinstance(spec, MLASpec):
            return "it attends over keys and values of heads, not over latents"
        if device.type != "cpu":
            return f"it runs on a CPU, not on {device.type}"
        if spec.dtype not in DTYPE_BYTES:
            return f"it has no dtype {spec.dtype}"
        if not all(PageLayout.can_share(spec, other) for other in sharing_specs):
            return "layers that share its memory have other shares of keys and values in a block"
        return None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return self._layout.shape(num_blocks)

    def block_views(self, kv_cache: torch.Tensor) -> Sequence[torch.Tensor]:
        return [part.movedim(2, 0) for part in self._layout.parts(kv_cache)]

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
        layer: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(plan, list)
        assert key is not None, "this backend needs the step's keys and values"
        assert value is not None
        parts = self._layout.parts(kv_cache)
        key, value = self._write(key, value, parts, None if layer.shares_kv else metadata.slot_mapping)
        out = query.new_empty(query.shape[0], self.num_heads, self.spec.value_size)
        call = _Call(query, key, value, parts, layer, None if sinks is None else sinks.float(), out)
        for item in plan:
            match item:
                case DecodeOne():
                    self._decode_one_forward(item, call)
                case DecodeBatch():
                    self._decode_batch_forward(item, call)
                case Prompts():
                    self._prompts_forward(item, call)
                case Chunk():
                    self._chunk_forward(item, call)
        return out

    def _write(
        self, key: torch.Tensor, value: torch.Tensor, parts: Parts, slots: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """-> keys and values as this step attends to them: those that a later step reads, so that it does not matter
        how a prompt is cut into steps. slots: None: they are written."""
        stored = (to_rows(key), to_rows(value)) if self.spec.is_fp8 else (key, value)
        attended = self._numbers(stored)
        if slots is not None:
            written = (torch.nan_to_num(key), torch.nan_to_num(value)) if self._clamps else stored
            self._layout.write(parts, slots, written)
        return attended

    def _numbers(self, stored: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Keys and values as they are stored -> in the model's dtype."""
        return tuple(from_rows(rows, self._dtype) for rows in stored) if self.spec.is_fp8 else tuple(stored)

    def _decode_one_forward(self, item: DecodeOne, call: _Call) -> None:
        # KV heads as the batch, the query heads that share one as rows: the output has the right layout.
        rows = call.query[item.token].view(self.spec.num_kv_heads, 1, self._group, self.spec.head_size)
        keys, values = self._numbers(item.context.read(call.parts))
        sinks = None if call.sinks is None else call.sinks.view(self.spec.num_kv_heads, 1, self._group, 1)
        attended = attend(rows, keys, values, call.layer, sinks)
        call.out[item.token] = attended.view(self.num_heads, self.spec.value_size)

    def _decode_batch_forward(self, item: DecodeBatch, call: _Call) -> None:
        tokens = call.query if item.tokens is None else call.query.index_select(0, item.tokens)
        # The query heads that share a KV head as rows: a quarter faster than the kernel's own grouping.
        shape = (self.spec.num_kv_heads, self._group)
        found = self._numbers(item.gather.read(call.parts, item.batch, item.first, item.end))
        keys, values = (kind.transpose(0, 1) for kind in found)
        sinks = None if call.sinks is None else call.sinks.view(1, *shape, 1)
        attended = attend(tokens.view(item.batch, *shape, -1), keys, values, call.layer, sinks, item.mask)
        if item.tokens is None:
            call.out.view(attended.shape).copy_(attended)
        else:
            call.out.index_copy_(0, item.tokens, attended.reshape(item.batch, self.num_heads, -1))

    def _prompts_forward(self, item: Prompts, call: _Call) -> None:
        tokens = slice(item.first_token, item.first_token + item.batch * item.query_len)
        q, k, v, o = (
            x[tokens].view(item.batch, item.query_len, *x.shape[1:]).transpose(1, 2)
            for x in (call.query, call.key, call.value, call.out)
        )
        o.copy_(attend_prompts(q, k, v, call.layer, call.sinks_by_head(), enable_gqa=self._group > 1))

    def _chunk_forward(self, item: Chunk, call: _Call) -> None:
        if item.context is not None:
            keys, values = (kind.transpose(0, 1) for kind in self._numbers(item.context.read(call.parts)))
        else:
            new = slice(item.first_token, item.first_token + item.query_len)
            keys, values = (x[new].transpose(0, 1).unsqueeze(0) for x in (call.key, call.value))
        num_seen = keys.shape[2]  # [1, num_kv_heads, num_seen, head_size]
        for offset in range(0, item.query_len, TILE_ROWS):
            rows = min(TILE_ROWS, item.query_len - offset)
            end = num_seen - item.query_len + offset + rows
            first = 0 if self._window is None else max(0, end - rows - self._window + 1)
            tokens = slice(item.first_token + offset, item.first_token + offset + rows)
            attended = attend(
                call.query[tokens].transpose(0, 1).unsqueeze(0),
                keys[:, :, first:end],
                values[:, :, first:end],
                call.layer,
                call.sinks_by_head(),
                item.mask[-rows:, first - end :],
                enable_gqa=self._group > 1,
            )
            call.out[tokens] = attended[0].transpose(0, 1)


class _Call(NamedTuple):
    """The tensors of one `forward`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    parts: Parts
    layer: AttentionSpec
    sinks: torch.Tensor | None  # [num_heads] float32
    out: torch.Tensor

    def sinks_by_head(self) -> torch.Tensor | None:
        """As `attend` takes them for [batch, num_heads, rows, ...]."""
        return None if self.sinks is None else self.sinks.view(1, -1, 1, 1)
