"""Attention over paged latents on a GPU by the Triton kernels of `ringcore.kernels`.

Decodes, and the tokens of short chunks each as a decode of its own, take the split-KV kernel with absorbed queries.
Prompts, and chunks of so many tokens that expanding heads costs less, attend one sequence at a time to pages of
expanded keys and values, a few heads at a time, by the prefill kernel.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch

from ringcore.attention.backend import LatentBackend, LatentUpProjection
from ringcore.attention.metadata import AttentionMetadata
from ringcore.attention.spec import AttentionSpec
from ringcore.kernels.launch.upload import upload_packed
from ringcore.kv_cache.spec import DTYPE_BYTES, KVCacheSpec, MLASpec

if TYPE_CHECKING:
    from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler

__all__ = ["TritonMLABackend"]

_MAX_EXPANDED = 1 << 24  # numbers of keys and values that exist at a time, unless one head has more
_MAX_GATHERED = 1 << 14  # cached rows that are copied at a time
_PAGE = 64  # tokens of a page of expanded keys and values
_HEAD_MULTIPLE, _MAX_HEAD_SIZE = 8, 256  # of the prefill kernel
_MAX_RANK = 512


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Tokens as sequences of one token each; tokens: None: the first len(seq_lens) of the step."""

    tokens: torch.Tensor | None  # [n] int64
    seq_lens: torch.Tensor  # [n] int32: up to each token
    block_table: torch.Tensor  # [n or more, max_num_blocks] int32


