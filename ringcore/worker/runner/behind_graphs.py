"""A head's first run behind a step with drafts, a CUDA graph: launched with the step, and told nothing of its tokens.

The step leaves on the device what the head needs of every place, see `VerifiedPlaces`. A graph computes all of them:
those behind a wrong draft are written again by the step that computes their positions. Then it finds how many tokens
each row gained, and leaves as inputs of the next run the draft after the row's last one, in the row's order and not by
place. So the rows' further drafts are replays of smaller graphs, those of `HeadGraphs`.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ringcore.kernels.launch.upload import upload
from ringcore.model_executor.models.draft_head import DraftHead
from ringcore.worker.drafts.drafts_behind import VerifiedPlaces
from ringcore.worker.runner import graph_capture
from ringcore.worker.runner.head_places import HeadInputs, last_gained, places_at

__all__ = ["BehindGraphs", "KeptStreams"]

# The inputs of a run of some places -> the residual stream after each.
Forward = Callable[[HeadInputs], torch.Tensor]


class KeptStreams(NamedTuple):
    """What drafting goes on from, of each row; the last one is padding's."""

    streams: torch.Tensor  # [max_rows + 1, hidden_size] float32: after the last position that was computed
    next_ids: torch.Tensor  # [max_rows + 1] int64: the draft after it


class BehindGraphs:
    def __init__(
        self,
        head: DraftHead,
        forward: Forward,
        places: VerifiedPlaces,
        group: int,
        block_size: int,
        inputs: HeadInputs,
        kept: KeptStreams,
    ) -> None:
        """group: the KV cache group of the head; inputs: of the runs that follow; kept: is written too."""
        self._head, self._forward, self._places, self._group = head, forward, places, group
        self._block_size, self._inputs, self._kept = block_size, inputs, kept
        most, device = min(len(inputs.token_ids), len(places.batch)), inputs.token_ids.device
        # [4, most], of each row: its index in `kept`, its first place, how many it has, and the limit of its positions.
        self._rows = torch.zeros(4, most, dtype=torch.int32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, size: int, pool: Any) -> None:
        """For as many places, or the most that there are. While a step has no rows."""
        size = min(size, self._rows.shape[1])
        if size not in self._graphs:
            self._rows.zero_()[0].fill_(len(self._kept.next_ids) - 1)  # only padding
            self._graphs[size], _ = graph_capture.capture(lambda: self._launch(size), pool)

    def size_for(self, num_places: int) -> int | None:
        """Of the smallest graph; None: there is none."""
        sizes = sorted(self._graphs)
        at = bisect.bisect_left(sizes, num_places)
        return sizes[at] if at < len(sizes) else None

    def replay(self, size: int, rows: np.ndarray, firsts: np.ndarray, counts: np.ndarray, limits: np.ndarray) -> None:
        """For rows [n] of the step that was launched last, with counts[i] places from firsts[i] on."""
        told = np.zeros((4, size), dtype=np.int32)
        told[0] = len(self._kept.next_ids) - 1
        told[:, : len(rows)] = rows, firsts, counts, limits
        self._rows[:, :size].copy_(upload(told, self._rows.device))
        self._graphs[size].replay()

    def _launch(self, size: int) -> None:
        given = self._places
        is_place = given.batch[:size] >= 0  # other ones are left of larger steps
        positions, slots = given.positions[:size], given.slots[self._group][:size]
        words = torch.stack((positions.int(), slots.int(), given.seq_lens[:size])) * is_place
        stream = self._forward(
            HeadInputs(
                token_ids=given.token_ids[:size],
                features=self._head.features(self._head.tapped[:size]),
                places=words,
                limits=words[0],
                tables=given.block_tables[self._group][:size],
            )
        )
        rows, firsts, counts, limits = self._rows[:, :size]
        num_gained, last = last_gained(given.gained[:size], firsts, counts)
        ends = positions[firsts] + num_gained  # the last token's position: it is not computed yet
        self._leave(stream[last], ends.int(), num_gained > 0, rows, limits)

    def _leave(
        self,
        stream: torch.Tensor,
        positions: torch.Tensor,
        is_going: torch.Tensor,
        rows: torch.Tensor,
        limits: torch.Tensor,
    ) -> None:
        """The inputs of the next run: of rows [n] whose last tokens are at positions [n], with the stream before."""
        to = self._inputs.of(len(rows))
        of_rows = self._places.row_tables[self._group]
        to.features.copy_(stream)
        to.token_ids.copy_(self._head.draft(to.features))
        to.tables.copy_(of_rows.index_select(0, rows.clamp(max=len(of_rows) - 1)))
        to.limits.copy_(limits)
        to.places.copy_(places_at(positions, is_going, to.limits, to.tables, self._block_size))
        self._kept.streams.index_copy_(0, rows.long(), to.features)
        self._kept.next_ids.index_copy_(0, rows.long(), to.token_ids)
