"""Runs of a head as CUDA graphs: one replay in place of some 20 launches for each draft.

A graph computes so many places, each a token of a sequence of its own, and drafts after each. Tokens of one row are
sequences of the same block table, each a token longer than the one before, as in steps with drafts. It leaves in its
inputs those of the next run, so a row's further drafts are replays that the host tells nothing. Behind a step with
drafts the first run is one of `BehindGraphs`.
"""

from __future__ import annotations

import bisect

import numpy as np
import torch

from ringcore.attention.backend import PagedBackend
from ringcore.attention.context import ForwardContext, GroupContext
from ringcore.kernels.launch.upload import upload
from ringcore.model_executor.models.draft_head import DraftHead
from ringcore.worker.drafts.drafts_behind import DraftsBehind, VerifiedPlaces
from ringcore.worker.drafts.head_runs import HeadRuns
from ringcore.worker.rows.request_rows import RequestRows
from ringcore.worker.runner import graph_capture
from ringcore.worker.runner.behind_graphs import BehindGraphs, KeptStreams
from ringcore.worker.runner.graph_capture import padded_metadata
from ringcore.worker.runner.head_places import HeadInputs, places_at

__all__ = ["GRAPH_SIZES", "HeadGraphs"]

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # places; larger runs are launched operation by operation
_NUM_TIMED = 4  # runs for which the host waits once, as behind a step


