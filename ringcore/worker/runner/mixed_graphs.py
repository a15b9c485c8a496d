"""CUDA graphs of mixed steps: prefill chunks, and decodes beside them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
import torch

from ringcore.attention.backend import PagedBackend
from ringcore.attention.context import GroupContext
from ringcore.kernels.launch.upload import upload
from ringcore.worker.rows.device_rows import DeviceRows
from ringcore.worker.rows.input_batch import InputBatch
from ringcore.worker.runner import graph_capture
from ringcore.worker.runner.graph_capture import mixed_sizes, padded_metadata
from ringcore.worker.runner.graph_demand import GraphDemand
from ringcore.worker.runner.paged_model import PagedModel

__all__ = ["MixedGraphs", "can_plan_mixed"]


def can_plan_mixed(backends: Sequence[PagedBackend], device: torch.device) -> bool:
    """Whether mixed steps can be CUDA graphs with these backends."""
    none = torch.zeros(2, dtype=torch.int32, device=device)
    one = none[:1], none[None, :1]  # the length and the block table of one sequence
    return all(backend.plan_mixed_on_device(none, *one, none[:1], 1) is not None for backend in backends)


class MixedGraphs:
    """CUDA graphs of the forward pass of mixed steps: up to `max_tokens` tokens, of any number of sequences.

    The host gathers the batch, and launches sampling afterwards. What a missing graph would do is launched operation by
    operation, padded as the graph is: the same kernels.
    """

    def __init__(self, paged: PagedModel, rows: DeviceRows, max_tokens: int) -> None:
        """paged: of backends that `can_plan_mixed`."""
        self._paged = paged
        self._sizes = mixed_sizes(max_tokens)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}  # with its hidden states
        self._demand = GraphDemand()
        device, layout, tokens = rows.state.device, rows.layout, self._sizes[-1]
        self._inputs = paged.model.new_inputs(tokens, device)
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._slots = [torch.zeros(tokens, dtype=torch.int64, device=device) for _ in paged.backends]
        num_seqs = min(tokens, layout.max_rows)
        self._starts = torch.zeros(num_seqs + 1, dtype=torch.int32, device=device)
        self._seq_lens, self._decode_seq_lens = torch.zeros(2, num_seqs, dtype=torch.int32, device=device)
        self._tables = [
            torch.zeros(num_seqs, layout.table_stride(group), dtype=torch.int32, device=device)
            for group in range(len(paged.backends))
        ]

    @property
    def max_tokens(self) -> int:
        return self._sizes[-1]

    def takes(self, batch: InputBatch) -> bool:
        """Whether `forward` computes this step: not a larger one, nor one with prompts that have a kernel which
        cannot be captured."""
        pairs = zip(self._paged.backends, batch.metadata, strict=True)
        return len(batch.input_ids) <= self.max_tokens and not any(b.has_host_kernels(step) for b, step in pairs)

    @property
    def missing(self) -> list[int]:
        """Sizes whose graph is not captured yet, ascending."""
        return [size for size in self._sizes if size not in self._graphs]

    def forward(self, inputs: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        """At most `max_tokens` tokens -> the model's output [num_tokens, hidden_size], valid until the next call.
        inputs: see `CausalLM.forward`."""
        num_tokens = batch.metadata[0].num_tokens
        size = self._sizes[bisect.bisect_left(self._sizes, num_tokens)]
        if size not in self._graphs and self._demand.is_due(size):
            self.capture(size)
        self._fill(inputs, batch, size)
        if size not in self._graphs:
            return self._run(size)[:num_tokens]
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden[:num_tokens]

    def _fill(self, inputs: torch.Tensor, batch: InputBatch, size: int) -> None:
        step = batch.metadata[0]
        n, d = step.num_seqs, step.num_decodes
        pairs = zip(batch.metadata, self._slots, strict=True)
        tokens = [(self._inputs, inputs), (self._positions, batch.positions)]
        for static, values in tokens + [(slots, metadata.slot_mapping) for metadata, slots in pairs]:
            static[: step.num_tokens].copy_(values)
            static[step.num_tokens : size].zero_()
        starts = np.full(len(self._starts), step.num_tokens, dtype=np.int32)
        starts[d : n + 1] = step.query_start_loc_cpu[d:]
        starts[:d] = d
        lens = np.zeros((2, len(self._seq_lens)), dtype=np.int32)
        lens[0, :n], lens[1, :d] = step.seq_lens_cpu, step.seq_lens_cpu[:d]
        for static, array in ((self._starts, starts), (self._seq_lens, lens[0]), (self._decode_seq_lens, lens[1])):
            static.copy_(upload(array, static.device))
        for metadata, table in zip(batch.metadata, self._tables, strict=True):
            width = metadata.block_table_cpu.shape[1]
            table[:n, :width].copy_(upload(metadata.block_table_cpu, table.device))

    def capture(self, size: int) -> None:
        """Captures the graph of a size; called between steps."""
        for static in (self._inputs, self._positions, self._starts, self._seq_lens, self._decode_seq_lens):
            static.zero_()  # only padding
        for slots in self._slots:
            slots.zero_()
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        self._graphs[size] = graph_capture.capture(lambda: self._run(size), pool)

    def _run(self, size: int) -> torch.Tensor:
        groups = []
        n = min(size, len(self._seq_lens))  # sequences: each has at least one token
        starts, lens, decode_lens = self._starts[: n + 1], self._seq_lens[:n], self._decode_seq_lens[:n]
        for backend, slots, table in zip(self._paged.backends, self._slots, self._tables, strict=True):
            plan = backend.plan_mixed_on_device(starts, lens, table[:n], decode_lens, size)
            assert plan is not None, f"{backend.name} cannot plan on the device"
            groups.append(GroupContext(padded_metadata(size, slots[:size]), backend, plan))
        return self._paged.forward(self._inputs[:size], self._positions[:size], groups)
