"""CUDA graphs of decoding steps: one replay instead of hundreds of launches.

A graph is captured for a padded batch size and reads its inputs from static buffers. Padding rows after the last real
row have no tokens: they write to the null block and attend to nothing. Contexts of any length fit one graph, since the
attention kernels read lengths on the device.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ringcore.protocol.codec import int_array
from ringcore.worker.logits.result_ring import ResultRing
from ringcore.worker.rows.device_rows import DeviceRows
from ringcore.worker.runner import graph_capture
from ringcore.worker.runner.decode_step import DecodeStep
from ringcore.worker.runner.graph_capture import graph_sizes
from ringcore.worker.runner.graph_demand import GraphDemand
from ringcore.worker.runner.paged_model import PagedModel
from ringcore.worker.runner.stage_port import StagePort

__all__ = ["DecodeGraphs"]

_log = logging.getLogger(__name__)

# The sizes of `graph_sizes` that are captured before the first request; the others are captured while the engine is
# idle, or by steps, see `GraphDemand`.
_COMMON_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MOST_PADDING = 2  # of a missing size: the graph of one so many times as large is faster than single launches


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    results: tuple[torch.Tensor, ...]  # [size, ...] each, see `DecodeStep.launch`: views of buffers shared by all sizes


class DecodeGraphs(DecodeStep):
    """One graph per size, in one memory pool: two graphs never run at the same time. Adjusted steps, and those with
    drafts, use a second set of graphs, which end with the logits. All graphs write logits and token ids to the same
    static buffers: a tensor that a graph returns would keep its memory for the life of the graph, and 256 rows of
    logits are 150 MiB."""

    def __init__(self, paged: PagedModel, rows: DeviceRows, ring: ResultRing, port: StagePort) -> None:
        super().__init__(paged, rows, ring, port)
        layout = rows.layout
        if paged.model.stage.is_last:
            shape = layout.num_places, paged.model.vocab_size
            self._logits = torch.empty(shape, dtype=torch.float32, device=rows.state.device)
        self._sizes, self._logits_sizes = graph_sizes(layout.max_rows), graph_sizes(layout.num_places)
        self._graphs: dict[int, _Captured] = {}
        self._logits_graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by size: up to the logits
        self._demand, self._logits_demand = GraphDemand(), GraphDemand()

    def warm_up(self) -> None:
        """Captures the common sizes, the largest first, so that the smaller ones reuse its pool memory."""
        started = time.monotonic()
        for size in reversed(self._sizes):
            if size in _COMMON_SIZES:
                self._capture_step(size)
        _log.info("%d CUDA graphs captured in %.1f s", len(self._graphs), time.monotonic() - started)

    @property
    def missing(self) -> list[int]:
        """Padded sizes of which a graph is not captured yet, ascending: of whole steps, or of steps up to the logits
        where rows may have drafts."""
        sizes = {size for size in self._sizes if size not in self._graphs}
        if self._has_drafts:
            sizes |= {size for size in self._logits_sizes if size not in self._logits_graphs}
        return sorted(sizes)

    def capture(self, size: int) -> None:
        if size in self._sizes and size not in self._graphs:
            self._capture_step(size)
        if self._has_drafts and size not in self._logits_graphs:
            self._capture_logits(size)

    def launch(self, scheduled: np.ndarray) -> tuple[torch.Tensor, ...]:
        n = len(scheduled)
        size = _padded(self._sizes, n)
        if size not in self._graphs and self._demand.is_due(size):
            self._capture_step(size)
        size = _nearest(self._graphs, size)
        self._set_rows(scheduled)
        self._ring.launched()
        captured = self._graphs.get(size)
        if captured is None:
            return tuple(result[:n] for result in self._run(size))
        captured.graph.replay()
        return tuple(result[:n] for result in captured.results)

    def _prepare_logits(self, num_places: int, must_capture: bool = False) -> None:
        size = _padded(self._logits_sizes, num_places)
        if size not in self._logits_graphs and (must_capture or self._logits_demand.is_due(size)):
            self._capture_logits(size)

    def _launch_logits(self, num_places: int) -> torch.Tensor:
        size = _nearest(self._logits_graphs, _padded(self._logits_sizes, num_places))
        if size not in self._logits_graphs:
            return self._run_logits(size, one_token_each=not self._has_drafts)[:num_places]
        self._logits_graphs[size].replay()
        assert self._logits is not None
        return self._logits[:num_places]

    def _pool(self) -> Any:
        graphs = [*(captured.graph for captured in self._graphs.values()), *self._logits_graphs.values()]
        return graphs[0].pool() if graphs else None

    def _capture_step(self, size: int) -> None:
        """The dummy run before the capture is a step of the ring."""
        self._set_rows(int_array())
        # Counted after the dummy run: a failed capture must not leave a step number that the device never writes.
        run, pool = (lambda: self._run(size)), self._pool()
        self._graphs[size] = _Captured(*graph_capture.capture(run, pool, self._ring.launched))

    def _capture_logits(self, size: int) -> None:
        self._set_rows(int_array())
        self._logits_graphs[size], _ = graph_capture.capture(lambda: self._write_logits(size), self._pool())

    def _write_logits(self, size: int) -> None:
        self._run_logits(size, one_token_each=not self._has_drafts)


def _nearest(graphs: Mapping[int, object], size: int) -> int:
    """The smallest size with a graph that is not much larger, or the size itself."""
    return min((other for other in graphs if size <= other <= _MOST_PADDING * size), default=size)


def _padded(sizes: Sequence[int], num_places: int) -> int:
    return sizes[bisect.bisect_left(sizes, num_places)]