class HeadGraphs(HeadRuns):
    """Graphs are captured while costs are measured, before the first request: a size that was not is padded to a larger
    one."""

    def __init__(
        self, head: DraftHead, backend: PagedBackend, kv_cache: torch.Tensor, rows: RequestRows, group: int
    ) -> None:
        """backend: it can `plan_on_device`."""
        super().__init__(head, backend, kv_cache, rows, group)
        self._inputs = HeadInputs.allocate(GRAPH_SIZES[-1], head.hidden_size, self._table, self._device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # The draft after each row's stream.
        self._next_ids = torch.zeros(len(self._streams), dtype=torch.int64, device=self._device)
        self._behind: BehindGraphs | None = None

    def verified_in(self, places: VerifiedPlaces) -> None:
        kept, block_size = KeptStreams(self._streams, self._next_ids), self._table.block_size
        self._behind = BehindGraphs(self.head, self._forward, places, self._group, block_size, self._inputs, kept)

    def run_padding(self, num_rows: int) -> int:
        size = next((size for size in GRAPH_SIZES if size >= num_rows), None)
        if size is None:
            return super().run_padding(num_rows)
        if size not in self._graphs:
            self._capture(size)
        none = np.zeros(num_rows, dtype=np.int64)
        self._set_places(size, none, none, limits=none)
        for _ in range(_NUM_TIMED):
            self._graphs[size].replay()
        self._inputs.token_ids[:1].cpu()
        return _NUM_TIMED

    def draft(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        n, most, size = len(rows), int(counts.max()), self._size_for(len(rows))
        if size is None:
            return super().draft(rows, starts, counts)
        on_device, inputs = upload(rows.astype(np.int64), self._device), self._inputs.of(n)
        inputs.token_ids.copy_(self._next_ids[on_device])
        if most > 1:
            inputs.features.copy_(self._streams[on_device])
            self._set_tables(rows, int(starts.max()) + most)
            self._set_places(size, rows, starts, limits=starts + counts - 1)
        return self._drafted(size, n, most).t().cpu().numpy().astype(np.int32)

    def draft_behind(
        self, rows: np.ndarray, firsts: np.ndarray, counts: np.ndarray, num_places: int, num_drafts: int
    ) -> DraftsBehind | None:
        behind, size = self._behind, self._size_for(len(rows))
        of_step = None if behind is None else behind.size_for(num_places)
        if behind is None or of_step is None or size is None:
            return None
        max_len = self._rows.token_ids.shape[1]
        limits = np.minimum(self._table.num_blocks[rows] * self._table.block_size, max_len)
        behind.replay(of_step, rows, firsts, counts, limits)
        return DraftsBehind(rows, limits, self._drafted(size, len(rows), num_drafts))

    def _drafted(self, size: int, num_rows: int, num_drafts: int) -> torch.Tensor:
        """[num_drafts, num_rows] int64: the drafts in the inputs, and those that follow."""
        drafts = torch.empty(num_drafts, num_rows, dtype=torch.int64, device=self._device)
        for place in range(num_drafts):
            if place:
                self._graphs[size].replay()
            drafts[place] = self._inputs.token_ids[:num_rows]
        return drafts

    def _keep(self, rows: torch.Tensor, stream: torch.Tensor, last: torch.Tensor) -> None:
        """With the first draft, which a graph has computed with the stream."""
        super()._keep(rows, stream, last)
        is_by_graph = stream.data_ptr() == self._inputs.features.data_ptr()
        self._next_ids[rows] = self._inputs.token_ids[last] if is_by_graph else self.head.draft(self._streams[rows])

    def _run(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, token_ids: torch.Tensor, features: torch.Tensor
    ) -> torch.Tensor:
        """Valid until the next run."""
        n = len(token_ids)
        size = self._size_for(n)
        if size is None:
            return super()._run(rows, starts, counts, token_ids, features)
        token_rows, positions = self._of_tokens(rows, starts, counts)
        inputs = self._inputs.of(n)
        inputs.token_ids.copy_(token_ids)
        inputs.features.copy_(features)
        self._set_tables(token_rows, int(positions.max()) + 1)
        self._set_places(size, token_rows, positions, limits=positions + 1)
        self._graphs[size].replay()
        return inputs.features

    def _size_for(self, num_places: int) -> int | None:
        """Of the smallest graph; None: there is none."""
        sizes = sorted(self._graphs)
        at = bisect.bisect_left(sizes, num_places)
        return sizes[at] if at < len(sizes) else None

    def _set_tables(self, rows: np.ndarray, num_positions: int) -> None:
        width = -(-num_positions // self._table.block_size)
        self._inputs.tables[: len(rows), :width].copy_(upload(self._table.block_ids[rows, :width], self._device))

    def _set_places(self, size: int, rows: np.ndarray, positions: np.ndarray, limits: np.ndarray) -> None:
        """Of rows [n]; what is not below its limit is padding: an empty sequence that writes to the null block."""
        told, n, is_going = np.zeros((4, size), dtype=np.int32), len(rows), positions < limits
        told[0, :n] = np.where(is_going, positions, 0)
        told[1, :n] = np.where(is_going, self._slots(rows, told[0, :n]), 0)
        told[2, :n] = np.where(is_going, positions + 1, 0)
        told[3, :n] = limits
        on_device, inputs = upload(told, self._device), self._inputs.of(size)
        inputs.places.copy_(on_device[:3])
        inputs.limits.copy_(on_device[3])

    def _capture(self, size: int) -> None:
        self._inputs.places.zero_()  # only padding
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        self._graphs[size], _ = graph_capture.capture(lambda: self._launch(size), pool)
        if self._behind is not None:
            self._behind.capture(size, self._graphs[size].pool())

    def _launch(self, size: int) -> None:
        inputs = self._inputs.of(size)
        stream = self._forward(inputs)
        inputs.token_ids.copy_(self.head.draft(stream))
        inputs.features.copy_(stream)
        positions, _, lengths = inputs.places
        block_size = self._table.block_size
        inputs.places.copy_(places_at(positions + 1, lengths > 0, inputs.limits, inputs.tables, block_size))

    def _forward(self, inputs: HeadInputs) -> torch.Tensor:
        """The residual stream after each place."""
        positions, slots = inputs.places[:2].to(torch.int64)
        plan = self._backend.plan_on_device(inputs.places[2], inputs.tables)
        assert plan is not None, f"{self._backend.name} cannot plan on the device"
        group = GroupContext(padded_metadata(len(slots), slots), self._backend, plan)
        return self.head.forward(inputs.token_ids, inputs.features, positions, ForwardContext((group,), *self._layer))
