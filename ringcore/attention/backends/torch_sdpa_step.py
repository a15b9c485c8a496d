"""A step as the planner of the torch_sdpa backend sees it: sequences, and where their visible context begins."""

from __future__ import annotations

import dataclasses

import numpy as np

from ringcore.attention.metadata import AttentionMetadata
from ringcore.kv_cache.spec import ChunkedAttentionSpec, KVCacheSpec, SlidingWindowSpec

__all__ = ["Step", "split_at_chunks"]


class Step:
    """A step for layers of one spec. A sequence whose tokens are of several chunks is several sequences here."""

    __slots__ = ("_block_size", "_first_blocks", "first_seen", "metadata", "query_lens", "window")

    def __init__(self, metadata: AttentionMetadata, spec: KVCacheSpec) -> None:
        window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        self.window = window if window is not None and window < metadata.max_seq_len else None  # None: masks nothing
        chunk_size = spec.chunk_size if isinstance(spec, ChunkedAttentionSpec) else None
        if chunk_size is not None:
            metadata = split_at_chunks(metadata, chunk_size)
        self.metadata = metadata
        self.query_lens = np.diff(metadata.query_start_loc_cpu)
        self._block_size = spec.block_size
        # [num_seqs]: the first position that the first query token of each sequence sees; None: 0
        self.first_seen: np.ndarray | None = None
        first_queries = metadata.seq_lens_cpu - self.query_lens
        if self.window is not None:
            self.first_seen = np.maximum(first_queries - self.window + 1, 0)
        elif chunk_size is not None:
            self.first_seen = first_queries // chunk_size * chunk_size
        if self.first_seen is not None:
            self._first_blocks = self.first_seen // spec.block_size

    def num_seen(self) -> np.ndarray:
        """[num_seqs]: the tokens from the first that is visible to the last."""
        num_seen: np.ndarray = self.metadata.seq_lens_cpu
        return num_seen if self.first_seen is None else num_seen - self.first_seen

    def num_blocks(self, seqs: np.ndarray) -> np.ndarray:
        """[len(seqs)]: from the first block that each sees to its last."""
        num_blocks: np.ndarray = -(-self.metadata.seq_lens_cpu[seqs] // self._block_size)
        return num_blocks if self.first_seen is None else num_blocks - self._first_blocks[seqs]

    def blocks(self, seq: int) -> np.ndarray:
        """The ids of these blocks of one sequence."""
        first = 0 if self.first_seen is None else self._first_blocks[seq]
        end = -(-int(self.metadata.seq_lens_cpu[seq]) // self._block_size)
        return self.metadata.block_table_cpu[seq, first:end]

    def block_table(self, seqs: np.ndarray, num_blocks: int) -> np.ndarray:
        """[len(seqs), num_blocks]: the ids of these blocks; after a sequence's last one, any valid id."""
        table = self.metadata.block_table_cpu
        if self.first_seen is None:
            return table[seqs, :num_blocks]
        columns = self._first_blocks[seqs, None] + np.arange(num_blocks)
        block_ids: np.ndarray = table[seqs[:, None], np.minimum(columns, table.shape[1] - 1)]
        return block_ids

    def seen_columns(self, seqs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(first, end) of each of decoding `seqs`: its visible tokens, counted from the start of its first block."""
        ends = self.metadata.seq_lens_cpu[seqs]
        if self.first_seen is None:
            return np.zeros_like(ends), ends
        starts = self._first_blocks[seqs] * self._block_size
        return self.first_seen[seqs] - starts, ends - starts


def split_at_chunks(metadata: AttentionMetadata, chunk_size: int) -> AttentionMetadata:
    """The same tokens as sequences of one chunk each: a sequence for every chunk that has query tokens, up to its end.
    Chunks see nothing of each other."""
    first_queries = metadata.seq_lens_cpu - np.diff(metadata.query_start_loc_cpu)
    first_chunks = first_queries // chunk_size
    counts = (metadata.seq_lens_cpu - 1) // chunk_size - first_chunks + 1
    if (counts == 1).all():
        return metadata
    seqs = np.arange(metadata.num_seqs).repeat(counts)
    chunks = first_chunks[seqs] + np.arange(len(seqs)) - (counts.cumsum() - counts)[seqs]
    ends = np.minimum(metadata.seq_lens_cpu[seqs], (chunks + 1) * chunk_size)
    query_lens = ends - np.maximum(first_queries[seqs], chunks * chunk_size)
    return dataclasses.replace(
        metadata,
        num_seqs=len(seqs),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(ends.max()),
        query_start_loc_cpu=np.concatenate(([0], query_lens.cumsum())).astype(np.int32),
        seq_lens_cpu=ends.astype(np.int32),
        block_table_cpu=metadata.block_table_cpu[seqs],
        num_decodes=0,
    )