@dataclass(frozen=True, slots=True)
class _Expanded:
    """A sequence whose tokens of the step attend to expanded keys and values of all its tokens."""

    tokens: slice
    blocks: torch.Tensor | None  # [num_blocks] int32, of its rows; None: all are of the step
    seq_len: int
    lengths: torch.Tensor  # [3] int32: 0, the number of its tokens in the step, seq_len

    def pieces(self, rows: torch.Tensor, kv_cache: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """The rows of all its tokens, some at a time, with their positions. rows: of the step."""
        if self.blocks is None:
            yield slice(0, self.seq_len), rows[self.tokens]
            return
        block_size = kv_cache.shape[1]
        first = 0
        for blocks in torch.split(self.blocks, max(1, _MAX_GATHERED // block_size)):
            piece = kv_cache.index_select(0, blocks).flatten(0, 1)[: self.seq_len - first]
            yield slice(first, first + len(piece)), piece
            first += len(piece)


class _Step(NamedTuple):
    decodes: _Decodes | None
    others: tuple[_Expanded, ...] = ()


class TritonMLABackend(LatentBackend):
    """Imports `ringcore.kernels` with the first instance: a machine without a GPU has no Triton."""

    name: ClassVar[str] = "triton_mla"
    accepts_prewritten_kv: ClassVar[bool] = True

    def __init__(
        self, spec: KVCacheSpec, layers: Sequence[AttentionSpec], sharing_specs: Sequence[KVCacheSpec] = ()
    ) -> None:
        super().__init__(spec, layers, sharing_specs)
        assert all(other.page_size_bytes == spec.page_size_bytes for other in sharing_specs)
        from ringcore.kernels.attention import kv_write, latent_attention_decode, page_layout, paged_attention_prefill

        self._kv_write, self._page_shape = kv_write.kv_write, page_layout.PageLayout.shape
        self._decode = latent_attention_decode.latent_attention_decode
        self._allocate_scheduler = latent_attention_decode.latent_tile_scheduler
        self._prefill = paged_attention_prefill.paged_attention_prefill
        self._tile_scheduler: DecodeTileScheduler | None = None  # of the first step's device

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
        if device.type != "cuda":
            return f"it runs on a CUDA device, not on {device.type}"
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if spec.dtype not in DTYPE_BYTES:
            return f"it has no dtype {spec.dtype}"
        if spec.kv_lora_rank > _MAX_RANK:
            return f"its latents have up to {_MAX_RANK} numbers, not {spec.kv_lora_rank}"
        if spec.block_size % 16:
            return f"its blocks have a multiple of 16 tokens, not {spec.block_size}"
        if not all(layer.is_plain for layer in layers):
            return "it has neither softcap nor sinks"
        largest = max(size for layer in layers for size in layer.expanded_sizes or (0,))
        if largest > _MAX_HEAD_SIZE:
            return f"its expanded heads have up to {_MAX_HEAD_SIZE} numbers, not {largest}"
        return None

    def plan(self, metadata: AttentionMetadata) -> _Step:
        starts, lens, table = metadata.query_start_loc_cpu, metadata.seq_lens_cpu, metadata.block_table_cpu
        query_lens = np.diff(starts)
        is_expanded = query_lens >= self._expands_from()
        seqs = np.repeat(np.arange(metadata.num_seqs), query_lens)  # of each token
        tokens = np.flatnonzero(~is_expanded[seqs])
        upto = (lens[seqs] - starts[seqs + 1] + np.arange(len(seqs)) + 1)[tokens].astype(np.int32)
        arrays = [tokens.astype(np.int32), upto, table[seqs[tokens]]]
        others = np.flatnonzero(is_expanded).tolist()
        for seq in others:
            arrays += [
                table[seq, : -(-int(lens[seq]) // self.spec.block_size)],
                np.array([0, query_lens[seq], lens[seq]], np.int32),
            ]
        uploaded = iter(upload_packed(arrays, metadata.slot_mapping.device))
        at, upto_there, tables = next(uploaded), next(uploaded), next(uploaded)
        decodes = None
        if len(tokens):
            are_first = bool(tokens[-1] == len(tokens) - 1)
            decodes = _Decodes(None if are_first else at.long(), upto_there, tables)
            self._scheduler(metadata.slot_mapping.device).plan(upto_there)
        expanded = []
        for seq in others:
            blocks, lengths = next(uploaded), next(uploaded)
            is_fresh = query_lens[seq] == lens[seq]
            rows = slice(int(starts[seq]), int(starts[seq + 1]))
            expanded.append(_Expanded(rows, None if is_fresh else blocks, int(lens[seq]), lengths))
        return _Step(decodes, tuple(expanded))

    def plan_on_device(
        self, seq_lens: torch.Tensor, block_table: torch.Tensor, *, one_token_each: bool = False
    ) -> _Step:
        self._scheduler(seq_lens.device).plan(seq_lens, skips_empty=True)
        return _Step(_Decodes(None, seq_lens, block_table))

    def _expands_from(self) -> int:
        """Tokens of a chunk. By an estimate of a H100's rates, not measured: for a token before them and a head the
        expansion takes as long as reading the row for two tokens of the chunk."""
        return 16 + 2 * self.num_heads

    def _scheduler(self, device: torch.device) -> DecodeTileScheduler:
        if self._tile_scheduler is None:
            spec, dtype = self.spec, getattr(torch, self.spec.dtype)
            self._tile_scheduler = self._allocate_scheduler(
                self.num_heads, spec.kv_lora_rank, spec.qk_rope_head_dim, dtype, device
            )
        return self._tile_scheduler

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
        assert isinstance(plan, _Step)
        if plan.decodes is not None and len(plan.decodes.seq_lens) == len(query):
            return self._decode_forward(plan.decodes, query, up, kv_cache, layer)
        out = query.new_empty(len(query), self.num_heads, up.v_head_dim)
        if plan.decodes is not None:
            self._decode_into(plan.decodes, query, up, kv_cache, layer, out)
        for item in plan.others:
            self._expanded_forward(item, query[item.tokens], rows, kv_cache, up, layer, out[item.tokens])
        return out

    def _decode_into(
        self,
        decodes: _Decodes,
        query: torch.Tensor,
        up: LatentUpProjection,
        kv_cache: torch.Tensor,
        layer: AttentionSpec,
        out: torch.Tensor,
    ) -> None:
        if decodes.tokens is None:
            count = len(decodes.seq_lens)
            out[:count] = self._decode_forward(decodes, query[:count], up, kv_cache, layer)
        else:
            found = self._decode_forward(decodes, query.index_select(0, decodes.tokens), up, kv_cache, layer)
            out.index_copy_(0, decodes.tokens, found)

    def _decode_forward(
        self,
        decodes: _Decodes,
        query: torch.Tensor,
        up: LatentUpProjection,
        kv_cache: torch.Tensor,
        layer: AttentionSpec,
    ) -> torch.Tensor:
        absorbed = up.absorbed(query[..., : up.qk_nope_head_dim]).contiguous()
        rotated = query[..., up.qk_nope_head_dim :]
        tables = decodes.block_table, decodes.seq_lens, self._scheduler(query.device)
        return up.values(self._decode(absorbed, rotated, kv_cache, *tables, layer.scale))

    def _expanded_forward(
        self,
        item: _Expanded,
        query: torch.Tensor,
        rows: torch.Tensor,
        kv_cache: torch.Tensor,
        up: LatentUpProjection,
        layer: AttentionSpec,
        out: torch.Tensor,
    ) -> None:
        """Over pages 0, 1, ... of keys and values that are written for this call."""
        num_pages, device = -(-item.seq_len // _PAGE), query.device
        slots = torch.arange(item.seq_len, device=device)
        table = torch.arange(num_pages, dtype=torch.int32, device=device)[None]
        starts, seq_lens = item.lengths[:2], item.lengths[2:]
        size, v_size = _padded(query.shape[2]), _padded(up.v_head_dim)
        step = max(1, _MAX_EXPANDED // (num_pages * _PAGE * (size + v_size)))
        for first in range(0, self.num_heads, step):
            heads = slice(first, min(first + step, self.num_heads))
            pages = query.new_empty(self._page_shape(num_pages, heads.stop - first, _PAGE, size, v_size))
            for places, piece in item.pieces(rows, kv_cache):
                keys, values = self._expanded(piece, up, heads)
                self._kv_write(_widened(keys, size), _widened(values, v_size), pages, slots[places])
            queries = _widened(query[:, heads], size)
            longest = item.tokens.stop - item.tokens.start
            attended = self._prefill(queries, pages, table, seq_lens, starts, layer.scale, max_query_len=longest)
            out[:, heads] = attended[..., : up.v_head_dim]

    def _expanded(self, rows: torch.Tensor, up: LatentUpProjection, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = up.expanded(rows[:, : self.spec.kv_lora_rank], heads)
        shared = rows[:, None, self.spec.kv_lora_rank :].expand(-1, keys.shape[1], -1)
        return torch.cat((keys, shared), 2), values


def _padded(size: int) -> int:
    """The size of heads that the prefill kernel takes."""
    return max(_HEAD_MULTIPLE * 2, -(-size // _HEAD_MULTIPLE) * _HEAD_MULTIPLE)


def _widened(x: torch.Tensor, size: int) -> torch.Tensor:
    """[n, heads, any] with zeros up to `size`, the heads of a token contiguous."""
    return x.contiguous() if x.shape[2] == size else torch.nn.functional.pad(x, (0, size - x.shape[2]))
