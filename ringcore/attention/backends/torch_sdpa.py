"""Paged attention by torch's own kernels on a CPU: the reference of every other backend.

Layout of one layer's cache: [2, num_kv_heads, num_blocks, block_size, head_size], keys then values. Head-major, so that
- the blocks of any set of sequences are gathered by one lookup of rows of block_size * head_size numbers
  (measured 3 times as fast as an index_select along the block dimension), and
- consecutive blocks of a head are one [tokens, head_size] matrix, which is read in place.

A step's sequences fall into three kinds, told apart once a step by `plan`:

    query_len 1                     decode: sequences of like length are padded into one batch; a long one whose
                                    blocks are consecutive is read where it lies
    all of it is new                prompt: this step's keys and values, the cache is not read
    a part is in the cache          chunk: tiles of query rows, each against the context up to its last row

Nothing masked may be NaN or infinite: softmax gives it the weight 0, and 0 * NaN is NaN. Masked places are the null
block and slots past a sequence's end, and they hold only finite numbers, because pages are zero when allocated and
nothing but `forward` writes them, keys and values of tokens: finite, or the worker that saw a hidden state that is not
finite overwrites them before the next step. (In float16 a finite hidden state can have a key that overflowed, so there
`forward` bounds what it writes.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.metadata import AttentionMetadata
from ringcore.kv_cache.spec import KVCacheSpec

__all__ = ["TorchSdpaBackend"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# A batch of decoding sequences costs about 20 us of calls a layer, a single one about 15 us, and a gathered and padded
# MiB of keys and values about 90 us (2 cores, float32). So padding up to this is cheaper than one batch more, and a
# sequence with more than this is cheaper alone if that saves gathering it.
_BATCH_COST_BYTES = 256 * 1024

# Query rows of a chunk that share a mask and a context length: 256 is the fastest of 32 to 512 (512 rows, context 2048),
# and the mask has 256 rows whatever the length of the chunk.
_TILE_ROWS = 256


class _Gather:
    """Blocks of one or several sequences, copied out of the pool by one row lookup."""

    __slots__ = ("_block_ids", "_num_blocks", "_rows")

    def __init__(self, block_ids: np.ndarray) -> None:
        self._block_ids = torch.from_numpy(block_ids.astype(np.int64).reshape(-1))  # [batch * blocks]
        self._num_blocks = 0
        self._rows = self._block_ids

    def rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """[2 * num_kv_heads * batch * blocks] rows of the cache as [2 * num_kv_heads * num_blocks, ...].

        The pool's size is in the caches alone, so the first layer of a step makes this for all.
        """
        kinds, num_kv_heads, num_blocks = kv_cache.shape[:3]
        if self._num_blocks != num_blocks:
            firsts = torch.arange(0, kinds * num_kv_heads * num_blocks, num_blocks)
            self._rows = (firsts[:, None] + self._block_ids).view(-1)
            self._num_blocks = num_blocks
        return self._rows

    def read(self, kv_cache: torch.Tensor, batch: int) -> torch.Tensor:
        """-> [2, num_kv_heads, batch, blocks * block_size, head_size]"""
        kinds, num_kv_heads, _, block_size, head_size = kv_cache.shape
        gathered = F.embedding(self.rows(kv_cache), kv_cache.view(-1, block_size * head_size))
        return gathered.view(kinds, num_kv_heads, batch, -1, head_size)


@dataclass(frozen=True, slots=True)
class _Context:
    """Where one sequence's keys and values are: a run of the pool, or blocks to gather."""

    num_tokens: int
    first_slot: int  # of the run; unused with a gather
    gather: _Gather | None

    def read(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """-> [2, num_kv_heads, 1, num_tokens, head_size]"""
        kinds, num_kv_heads, _, _, head_size = kv_cache.shape
        if self.gather is not None:
            return self.gather.read(kv_cache, 1)[:, :, :, : self.num_tokens]
        slots = kv_cache.view(kinds, num_kv_heads, 1, -1, head_size)
        return slots[:, :, :, self.first_slot : self.first_slot + self.num_tokens]


@dataclass(frozen=True, slots=True)
class _DecodeOne:
    token: int
    context: _Context


@dataclass(frozen=True, slots=True)
class _DecodeBatch:
    tokens: torch.Tensor | None  # [batch] int64; None: the batch is the whole step, in order
    batch: int
    num_tokens: int  # of the longest context
    gather: _Gather
    mask: torch.Tensor | None  # [batch, 1, 1, num_tokens], 0 or -inf; None: all contexts are equally long


@dataclass(frozen=True, slots=True)
class _Prompts:
    """`batch` neighbouring prompts of `query_len` tokens each."""

    first_token: int
    batch: int
    query_len: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    first_token: int
    query_len: int
    context: _Context
    mask: torch.Tensor  # [rows, columns]: its last n rows and m columns are the mask of any such tile


_Part = _DecodeOne | _DecodeBatch | _Prompts | _Chunk


class TorchSdpaBackend(AttentionBackend):
    """`torch.nn.functional.scaled_dot_product_attention` over gathered or viewed blocks."""

    name: ClassVar[str] = "torch_sdpa"

    def __init__(self, spec: KVCacheSpec, num_heads: int) -> None:
        super().__init__(spec, num_heads)
        self._group = num_heads // spec.num_kv_heads  # query heads that share a KV head
        self._dtype = _DTYPES[spec.dtype]
        self._bounded = spec.dtype == "float16"

    @classmethod
    def refusal(cls, spec: KVCacheSpec, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it runs on a CPU, not on {device.type}"
        if spec.dtype not in _DTYPES:
            return f"it has no dtype {spec.dtype}"
        return None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (2, self.spec.num_kv_heads, num_blocks, self.spec.block_size, self.spec.head_size)

    # -----------------------------------------------------------------------------------------------------------
    # Once a step.

    def plan(self, metadata: AttentionMetadata) -> object:
        query_lens = np.diff(metadata.query_start_loc_cpu)
        fresh = metadata.seq_lens_cpu == query_lens
        decoding = query_lens == 1
        parts: list[_Part] = [*self._plan_decode(metadata, np.flatnonzero(decoding))]
        parts += self._plan_prompts(metadata, query_lens, np.flatnonzero(~decoding & fresh))
        parts += self._plan_chunks(metadata, query_lens, np.flatnonzero(~decoding & ~fresh))
        return parts

    def _plan_decode(self, metadata: AttentionMetadata, seqs: np.ndarray) -> list[_Part]:
        if not len(seqs):
            return []
        num_blocks = -(-metadata.seq_lens_cpu[seqs] // self.spec.block_size)
        alone = self._reads_in_place(metadata, seqs, num_blocks)
        parts: list[_Part] = [self._decode_one(metadata, seq) for seq in seqs[alone].tolist()]
        seqs, num_blocks = seqs[~alone], num_blocks[~alone]
        for low, high in self._batches(num_blocks):
            members = seqs[(num_blocks >= low) & (num_blocks <= high)]
            one = len(members) == 1
            parts.append(self._decode_one(metadata, int(members[0])) if one else self._decode_batch(metadata, members))
        return parts

    def _reads_in_place(self, metadata: AttentionMetadata, seqs: np.ndarray, num_blocks: np.ndarray) -> np.ndarray:
        """[len(seqs)] bool: worth a call of its own, because its blocks are consecutive and many."""
        long = num_blocks * self.spec.page_size_bytes > _BATCH_COST_BYTES
        for i in np.flatnonzero(long):
            long[i] = _is_run(metadata.block_table_cpu[seqs[i], : num_blocks[i]])
        return long

    def _batches(self, num_blocks: np.ndarray) -> list[tuple[int, int]]:
        """Ranges of lengths, in blocks, that share a batch: from the longest down, while the padding is cheap."""
        values, counts = np.unique(num_blocks, return_counts=True)
        ranges: list[tuple[int, int]] = []
        padded = 0
        for blocks, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
            high = ranges[-1][1] if ranges else blocks
            padded += (high - blocks) * count
            if ranges and padded * self.spec.page_size_bytes <= _BATCH_COST_BYTES:
                ranges[-1] = (blocks, high)
            else:
                ranges.append((blocks, blocks))
                padded = 0
        return ranges

    def _decode_one(self, metadata: AttentionMetadata, seq: int) -> _DecodeOne:
        return _DecodeOne(int(metadata.query_start_loc_cpu[seq]), self._context(metadata, seq))

    def _decode_batch(self, metadata: AttentionMetadata, seqs: np.ndarray) -> _DecodeBatch:
        lens = metadata.seq_lens_cpu[seqs]
        longest, whole = int(lens.max()), len(seqs) == metadata.num_tokens
        mask = None
        if int(lens.min()) != longest:
            past = torch.from_numpy(np.arange(longest) >= lens[:, None])
            mask = torch.zeros(len(seqs), 1, 1, longest, dtype=self._dtype)
            mask.masked_fill_(past[:, None, None], -torch.inf)
        return _DecodeBatch(
            tokens=None if whole else torch.from_numpy(metadata.query_start_loc_cpu[seqs].astype(np.int64)),
            batch=len(seqs),
            num_tokens=longest,
            gather=_Gather(metadata.block_table_cpu[seqs, : -(-longest // self.spec.block_size)]),
            mask=mask,
        )

    def _context(self, metadata: AttentionMetadata, seq: int) -> _Context:
        num_tokens = int(metadata.seq_lens_cpu[seq])
        blocks = metadata.block_table_cpu[seq, : -(-num_tokens // self.spec.block_size)]
        gather = None if _is_run(blocks) else _Gather(blocks)
        return _Context(num_tokens, int(blocks[0]) * self.spec.block_size, gather)

    def _plan_prompts(self, metadata: AttentionMetadata, query_lens: np.ndarray, seqs: np.ndarray) -> list[_Prompts]:
        prompts: list[_Prompts] = []
        for first, query_len in zip(
            metadata.query_start_loc_cpu[seqs].tolist(), query_lens[seqs].tolist(), strict=True
        ):
            last = prompts[-1] if prompts else None
            if last and last.query_len == query_len and last.first_token + last.batch * query_len == first:
                prompts[-1] = _Prompts(last.first_token, last.batch + 1, query_len)
            else:
                prompts.append(_Prompts(first, 1, query_len))
        return prompts

    def _plan_chunks(self, metadata: AttentionMetadata, query_lens: np.ndarray, seqs: np.ndarray) -> list[_Chunk]:
        if not len(seqs):
            return []
        rows, columns = min(_TILE_ROWS, int(query_lens[seqs].max())), int(metadata.seq_lens_cpu[seqs].max())
        # Row r from the bottom may see all but the last r columns, so the lower right corner of this mask is the
        # mask of every smaller tile, whatever its sequence.
        mask = torch.zeros(rows, columns, dtype=self._dtype)
        mask[:, columns - rows :] = torch.full((rows, rows), -torch.inf, dtype=self._dtype).triu_(1)
        firsts, lens = metadata.query_start_loc_cpu, query_lens
        return [_Chunk(int(firsts[s]), int(lens[s]), self._context(metadata, s), mask) for s in seqs.tolist()]

    # -----------------------------------------------------------------------------------------------------------
    # Once a layer.

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        plan: object,
        scale: float,
    ) -> torch.Tensor:
        assert isinstance(plan, list)
        self._write(key, value, kv_cache, metadata.slot_mapping)
        out = query.new_empty(query.shape)
        for part in plan:
            match part:
                case _DecodeOne():
                    self._decode_one_forward(part, query, kv_cache, scale, out)
                case _DecodeBatch():
                    self._decode_batch_forward(part, query, kv_cache, scale, out)
                case _Prompts():
                    self._prompts_forward(part, query, key, value, scale, out)
                case _Chunk():
                    self._chunk_forward(part, query, kv_cache, scale, out)
        return out

    def _write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        pool = kv_cache.view(2, self.spec.num_kv_heads, -1, self.spec.head_size)
        for kind, new in enumerate((key, value)):
            finite = torch.nan_to_num(new) if self._bounded else new
            pool[kind].index_copy_(1, slots, finite.transpose(0, 1))

    def _decode_one_forward(
        self, part: _DecodeOne, query: torch.Tensor, kv_cache: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        # KV heads as the batch and the query heads that share one as rows: what comes out lies as it should.
        rows = query[part.token].view(self.spec.num_kv_heads, 1, self._group, self.spec.head_size)
        keys, values = part.context.read(kv_cache).unbind(0)  # [num_kv_heads, 1, num_tokens, head_size]
        attended = F.scaled_dot_product_attention(rows, keys, values, scale=scale)
        out[part.token] = attended.view(self.num_heads, self.spec.head_size)

    def _decode_batch_forward(
        self, part: _DecodeBatch, query: torch.Tensor, kv_cache: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        shape = (part.batch, self.spec.num_kv_heads, self._group, self.spec.head_size)
        tokens = query if part.tokens is None else query.index_select(0, part.tokens)
        # The query heads that share a KV head as rows: a quarter faster than the kernel's own grouping.
        rows = tokens.view(shape)
        keys, values = part.gather.read(kv_cache, part.batch)[:, :, :, : part.num_tokens].transpose(1, 2).unbind(0)
        attended = F.scaled_dot_product_attention(rows, keys, values, attn_mask=part.mask, scale=scale)
        if part.tokens is None:
            out.view(shape).copy_(attended)
        else:
            out.index_copy_(0, part.tokens, attended.reshape(tokens.shape))

    def _prompts_forward(
        self,
        part: _Prompts,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        tokens = slice(part.first_token, part.first_token + part.batch * part.query_len)
        q, k, v, o = (x[tokens].unflatten(0, (part.batch, -1)).transpose(1, 2) for x in (query, key, value, out))
        o.copy_(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=self._group > 1))

    def _chunk_forward(
        self, part: _Chunk, query: torch.Tensor, kv_cache: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        keys, values = part.context.read(kv_cache).transpose(1, 2).unbind(0)  # [1, num_kv_heads, num_tokens, head_size]
        for offset in range(0, part.query_len, _TILE_ROWS):
            rows = min(_TILE_ROWS, part.query_len - offset)
            seen = part.context.num_tokens - part.query_len + offset + rows
            tokens = slice(part.first_token + offset, part.first_token + offset + rows)
            attended = F.scaled_dot_product_attention(
                query[tokens].transpose(0, 1).unsqueeze(0),
                keys[:, :, :seen],
                values[:, :, :seen],
                attn_mask=part.mask[-rows:, -seen:],
                scale=scale,
                enable_gqa=self._group > 1,
            )
            out[tokens] = attended[0].transpose(0, 1)


def _is_run(blocks: np.ndarray) -> bool:
    """Whether block ids [n] are consecutive."""
    return bool((np.diff(blocks) == 1).all())
