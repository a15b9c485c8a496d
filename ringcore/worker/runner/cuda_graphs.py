"""Decoding steps that run entirely on the device, and their CUDA graphs: one replay instead of hundreds of launches.

A graph is captured for a padded batch size and reads its inputs from static buffers. Padding rows after the last real
row have no tokens: they write to the null block and attend to nothing. Contexts of any length fit one graph, since the
attention kernels read lengths on the device.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.context import ForwardContext, GroupContext
from ringcore.attention.metadata import AttentionMetadata
from ringcore.kernels.sampling import sample_tokens
from ringcore.kernels.step import finish_rows, prepare_decode
from ringcore.kernels.step_state import DecodeInputs
from ringcore.model_executor.models.base import CausalLM
from ringcore.protocol.codec import int_array
from ringcore.worker.logits.result_ring import ResultRing
from ringcore.worker.rows.device_rows import DeviceRows
from ringcore.worker.rows.input_batch import InputBatch
from ringcore.worker.rows.upload import upload

__all__ = ["DecodeGraphs", "DecodeStep", "MixedGraphs", "graph_sizes", "mixed_sizes"]

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
MarkRows = Callable[[torch.Tensor, torch.Tensor], None]  # token ids [n] int64, ok [n] bool; may change them

# The sizes of `graph_sizes` that are captured before the first request; the others are captured while the engine is
# idle, or when a step needs them.
_COMMON_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MIXED_SIZES = (16, 32, 64, 128, 192, 256, 384, 512)  # tokens; above, kernels take longer than their launches


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The padded batch sizes of decoding graphs, ascending: dense where padding costs most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 32), *range(320, 1025, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def mixed_sizes(max_tokens: int) -> list[int]:
    """The padded token counts of mixed steps (prefill chunks and decodes), ascending."""
    return [size for size in _MIXED_SIZES if size < max_tokens] + [min(_MIXED_SIZES[-1], max_tokens)]


class DecodeStep:
    """A pure decoding step, in which every row has one uncomputed token: inputs, model, sampling, stop checks.

    Of the host's state it depends only on the number of rows.
    """

    def __init__(
        self,
        model: CausalLM,
        backends: Sequence[AttentionBackend],  # by group; each can `plan_on_device`
        group_of_layer: tuple[int, ...],
        kv_caches: tuple[torch.Tensor, ...],
        rows: DeviceRows,
        ring: ResultRing,
    ) -> None:
        self._model, self._backends = model, backends
        self._group_of_layer, self._kv_caches = group_of_layer, kv_caches
        self._rows, self._ring = rows, ring
        max_rows, device = rows.layout.max_rows, rows.state.device
        self._inputs = DecodeInputs.allocate(rows.layout, rows.state, max_rows)
        self._logits: torch.Tensor | None = None  # [max_rows, vocab_size], a static buffer; None: each step allocates
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._ok = torch.zeros(max_rows, dtype=torch.bool, device=device)

    def warm_up(self) -> None:
        """Sets up before the first request what would delay it: a dummy run, a step without rows."""
        self.launch(int_array())

    def launch(self, scheduled: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Launches a step of rows [n] -> logits [n, vocab_size] and token ids [n], both valid until the next launch."""
        self._set_rows(scheduled)
        self._ring.launched()
        return self._run(max(1, len(scheduled)))

    def launch_logits(self, scheduled: np.ndarray) -> torch.Tensor:
        """Launches a step of rows [n], n > 0, up to its logits [n, vocab_size], which are valid until the next launch;
        `launch_sampling` must follow."""
        self._set_rows(scheduled)
        return self._run_logits(len(scheduled))

    def launch_sampling(self, logits: torch.Tensor, mark: MarkRows) -> torch.Tensor:
        """Launches the rest of the step that `launch_logits` began: samples from logits [n, vocab_size] of any float
        dtype -> token ids [n], valid until the next launch.

        mark: called with the sampled token ids and ok [n], before they are written to the rows and the result ring.
        """
        self._ring.launched()
        return self._sample(logits, len(logits), mark)

    def _set_rows(self, scheduled: np.ndarray) -> None:
        """Sets the batch of the next launch."""
        self._rows.set_batch(scheduled)
        self._rows.write()

    def _run(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._run_logits(size)
        return logits, self._sample(logits, size)

    def _run_logits(self, size: int) -> torch.Tensor:
        inputs = self._inputs
        prepare_decode(self._rows.state, self._rows.layout, inputs, size)
        groups = []
        for backend, slots, table in zip(self._backends, inputs.slots, inputs.block_tables, strict=True):
            plan = backend.plan_on_device(inputs.seq_lens[:size], table[:size])
            assert plan is not None, f"{backend.name} cannot plan on the device"
            groups.append(GroupContext(_metadata(size, slots[:size]), backend, plan))
        ctx = ForwardContext(tuple(groups), self._group_of_layer, self._kv_caches)
        hidden = self._model.forward(inputs.input_ids[:size], inputs.positions[:size], ctx)
        return self._model.compute_logits(hidden, None if self._logits is None else self._logits[:size])

    def _sample(self, logits: torch.Tensor, size: int, mark: MarkRows | None = None) -> torch.Tensor:
        token_ids, ok = self._token_ids[:size], self._ok[:size]
        sample_tokens(logits, self._inputs.sampling, token_ids=token_ids, ok=ok)
        if mark is not None:
            mark(token_ids, ok)
        finish_rows(self._rows.state, self._rows.layout, self._rows.batch, token_ids, ok, self._ring.words, size)
        return token_ids


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # [size, vocab_size]: a view of the buffer shared by all sizes
    token_ids: torch.Tensor  # [size], likewise


class DecodeGraphs(DecodeStep):
    """One graph per size, in one memory pool: two graphs never run at the same time. Adjusted steps use a second set of
    graphs, which end with the logits. All graphs write logits and token ids to the same static buffers: a tensor that a
    graph returns would keep its memory for the life of the graph, and 256 rows of logits are 150 MiB."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        max_rows, device = self._rows.layout.max_rows, self._rows.state.device
        self._logits = torch.empty(max_rows, self._model.vocab_size, dtype=torch.float32, device=device)
        self._sizes = graph_sizes(max_rows)
        self._graphs: dict[int, _Captured] = {}
        self._logits_graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by size: up to the logits

    def warm_up(self) -> None:
        """Captures the common sizes, the largest first, so that the smaller ones reuse its pool memory."""
        started = time.monotonic()
        for size in reversed(self._sizes):
            if size in _COMMON_SIZES:
                self.capture(size)
        _log.info("%d CUDA graphs captured in %.1f s", len(self._graphs), time.monotonic() - started)

    @property
    def missing(self) -> list[int]:
        """Sizes of whole steps whose graph is not captured yet, ascending."""
        return [size for size in self._sizes if size not in self._graphs]

    def launch(self, scheduled: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        n = len(scheduled)
        size = self._size_of(n)
        if size not in self._graphs:
            self.capture(size)
        self._set_rows(scheduled)
        self._ring.launched()
        captured = self._graphs[size]
        captured.graph.replay()
        return captured.logits[:n], captured.token_ids[:n]

    def launch_logits(self, scheduled: np.ndarray) -> torch.Tensor:
        n = len(scheduled)
        size = self._size_of(n)
        if size not in self._logits_graphs:
            self._set_rows(int_array())
            self._logits_graphs[size], _ = _capture(lambda: self._write_logits(size), self._pool())
        self._set_rows(scheduled)
        self._logits_graphs[size].replay()
        assert self._logits is not None
        return self._logits[:n]

    def _write_logits(self, size: int) -> None:
        self._run_logits(size)

    def _size_of(self, num_rows: int) -> int:
        return self._sizes[bisect.bisect_left(self._sizes, num_rows)]

    def _pool(self) -> Any:
        graphs = [*(captured.graph for captured in self._graphs.values()), *self._logits_graphs.values()]
        return graphs[0].pool() if graphs else None

    def capture(self, size: int) -> None:
        """Captures the graph of a size; called between steps. The dummy run before the capture is a step of the
        ring."""
        self._set_rows(int_array())
        # Counted after the dummy run: a failed capture must not leave a step number that the device never writes.
        graph, (logits, token_ids) = _capture(lambda: self._run(size), self._pool(), self._ring.launched)
        self._graphs[size] = _Captured(graph, logits, token_ids)


class MixedGraphs:
    """CUDA graphs of the forward pass of mixed steps: up to `max_tokens` tokens, of any number of sequences.

    The host gathers the batch, and launches sampling afterwards. A missing graph is captured when a step needs it.
    """

    def __init__(
        self,
        model: CausalLM,
        backends: Sequence[AttentionBackend],  # by group; each can `plan_mixed_on_device`
        group_of_layer: tuple[int, ...],
        kv_caches: tuple[torch.Tensor, ...],
        rows: DeviceRows,
        max_tokens: int,
    ) -> None:
        self._model, self._backends = model, backends
        self._group_of_layer, self._kv_caches = group_of_layer, kv_caches
        self._sizes = mixed_sizes(max_tokens)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}  # with its hidden states
        device, layout, tokens = rows.state.device, rows.layout, self._sizes[-1]
        self._input_ids, self._positions = torch.zeros(2, tokens, dtype=torch.int64, device=device)
        self._slots = [torch.zeros(tokens, dtype=torch.int64, device=device) for _ in backends]
        num_seqs = min(tokens, layout.max_rows)
        self._starts = torch.zeros(num_seqs + 1, dtype=torch.int32, device=device)
        self._seq_lens, self._decode_seq_lens = torch.zeros(2, num_seqs, dtype=torch.int32, device=device)
        self._tables = [
            torch.zeros(num_seqs, layout.table_stride(group), dtype=torch.int32, device=device)
            for group in range(len(backends))
        ]

    @property
    def max_tokens(self) -> int:
        return self._sizes[-1]

    @property
    def missing(self) -> list[int]:
        """Sizes whose graph is not captured yet, ascending."""
        return [size for size in self._sizes if size not in self._graphs]

    def forward(self, batch: InputBatch) -> torch.Tensor:
        """At most `max_tokens` tokens -> hidden states [num_tokens, hidden_size], valid until the next call."""
        num_tokens = batch.metadata[0].num_tokens
        size = self._sizes[bisect.bisect_left(self._sizes, num_tokens)]
        if size not in self._graphs:
            self.capture(size)
        self._fill(batch, size)
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden[:num_tokens]

    def _fill(self, batch: InputBatch, size: int) -> None:
        step = batch.metadata[0]
        n, d = step.num_seqs, step.num_decodes
        pairs = zip(batch.metadata, self._slots, strict=True)
        tokens = [(self._input_ids, batch.input_ids), (self._positions, batch.positions)]
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
        for static in (self._input_ids, self._positions, self._starts, self._seq_lens, self._decode_seq_lens):
            static.zero_()  # only padding
        for slots in self._slots:
            slots.zero_()
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        self._graphs[size] = _capture(lambda: self._run(size), pool)

    def _run(self, size: int) -> torch.Tensor:
        groups = []
        n = min(size, len(self._seq_lens))  # sequences: each has at least one token
        starts, lens, decode_lens = self._starts[: n + 1], self._seq_lens[:n], self._decode_seq_lens[:n]
        for backend, slots, table in zip(self._backends, self._slots, self._tables, strict=True):
            plan = backend.plan_mixed_on_device(starts, lens, table[:n], decode_lens, size)
            assert plan is not None, f"{backend.name} cannot plan on the device"
            groups.append(GroupContext(_metadata(size, slots[:size]), backend, plan))
        ctx = ForwardContext(tuple(groups), self._group_of_layer, self._kv_caches)
        return self._model.forward(self._input_ids[:size], self._positions[:size], ctx)


def _capture(
    run: Callable[[], _Result], pool: Any, after_warm_up: Callable[[], object] = lambda: None
) -> tuple[torch.cuda.CUDAGraph, _Result]:
    """A graph of what `run` launches, and its result: tensors that every replay overwrites. after_warm_up: called after
    the warm-up run and before the capture, which executes nothing."""
    graph = torch.cuda.CUDAGraph()
    capture = torch.cuda.graph(graph, pool=pool)
    # torch's one capture stream. torch keeps a cuBLAS workspace, 32 MiB on an H200, for every stream that ever ran a
    # matrix product: one is enough.
    stream = capture.capture_stream
    assert stream is not None, "torch creates a capture stream"
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm-up run: compiles kernels and initializes libraries, which a capture cannot
        run()
    after_warm_up()
    torch.cuda.current_stream().wait_stream(stream)
    with capture:
        result = run()
    return graph, result


def _metadata(size: int, slots: torch.Tensor) -> AttentionMetadata:
    """The metadata for planning on the device: the host knows the padded shape only."""
    unknown = np.zeros(0, dtype=np.int32)
    return AttentionMetadata(
        num_tokens=size,
        num_seqs=size,
        max_query_len=1,
        max_seq_len=0,
        query_start_loc_cpu=unknown,
        seq_lens_cpu=unknown,
        block_table_cpu=unknown,
        slot_mapping=slots,
        num_decodes=size,
    )
