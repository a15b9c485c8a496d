"""What attention is told about a step. It does not know what a request is, only sequences of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["AttentionMetadata"]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The ragged layout of one step in one KV cache group: sequence i owns the tokens query_start_loc[i] to
    query_start_loc[i + 1].

    `seq_lens` counts the tokens of a sequence whose keys are in the cache once this step's are written, so
    the first query token of sequence i stands at position seq_lens[i] - query_lens[i].
    A block that a sliding window has left behind has no meaning: its entry is 0, or an id that others may have by now.
    A token whose keys and values are in the cache already, in a block that others may share, has its slot in block 0.
    `*_cpu` arrays are host mirrors of the same numbers.

    The first `num_decodes` sequences have one token each, so sequence i of them has token i. More such sequences may
    follow: 0 is always right.
    """

    num_tokens: int
    num_seqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc_cpu: np.ndarray  # [num_seqs + 1] int32
    seq_lens_cpu: np.ndarray  # [num_seqs] int32
    block_table_cpu: np.ndarray  # [num_seqs, max_num_blocks] int32; entries past a sequence's end are 0
    slot_mapping: torch.Tensor  # [num_tokens] int64: block_id * block_size + offset in the block
    num_decodes: int = 0
