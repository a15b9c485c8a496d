"""A step as attention sees it: sequences of tokens, not requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["AttentionMetadata"]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The varlen layout of one step in one KV cache group: sequence i owns the tokens query_start_loc[i] to
    query_start_loc[i + 1].

    `seq_lens` counts the tokens of a sequence whose keys are cached once this step's are written, so the first query
    token of sequence i has position seq_lens[i] - query_lens[i].
    The block table entry of a block that the sliding window or chunk has passed has no meaning: 0, or an id that
    another sequence may use.
    A token whose keys and values are cached already, in a block that other sequences may share, has its slot in the
    null block (block 0).
    `*_cpu` arrays are host mirrors of the same numbers.

    The first `num_decodes` sequences have one token each, so sequence i of them has token i. More such sequences may
    follow: 0 is always valid.
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
