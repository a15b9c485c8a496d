"""Runs of a head as CUDA graphs: one replay in place of some 20 launches for each draft.

A graph computes so many places, each a token of a sequence of its own, and drafts after each. Tokens of one row are
sequences of the same block table, each a token longer than the one before, as in steps with drafts. Its results are its
next inputs, so a row's further drafts are replays that the host tells nothing but positions.
"""

from __future__ import annotations

import bisect

import numpy as np
import torch

from ringcore.attention.backend import PagedBackend
from ringcore.attention.context import ForwardContext, GroupContext
from ringcore.kernels.upload import upload
from ringcore.model_executor.models.draft_head import DraftHead
from ringcore.worker.drafts.head_runs import HeadRuns
from ringcore.worker.rows.request_rows import RequestRows
from ringcore.worker.runner import graph_capture
from ringcore.worker.runner.graph_capture import padded_metadata

__all__ = ["GRAPH_SIZES", "HeadGraphs"]

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # places; larger runs are launched operation by operation


class HeadGraphs(HeadRuns):
    """Graphs are captured while costs are measured, before the first request: a size that was not is padded to a larger
    one."""

    def __init__(
        self, head: DraftHead, backend: PagedBackend, kv_cache: torch.Tensor, rows: RequestRows, group: int
    ) -> None:
        """backend: it can `plan_on_device`."""
        super().__init__(head, backend, kv_cache, rows, group)
        most, device = GRAPH_SIZES[-1], head.tapped.device
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._features = torch.zeros(most, head.hidden_size, device=device)
        self._places = torch.zeros(3, most, dtype=torch.int32, device=device)  # positions, slots and lengths
        self._tables = torch.zeros(most, self._table.block_ids.shape[1], dtype=torch.int32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # The draft after each row's stream.
        self._next_ids = torch.zeros(len(rows.num_tokens), dtype=torch.int64, device=device)

    def run_padding(self, num_rows: int) -> None:
        size = next((size for size in GRAPH_SIZES if size >= num_rows), None)
        if size is None:
            super().run_padding(num_rows)
            return
        if size not in self._graphs:
            self._capture(size)
        none = np.zeros(num_rows, dtype=np.int64)
        self._replay(size, upload(self._padded(size, none, none, is_going=none > 0), self._device))
        self._token_ids[:1].cpu()

    def draft(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        n, most, size = len(rows), int(counts.max()), self._size_for(len(rows))
        if size is None:
            return super().draft(rows, starts, counts)
        on_device = upload(rows.astype(np.int64), self._device)
        drafts = torch.zeros(most, n, dtype=torch.int64, device=self._device)
        drafts[0] = self._next_ids[on_device]
        if most > 1:
            self._token_ids[:n].copy_(drafts[0])
            self._features[:n].copy_(self._streams[on_device])
            self._set_tables(rows, int(starts.max()) + most)
            going = range(1, most)
            places = upload(
                np.stack([self._padded(size, rows, starts + i - 1, counts > i) for i in going]), self._device
            )
        for place in range(1, most):
            self._replay(size, places[place - 1])
            drafts[place] = self._token_ids[:n]
        return drafts.t().cpu().numpy().astype(np.int32)

    def _keep(self, rows: torch.Tensor, stream: torch.Tensor, last: torch.Tensor) -> None:
        """With the first draft, which a graph has computed with the stream."""
        super()._keep(rows, stream, last)
        is_by_graph = stream.data_ptr() == self._features.data_ptr()
        self._next_ids[rows] = self._token_ids[last] if is_by_graph else self.head.draft(self._streams[rows])

    def _run(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, token_ids: torch.Tensor, features: torch.Tensor
    ) -> torch.Tensor:
        """Valid until the next run."""
        n = len(token_ids)
        size = self._size_for(n)
        if size is None:
            return super()._run(rows, starts, counts, token_ids, features)
        token_rows, positions = self._of_tokens(rows, starts, counts)
        self._token_ids[:n].copy_(token_ids)
        self._features[:n].copy_(features)
        self._set_tables(token_rows, int(positions.max()) + 1)
        self._replay(
            size, upload(self._padded(size, token_rows, positions, is_going=np.ones(n, dtype=bool)), self._device)
        )
        return self._features[:n]

    def _size_for(self, num_places: int) -> int | None:
        """Of the smallest graph; None: there is none."""
        sizes = sorted(self._graphs)
        at = bisect.bisect_left(sizes, num_places)
        return sizes[at] if at < len(sizes) else None

    def _set_tables(self, rows: np.ndarray, num_positions: int) -> None:
        width = -(-num_positions // self._table.block_size)
        self._tables[: len(rows), :width].copy_(upload(self._table.block_ids[rows, :width], self._device))

    def _padded(self, size: int, rows: np.ndarray, positions: np.ndarray, is_going: np.ndarray) -> np.ndarray:
        """[3, size] of rows [n]; what is not going on is padding: an empty sequence that writes to the null block."""
        places, n = np.zeros((3, size), dtype=np.int32), len(rows)
        places[0, :n] = np.where(is_going, positions, 0)
        places[1, :n] = np.where(is_going, self._slots(rows, places[0, :n]), 0)
        places[2, :n] = np.where(is_going, positions + 1, 0)
        return places

    def _replay(self, size: int, places: torch.Tensor) -> None:
        """places: as of `_padded`."""
        self._places[:, :size].copy_(places)
        self._graphs[size].replay()

    def _capture(self, size: int) -> None:
        self._places.zero_()  # only padding
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        self._graphs[size], _ = graph_capture.capture(lambda: self._launch(size), pool)

    def _launch(self, size: int) -> None:
        token_ids, features = self._token_ids[:size], self._features[:size]
        positions, slots = self._places[:2, :size].to(torch.int64)
        plan = self._backend.plan_on_device(self._places[2, :size], self._tables[:size])
        assert plan is not None, f"{self._backend.name} cannot plan on the device"
        group = GroupContext(padded_metadata(size, slots), self._backend, plan)
        stream = self.head.forward(token_ids, features, positions, ForwardContext((group,), *self._layer))
        token_ids.copy_(self.head.draft(stream))
        features.copy_(stream)
