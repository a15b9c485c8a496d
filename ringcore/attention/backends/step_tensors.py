"""The varlen layout of a step on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringcore.attention.metadata import AttentionMetadata
from ringcore.kernels.launch.upload import upload_packed

__all__ = ["StepTensors"]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Sequences of a step: sequence i has the tokens query_start_loc[i] to query_start_loc[i + 1]."""

    query_start_loc: torch.Tensor  # [num_seqs + 1] int32
    seq_lens: torch.Tensor  # [num_seqs] int32
    block_table: torch.Tensor  # [num_seqs, max_num_blocks] int32
    max_query_len: int | None  # None: not to depend on it

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> StepTensors:
        """All sequences of the step."""
        arrays = (metadata.query_start_loc_cpu, metadata.seq_lens_cpu, metadata.block_table_cpu)
        starts, lens, table = upload_packed(arrays, metadata.slot_mapping.device)
        return cls(starts, lens, table, metadata.max_query_len)
