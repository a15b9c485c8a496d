"""Per-step plan of the torch_sdpa backend: which sequences are batched together, and where their keys are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ringcore.attention.backends.torch_sdpa_pages import Context, Gather
from ringcore.attention.backends.torch_sdpa_step import Step
from ringcore.attention.metadata import AttentionMetadata
from ringcore.kernels.dtypes import TORCH_DTYPES
from ringcore.kv_cache.spec import KVCacheSpec

__all__ = [
    "TILE_ROWS",
    "Chunk",
    "DecodeBatch",
    "DecodeOne",
    "Planner",
    "Prompts",
    "WorkItem",
]

# A batch of decodes costs about 20 us of calls per layer, a single decode about 15 us, and a gathered and padded MiB of
# keys and values about 90 us (2 cores, float32). So padding up to this is cheaper than another batch, and a sequence
# with more than this is cheaper alone if that saves gathering it.
_BATCH_COST_BYTES = 256 * 1024

# Query rows of a chunk that share a mask and a context length: 256 is the fastest of 32 to 512 (512 rows, context
# 2048), and the mask has 256 rows whatever the length of the chunk.
TILE_ROWS = 256


@dataclass(frozen=True, slots=True)
class DecodeOne:
    token: int
    context: Context


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The columns `first` to `end` of what `gather` reads are visible to all, except what `mask` masks."""

    tokens: torch.Tensor | None  # [batch] int64; None: the batch is the whole step, in order
    batch: int
    first: int
    end: int
    gather: Gather
    mask: torch.Tensor | None  # [batch, 1, 1, end - first], 0 or -inf; None: all see the same columns


