"""The row state of the persistent batch on the device, in one buffer, and the decode inputs made from it.

The state is an array of int32 words: a header, the rows of the batch, a record per row, and the block tables of each KV
cache group. So every update by the host is a list of words and their places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import triton.language as tl

from ringcore.kernels.logits.row_records import num_words, word_of
from ringcore.kernels.logits.sampling_inputs import DeviceSamplingInputs

__all__ = ["BAD_HIDDEN", "BAD_LOGITS", "NOT_GAINED", "NOT_GAINED_BAD", "RING_HEAD", "DecodeInputs", "StateLayout"]

# The header.
STEP_COUNT = tl.constexpr(0)  # steps finished since the start; it wraps around
ARRIVALS = tl.constexpr(1)  # programs of the running `finish_rows` that have arrived; zero between launches
_HEADER = 16

# A row's record: a head, whose last two words are unused, then the row's parameters, then its stop tokens.
NUM_COMPUTED = tl.constexpr(0)
NUM_CACHED = tl.constexpr(1)
NUM_PROMPT = tl.constexpr(2)
NUM_STOPS = tl.constexpr(3)
STOPPED = tl.constexpr(4)  # not 0: it has sampled a stop token and is not decoded further
LAST_TOKEN = tl.constexpr(5)
PARAMETERS = tl.constexpr(8)

# A place of the batch is a row, and which of its tokens in this step: 0 its last known one, j its j-th draft.
OFFSET_SHIFT = tl.constexpr(16)
ROW_MASK = tl.constexpr((1 << 16) - 1)

# A slot of the result ring: its step number, which is written last, and from RING_HEAD on one word per place.
RING_HEAD = 16
# In place of a token, of a draft's place: the row did not gain it, since a draft before was wrong; and the same where
# its logits were not finite.
NOT_GAINED = -1
NOT_GAINED_BAD = -2
# Or'ed to the token of a row whose logits, or hidden states, are not finite; a vocabulary is smaller.
BAD_LOGITS = 1 << 30
BAD_HIDDEN = 1 << 29

_ALIGNMENT = 4  # words


def _aligned(num_words: int) -> int:
    return -(-num_words // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Word offsets within the state."""

    max_rows: int
    max_stops: int  # stop tokens of a row
    block_sizes: tuple[int, ...]  # by KV cache group
    table_widths: tuple[int, ...]  # by KV cache group: blocks of a row
    parameters: np.dtype  # of a row's parameters: a structured one of 32- and 64-bit fields
    max_drafted: int = 0  # tokens of a decode step with drafts

    @property
    def num_places(self) -> int:
        """The most tokens of a decode step."""
        return max(self.max_rows, self.max_drafted)

    @property
    def batch_at(self) -> int:
        """The batch, [num_places]: row | offset << OFFSET_SHIFT, the places of a row side by side; -1 is padding."""
        return _HEADER

    @property
    def drafts_at(self) -> int:
        """[num_places]: the draft at each place whose offset is not 0."""
        return _HEADER + _aligned(self.num_places)

    @property
    def records_at(self) -> int:
        return _HEADER + 2 * _aligned(self.num_places)

    @property
    def stops_at(self) -> int:
        """Of a record: its stop tokens."""
        return PARAMETERS.value + num_words(self.parameters)

    def parameter_at(self, name: str) -> int:
        """Of a record: one of its parameters."""
        return PARAMETERS.value + word_of(self.parameters, name)

    @property
    def record_words(self) -> int:
        return _aligned(self.stops_at + self.max_stops)

    def table_at(self, group: int) -> int:
        before = sum(self.max_rows * _aligned(width) for width in self.table_widths[:group])
        return self.records_at + self.max_rows * self.record_words + before

    def table_stride(self, group: int) -> int:
        return _aligned(self.table_widths[group])

    @property
    def num_words(self) -> int:
        return self.table_at(len(self.table_widths))

    def allocate(self, device: torch.device) -> torch.Tensor:
        """[num_words] int32: no rows in the batch, no tokens in any."""
        state = torch.zeros(self.num_words, dtype=torch.int32, device=device)
        state[self.batch_at : self.drafts_at] = -1
        return state


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What `prepare_decode` fills for max_seqs sequences of one token each; at fixed addresses, for CUDA graphs."""

    input_ids: torch.Tensor  # [max_seqs] int64
    positions: torch.Tensor  # [max_seqs] int64
    seq_lens: torch.Tensor  # [max_seqs] int32; 0 is padding
    slots: tuple[torch.Tensor, ...]  # by group: [max_seqs] int64
    block_tables: tuple[torch.Tensor, ...]  # by group: [max_seqs, width] int32
    sampling: DeviceSamplingInputs  # of max_seqs rows; masked_token_ids is the state itself

    @classmethod
    def allocate(cls, layout: StateLayout, state: torch.Tensor, max_seqs: int) -> DecodeInputs:
        """For the rows of `state`, on its device."""
        device, groups = state.device, range(len(layout.table_widths))
        return cls(
            input_ids=torch.zeros(max_seqs, dtype=torch.int64, device=device),
            positions=torch.zeros(max_seqs, dtype=torch.int64, device=device),
            seq_lens=torch.zeros(max_seqs, dtype=torch.int32, device=device),
            slots=tuple(torch.zeros(max_seqs, dtype=torch.int64, device=device) for _ in groups),
            block_tables=tuple(
                torch.zeros(max_seqs, layout.table_stride(group), dtype=torch.int32, device=device) for group in groups
            ),
            sampling=replace(
                DeviceSamplingInputs.allocate(layout.parameters, max_seqs, 0, device), masked_token_ids=state
            ),
        )
