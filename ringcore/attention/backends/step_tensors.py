"""The varlen layout of a step on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ringcore.attention.metadata import AttentionMetadata

__all__ = ["StepTensors", "upload"]

_ALIGNMENT = 4  # int32 numbers: Triton recompiles kernels for pointers that are not 16-byte aligned


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Sequences of a step: sequence i has the tokens query_start_loc[i] to query_start_loc[i + 1]."""

    query_start_loc: torch.Tensor  # [num_seqs + 1] int32
    seq_lens: torch.Tensor  # [num_seqs] int32
    block_table: torch.Tensor  # [num_seqs, max_num_blocks] int32
    max_query_len: int

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> StepTensors:
        """All sequences of the step."""
        arrays = (metadata.query_start_loc_cpu, metadata.seq_lens_cpu, metadata.block_table_cpu)
        starts, lens, table = upload(arrays, metadata.slot_mapping.device)
        return cls(starts, lens, table, metadata.max_query_len)


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copies int32 arrays to the device as tensors of their shapes, in one H2D copy."""
    sizes = [-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    packed = np.zeros(sum(sizes), dtype=np.int32)
    at = 0
    for array, size in zip(arrays, sizes, strict=True):
        packed[at : at + array.size] = array.reshape(-1)
        at += size
    pieces = torch.split(torch.from_numpy(packed).to(device), sizes)
    return [piece[: array.size].view(array.shape) for piece, array in zip(pieces, arrays, strict=True)]
