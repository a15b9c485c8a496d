"""What `triton` plans for a step: decodes, chunks of prompts, and prompts for another library's kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ringcore.attention.backend import SingleTokens
from ringcore.attention.backends.fused_prompts import Prompts
from ringcore.attention.backends.step_tensors import StepTensors

if TYPE_CHECKING:
    from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler
    from ringcore.kernels.attention.shared_prefixes import SharedPrefixes

__all__ = ["Chunks", "Decodes", "Scores", "TritonStep"]

_MAX_ROTATED_ROWS = 64


@dataclass(frozen=True, slots=True)
class Decodes:
    """Decoding sequences: sequence i has token i of the step."""

    seq_lens: torch.Tensor  # [num_decodes] int32
    block_table: torch.Tensor  # [num_decodes or more, max_num_blocks] int32
    tile_scheduler: DecodeTileScheduler  # planned for these sequences
    shared: SharedPrefixes | None
    reads_early: bool  # of `paged_attention_decode`

    @property
    def rotates(self) -> bool:
        """Whether QK norm, rotary embedding and the KV write are part of attention.

        A decode step of Llama-3.2-3B takes 1.6, 2.5, 0.5 and 1.8% less so with 4, 8, 32 and 64 rows on an H200, of
        Qwen3-8B 0.7, 0.7, 0.4 and 0, of Qwen3-0.6B 2 and 6% with 1 and 32, and 3% more with 8. A layer of 256 rows
        takes 1.7 us more.
        """
        return self.reads_early and self.tile_scheduler.tiling.by_warps and len(self.seq_lens) <= _MAX_ROTATED_ROWS


@dataclass(frozen=True, slots=True)
class Chunks:
    """Neighbouring sequences of any number of tokens; their query_start_loc is relative to the first of `tokens`."""

    tensors: StepTensors
    tokens: slice


@dataclass(frozen=True, slots=True)
class TritonStep:
    decodes: Decodes | None
    others: tuple[Chunks | Prompts, ...] = ()

    @property
    def single_tokens(self) -> SingleTokens | None:
        decodes = self.decodes
        if decodes is None or self.others or not decodes.reads_early:
            return None
        return SingleTokens(decodes.seq_lens, decodes.block_table)


class Scores(NamedTuple):
    """How a layer scores, for the kernels."""

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
