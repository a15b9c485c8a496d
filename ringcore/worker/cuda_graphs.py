"""The forward pass of decoding steps as CUDA graphs: one launch in place of hundreds.

A graph is captured for a padded number of sequences and reads its inputs from memory that stays where it is; a step
copies its own there. Rows behind the step's have no tokens: they write to the null block and attend to nothing.
Contexts of any length fit, since the attention kernels read lengths on the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.context import ForwardContext, GroupContext
from ringcore.attention.metadata import AttentionMetadata
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.model_executor.models.base import CausalLM
from ringcore.worker.input_batch import InputBatch

__all__ = ["DecodeGraphs", "graph_sizes"]

_log = logging.getLogger(__name__)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The padded sizes, ascending: dense where padding would cost most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 32), *range(320, 1025, 64)]
    return [size for size in sizes if size < max_num_seqs] + [min(max_num_seqs, sizes[-1])]


class DecodeGraphs:
    """One graph a size, the largest captured first: the others then fit into its memory.

    `replay` must not be called for another step before the one before it was taken from `hidden`; on one stream that is
    the order anyway.
    """

    def __init__(
        self,
        model: CausalLM,
        backends: Sequence[AttentionBackend],  # by group; each can `plan_on_device`
        group_of_layer: tuple[int, ...],
        kv_caches: tuple[torch.Tensor, ...],
        kv_cache_config: KVCacheConfig,
        max_num_seqs: int,
        device: torch.device,
    ) -> None:
        """Captures every graph. Raises RuntimeError where the model does what a graph cannot hold."""
        self._model, self._backends = model, backends
        self._group_of_layer, self._kv_caches = group_of_layer, kv_caches
        self._sizes = graph_sizes(max_num_seqs)
        rows = self._sizes[-1]
        self._input_ids, self._positions = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._slots = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in backends]
        widths = [-(-kv_cache_config.max_model_len // group.spec.block_size) for group in kv_cache_config.groups]
        self._tables = [torch.zeros(rows, width, dtype=torch.int32, device=device) for width in widths]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}  # and its hidden states
        started = time.monotonic()
        for size in reversed(self._sizes):
            self._capture(size)
        _log.info("%d CUDA graphs captured in %.1f s", len(self._graphs), time.monotonic() - started)

    @property
    def max_num_seqs(self) -> int:
        return self._sizes[-1]

    def _capture(self, size: int) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels and sets libraries up, which a capture cannot
            self._forward(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            hidden = self._forward(size)
        self._graphs[size] = graph, hidden

    def _forward(self, size: int) -> torch.Tensor:
        groups = []
        for backend, slots, table in zip(self._backends, self._slots, self._tables, strict=True):
            plan = backend.plan_on_device(self._seq_lens[:size], table[:size])
            assert plan is not None, f"{backend.name} cannot plan on the device"
            groups.append(GroupContext(_metadata(size, slots[:size]), backend, plan))
        ctx = ForwardContext(tuple(groups), self._group_of_layer, self._kv_caches)
        return self._model.forward(self._input_ids[:size], self._positions[:size], ctx)

    def replay(self, batch: InputBatch) -> torch.Tensor:
        """One token a sequence, at most `max_num_seqs` of them -> hidden [num_seqs, hidden_size], until the next."""
        num_seqs = batch.metadata[0].num_seqs
        size = next(size for size in self._sizes if size >= num_seqs)
        _fill(self._input_ids, batch.input_ids, size)
        _fill(self._positions, batch.positions, size)
        _fill(self._seq_lens, torch.from_numpy(batch.metadata[0].seq_lens_cpu), size)
        for metadata, slots, table in zip(batch.metadata, self._slots, self._tables, strict=True):
            _fill(slots, metadata.slot_mapping, size)
            block_table = torch.from_numpy(np.ascontiguousarray(metadata.block_table_cpu))
            table[:num_seqs, : block_table.shape[1]].copy_(block_table, non_blocking=True)
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden[:num_seqs]


def _fill(kept: torch.Tensor, values: torch.Tensor, size: int) -> None:
    """The step's values, and zeros up to `size`."""
    kept[: len(values)].copy_(values, non_blocking=True)
    if len(values) < size:
        kept[len(values) : size].zero_()


def _metadata(size: int, slots: torch.Tensor) -> AttentionMetadata:
    """Of a step that is not known yet: what the host knows of it is its shape."""
    nothing = np.zeros(0, dtype=np.int32)
    return AttentionMetadata(
        num_tokens=size,
        num_seqs=size,
        max_query_len=1,
        max_seq_len=0,
        query_start_loc_cpu=nothing,
        seq_lens_cpu=nothing,
        block_table_cpu=nothing,
        slot_mapping=slots,
    )
