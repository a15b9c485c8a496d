"""What all layers of a step share in the torch_sdpa backend: which sequences go together, and where their keys are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from ringcore.attention.metadata import AttentionMetadata
from ringcore.kv_cache.spec import KVCacheSpec

__all__ = [
    "DTYPES",
    "TILE_ROWS",
    "Chunk",
    "Context",
    "DecodeBatch",
    "DecodeOne",
    "Gather",
    "Part",
    "Planner",
    "Prompts",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# A batch of decoding sequences costs about 20 us of calls a layer, a single one about 15 us, and a gathered and padded
# MiB of keys and values about 90 us (2 cores, float32). So padding up to this is cheaper than one batch more, and a
# sequence with more than this is cheaper alone if that saves gathering it.
_BATCH_COST_BYTES = 256 * 1024

# Query rows of a chunk that share a mask and a context length: 256 is the fastest of 32 to 512 (512 rows, context
# 2048), and the mask has 256 rows whatever the length of the chunk.
TILE_ROWS = 256


class Gather:
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
        gathered = functional.embedding(self.rows(kv_cache), kv_cache.view(-1, block_size * head_size))
        return gathered.view(kinds, num_kv_heads, batch, -1, head_size)


@dataclass(frozen=True, slots=True)
class Context:
    """Where one sequence's keys and values are: a run of the pool, or blocks to gather."""

    num_tokens: int
    first_slot: int  # of the run; unused with a gather
    gather: Gather | None

    def read(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """-> [2, num_kv_heads, 1, num_tokens, head_size]"""
        kinds, num_kv_heads, _, _, head_size = kv_cache.shape
        if self.gather is not None:
            return self.gather.read(kv_cache, 1)[:, :, :, : self.num_tokens]
        slots = kv_cache.view(kinds, num_kv_heads, 1, -1, head_size)
        return slots[:, :, :, self.first_slot : self.first_slot + self.num_tokens]


@dataclass(frozen=True, slots=True)
class DecodeOne:
    token: int
    context: Context


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    tokens: torch.Tensor | None  # [batch] int64; None: the batch is the whole step, in order
    batch: int
    num_tokens: int  # of the longest context
    gather: Gather
    mask: torch.Tensor | None  # [batch, 1, 1, num_tokens], 0 or -inf; None: all contexts are equally long


@dataclass(frozen=True, slots=True)
class Prompts:
    """`batch` neighbouring prompts of `query_len` tokens each."""

    first_token: int
    batch: int
    query_len: int


@dataclass(frozen=True, slots=True)
class Chunk:
    first_token: int
    query_len: int
    context: Context
    mask: torch.Tensor  # [rows, columns]: its last n rows and m columns are the mask of any such tile


Part = DecodeOne | DecodeBatch | Prompts | Chunk


class Planner:
    """Sorts the sequences of a step into parts that are one call (a chunk: a few) each, for layers of one spec."""

    def __init__(self, spec: KVCacheSpec) -> None:
        self._spec = spec
        self._dtype = DTYPES[spec.dtype]

    def plan(self, metadata: AttentionMetadata) -> list[Part]:
        query_lens = np.diff(metadata.query_start_loc_cpu)
        fresh = metadata.seq_lens_cpu == query_lens
        decoding = query_lens == 1
        parts: list[Part] = [*self._plan_decode(metadata, np.flatnonzero(decoding))]
        parts += self._plan_prompts(metadata, query_lens, np.flatnonzero(~decoding & fresh))
        parts += self._plan_chunks(metadata, query_lens, np.flatnonzero(~decoding & ~fresh))
        return parts

    def _plan_decode(self, metadata: AttentionMetadata, seqs: np.ndarray) -> list[Part]:
        if not len(seqs):
            return []
        num_blocks = -(-metadata.seq_lens_cpu[seqs] // self._spec.block_size)
        alone = self._reads_in_place(metadata, seqs, num_blocks)
        parts: list[Part] = [self._decode_one(metadata, seq) for seq in seqs[alone].tolist()]
        seqs, num_blocks = seqs[~alone], num_blocks[~alone]
        for low, high in self._batches(num_blocks):
            members = seqs[(num_blocks >= low) & (num_blocks <= high)]
            one = len(members) == 1
            parts.append(self._decode_one(metadata, int(members[0])) if one else self._decode_batch(metadata, members))
        return parts

    def _reads_in_place(self, metadata: AttentionMetadata, seqs: np.ndarray, num_blocks: np.ndarray) -> np.ndarray:
        """[len(seqs)] bool: worth a call of its own, because its blocks are consecutive and many."""
        long = num_blocks * self._spec.page_size_bytes > _BATCH_COST_BYTES
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
            if ranges and padded * self._spec.page_size_bytes <= _BATCH_COST_BYTES:
                ranges[-1] = (blocks, high)
            else:
                ranges.append((blocks, blocks))
                padded = 0
        return ranges

    def _decode_one(self, metadata: AttentionMetadata, seq: int) -> DecodeOne:
        return DecodeOne(int(metadata.query_start_loc_cpu[seq]), self._context(metadata, seq))

    def _decode_batch(self, metadata: AttentionMetadata, seqs: np.ndarray) -> DecodeBatch:
        lens = metadata.seq_lens_cpu[seqs]
        longest, whole = int(lens.max()), len(seqs) == metadata.num_tokens
        mask = None
        if int(lens.min()) != longest:
            past = torch.from_numpy(np.arange(longest) >= lens[:, None])
            mask = torch.zeros(len(seqs), 1, 1, longest, dtype=self._dtype)
            mask.masked_fill_(past[:, None, None], -torch.inf)
        return DecodeBatch(
            tokens=None if whole else torch.from_numpy(metadata.query_start_loc_cpu[seqs].astype(np.int64)),
            batch=len(seqs),
            num_tokens=longest,
            gather=Gather(metadata.block_table_cpu[seqs, : -(-longest // self._spec.block_size)]),
            mask=mask,
        )

    def _context(self, metadata: AttentionMetadata, seq: int) -> Context:
        num_tokens = int(metadata.seq_lens_cpu[seq])
        blocks = metadata.block_table_cpu[seq, : -(-num_tokens // self._spec.block_size)]
        gather = None if _is_run(blocks) else Gather(blocks)
        return Context(num_tokens, int(blocks[0]) * self._spec.block_size, gather)

    def _plan_prompts(self, metadata: AttentionMetadata, query_lens: np.ndarray, seqs: np.ndarray) -> list[Prompts]:
        prompts: list[Prompts] = []
        for first, query_len in zip(
            metadata.query_start_loc_cpu[seqs].tolist(), query_lens[seqs].tolist(), strict=True
        ):
            last = prompts[-1] if prompts else None
            if last and last.query_len == query_len and last.first_token + last.batch * query_len == first:
                prompts[-1] = Prompts(last.first_token, last.batch + 1, query_len)
            else:
                prompts.append(Prompts(first, 1, query_len))
        return prompts

    def _plan_chunks(self, metadata: AttentionMetadata, query_lens: np.ndarray, seqs: np.ndarray) -> list[Chunk]:
        if not len(seqs):
            return []
        rows, columns = min(TILE_ROWS, int(query_lens[seqs].max())), int(metadata.seq_lens_cpu[seqs].max())
        # Row r from the bottom may see all but the last r columns, so the lower right corner of this mask is the
        # mask of every smaller tile, whatever its sequence.
        mask = torch.zeros(rows, columns, dtype=self._dtype)
        mask[:, columns - rows :] = torch.full((rows, rows), -torch.inf, dtype=self._dtype).triu_(1)
        firsts, lens = metadata.query_start_loc_cpu, query_lens
        return [Chunk(int(firsts[s]), int(lens[s]), self._context(metadata, s), mask) for s in seqs.tolist()]


def _is_run(blocks: np.ndarray) -> bool:
    """Whether block ids [n] are consecutive."""
    return bool((np.diff(blocks) == 1).all())