@dataclass(frozen=True, slots=True)
class Prompts:
    """`batch` neighbouring prompts of `query_len` tokens each."""

    first_token: int
    batch: int
    query_len: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Query tokens at the end of their visible context (chunked prefill), computed in tiles of rows."""

    first_token: int
    query_len: int
    context: Context | None  # None: the whole context is in this step's keys and values
    mask: torch.Tensor  # [rows, columns]: its last n rows and m columns are the mask of any such tile


WorkItem = DecodeOne | DecodeBatch | Prompts | Chunk


class Planner:
    """Sorts the sequences of a step into work items, one call each (a chunk: a few), for layers of one spec.

    has_contiguous_blocks: whether consecutive blocks can be read in place.
    """

    def __init__(self, spec: KVCacheSpec, has_contiguous_blocks: bool) -> None:
        self._spec = spec
        self._dtype = TORCH_DTYPES[spec.dtype]
        self._has_runs = has_contiguous_blocks

    def plan(self, metadata: AttentionMetadata) -> list[WorkItem]:
        step = Step(metadata, self._spec)
        if metadata.max_query_len == 1:
            return self._plan_decode(step, np.arange(metadata.num_seqs))
        query_lens = step.query_lens
        fresh = step.num_seen() == query_lens
        decoding = query_lens == 1
        # A prompt is one call unless the window masks a part of it: then tiles skip what none of their rows sees.
        whole = fresh if step.window is None else fresh & (query_lens <= step.window)
        items: list[WorkItem] = [*self._plan_decode(step, np.flatnonzero(decoding))]
        items += self._plan_prompts(step, np.flatnonzero(~decoding & whole))
        items += self._plan_chunks(step, np.flatnonzero(~decoding & ~whole), fresh)
        return items

    def _plan_decode(self, step: Step, seqs: np.ndarray) -> list[WorkItem]:
        if not len(seqs):
            return []
        num_blocks = step.num_blocks(seqs)
        alone = self._reads_in_place(step, seqs, num_blocks)
        items: list[WorkItem] = [self._decode_one(step, seq) for seq in seqs[alone].tolist()]
        seqs, num_blocks = seqs[~alone], num_blocks[~alone]
        for low, high in self._batches(num_blocks):
            members = seqs[(num_blocks >= low) & (num_blocks <= high)]
            one = len(members) == 1
            items.append(self._decode_one(step, int(members[0])) if one else self._decode_batch(step, members, high))
        return items

    def _reads_in_place(self, step: Step, seqs: np.ndarray, num_blocks: np.ndarray) -> np.ndarray:
        """[len(seqs)] bool: worth its own call, because its blocks are consecutive and many."""
        long = (num_blocks * self._spec.page_size_bytes > _BATCH_COST_BYTES) & self._has_runs
        for i in np.flatnonzero(long):
            long[i] = _is_contiguous(step.blocks(seqs[i]))
        return long

    def _batches(self, num_blocks: np.ndarray) -> list[tuple[int, int]]:
        """Ranges of lengths, in blocks, that share a padded batch: from the longest down, while the padding is
        cheap."""
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

    def _decode_one(self, step: Step, seq: int) -> DecodeOne:
        return DecodeOne(int(step.metadata.query_start_loc_cpu[seq]), self._context(step, seq))

    def _decode_batch(self, step: Step, seqs: np.ndarray, num_blocks: int) -> DecodeBatch:
        metadata = step.metadata
        firsts, ends = step.seen_columns(seqs)
        first, end = int(firsts.min()), int(ends.max())
        mask = None
        if int(ends.min()) != end or int(firsts.max()) != first:
            columns = np.arange(first, end)
            masked = columns >= ends[:, None]
            if firsts.any():
                masked |= columns < firsts[:, None]
            mask = torch.zeros(len(seqs), 1, 1, end - first, dtype=self._dtype)
            mask.masked_fill_(torch.from_numpy(masked)[:, None, None], -torch.inf)
        whole = len(seqs) == metadata.num_tokens
        return DecodeBatch(
            tokens=None if whole else torch.from_numpy(metadata.query_start_loc_cpu[seqs].astype(np.int64)),
            batch=len(seqs),
            first=first,
            end=end,
            gather=Gather(step.block_table(seqs, num_blocks)),
            mask=mask,
        )

    def _context(self, step: Step, seq: int) -> Context:
        blocks, block_size = step.blocks(seq), self._spec.block_size
        first_seen = 0 if step.first_seen is None else int(step.first_seen[seq])
        num_skipped = first_seen % block_size
        return Context(
            num_tokens=int(step.metadata.seq_lens_cpu[seq]) - first_seen,
            num_skipped=num_skipped,
            first_slot=int(blocks[0]) * block_size + num_skipped,
            gather=None if self._has_runs and _is_contiguous(blocks) else Gather(blocks),
        )

    def _plan_prompts(self, step: Step, seqs: np.ndarray) -> list[Prompts]:
        prompts: list[Prompts] = []
        firsts, query_lens = step.metadata.query_start_loc_cpu[seqs].tolist(), step.query_lens[seqs].tolist()
        for first, query_len in zip(firsts, query_lens, strict=True):
            last = prompts[-1] if prompts else None
            if last and last.query_len == query_len and last.first_token + last.batch * query_len == first:
                prompts[-1] = Prompts(last.first_token, last.batch + 1, query_len)
            else:
                prompts.append(Prompts(first, 1, query_len))
        return prompts

    def _plan_chunks(self, step: Step, seqs: np.ndarray, fresh: np.ndarray) -> list[Chunk]:
        if not len(seqs):
            return []
        metadata, query_lens = step.metadata, step.query_lens
        mask = self._tile_mask(int(query_lens[seqs].max()), int(step.num_seen()[seqs].max()), step.window)
        return [
            Chunk(
                int(metadata.query_start_loc_cpu[seq]),
                int(query_lens[seq]),
                None if fresh[seq] else self._context(step, seq),
                mask,
            )
            for seq in seqs.tolist()
        ]

    def _tile_mask(self, query_len: int, num_seen: int, window: int | None) -> torch.Tensor:
        """Mask of the largest tile: [rows, columns], 0 or -inf.

        Row r from the bottom sees all but the last r columns, and with a window at most `window` columns before these,
        so the lower right corner of this mask is the mask of every smaller tile of any sequence.
        """
        rows = min(TILE_ROWS, query_len)
        columns = num_seen if window is None else min(rows + window - 1, num_seen)
        mask = torch.zeros(rows, columns, dtype=self._dtype)
        mask[:, columns - rows :] = torch.full((rows, rows), -torch.inf, dtype=self._dtype).triu_(1)
        if window is not None:
            mask += torch.full((rows, columns), -torch.inf, dtype=self._dtype).tril_(columns - rows - window)
        return mask


def _is_contiguous(blocks: np.ndarray) -> bool:
    """Whether block ids [n] are consecutive."""
    return bool((np.diff(blocks) == 1).all())
