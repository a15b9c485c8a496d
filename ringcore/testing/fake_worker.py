"""A worker without a model or a device: it keeps rows, checks the engine's messages, and generates tokens."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from ringcore.config import EngineConfig
from ringcore.errors import InvalidRequestError
from ringcore.host.resources import process_usage, resident_bytes
from ringcore.host.thread_stacks import thread_stacks
from ringcore.kv_cache.spec import KVCacheConfig, KVCacheSpec
from ringcore.protocol.codec import int_array
from ringcore.protocol.requests import TokenLogprobs
from ringcore.protocol.row_spans import RowSpans
from ringcore.protocol.steps import ModelRunnerOutput, NewRequest, RowError, SchedulerOutput
from ringcore.protocol.stored_kv import LevelCounts, LoadReport
from ringcore.testing.fake_prompts import FakePrompts
from ringcore.testing.fake_rows import FakeRows
from ringcore.testing.fake_store import FakeStore
from ringcore.testing.hardware import Hardware, kv_cache_spec, memory_table
from ringcore.testing.speculator import FakeSpeculator
from ringcore.testing.step_cost import StepWork
from ringcore.testing.tokens import Script, make_token_source
from ringcore.tracing import Tracer
from ringcore.worker.rpc import rpc
from ringcore.worker.traced_worker import TracedWorker

__all__ = ["FakeWorker"]

_NO_WORK = StepWork(0, 0, 0)
_DEVICE = "cuda"  # what `Hardware` describes


class FakeWorker(TracedWorker):
    """One rank. Its methods are those of `ringcore.worker.worker.Worker`; the output rank executes the steps.

    last_work: the work of the last step; that of the first step in a multi-step message.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        hardware: Hardware,
        script: Script | None = None,
        speculator: FakeSpeculator | None = None,
    ) -> None:
        self.config, self.rank, self.tracer = config, rank, Tracer()
        self.last_work = _NO_WORK
        self._hardware, self._script, self._speculator = hardware, script, speculator or FakeSpeculator()
        self._stage = "new"
        self._kv_cache_bytes = 0
        self._rows: FakeRows | None = None
        self._memory = {"weights": "resident", "kv_cache": "resident"}
        self._target: dict[str, str] | None = None  # of a prepared change of memory states
        self._num_steps = self._num_tokens = 0
        self._store = FakeStore()
        self._num_logprobs: dict[int, int] = {}  # by row, of requests with logprobs
        self._prompts = FakePrompts(config.model.spec.vocab_size)

    @rpc(scope="engine")
    def init_device(self) -> None:
        self.config = self.config.on_device(_DEVICE)
        self._stage = "device"

    @rpc(scope="engine")
    def load_model(self) -> dict[str, float]:
        """-> {"weights_bytes", "weights_s"}: the size that the weights would have, and 0 s."""
        self._stage = "model"
        return {"weights_bytes": float(self._memory_table()["weights_bytes"]), "weights_s": 0.0}

    @rpc(scope="engine")
    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """The KV cache spec of each attention layer of the model, by layer name."""
        return kv_cache_spec(self.config)

    @rpc(scope="engine")
    def determine_available_memory(self) -> dict[str, int]:
        """The memory table of `testing.hardware` in bytes."""
        return self._memory_table()

    @rpc(scope="engine")
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Creates the rows; allocates no KV cache."""
        scheduler, spec = self.config.scheduler, self.config.model.spec
        self._rows = FakeRows(scheduler.max_num_seqs, scheduler.token_budget, kv_cache_config)
        self._tokens = make_token_source(self._script, spec.vocab_size, next(iter(spec.eos_token_ids), None))
        self._kv_cache_bytes = kv_cache_config.total_bytes
        self._stage = "ready"

    @rpc(scope="engine")
    def open_kv_store(self, namespace: str, num_blocks: int) -> list[bytes]:
        """Of names alone, and empty."""
        self._store = FakeStore()
        return []

    @rpc(scope="engine")
    def finished_kv_loads(self, numbers: list[int], wait_s: float) -> LoadReport:
        return LoadReport(self._store.results(numbers), LevelCounts())

    @rpc(scope="engine")
    def reset_rows(self) -> None:
        """Clears every row, as if all requests had finished."""
        self.rows.clear()

    @property
    def rows(self) -> FakeRows:
        if self._rows is None:
            method = "initialize_from_config"
            raise InvalidRequestError(f"the worker has no rows yet; call {method} first", field="method", value=method)
        return self._rows

    def _memory_table(self) -> dict[str, int]:
        return memory_table(self.config, self._hardware)

    # -----------------------------------------------------------------------------------------------------------
    # Memory: only its states, nothing is allocated.

    @rpc(scope="engine")
    def prepare_memory(self, target: dict[str, str]) -> dict[str, float]:
        """As the real worker's; checks the target states."""
        assert self._target is None, "another memory change is prepared"
        assert target.keys() <= self._memory.keys(), target
        self._target = target
        return {}

    @rpc(scope="engine")
    def commit_memory(self) -> dict[str, float]:
        """-> the bytes that each tag freed."""
        assert self._target is not None, "no change of memory was prepared"
        target, self._target = self._target, None
        table = {"weights": self._memory_table()["weights_bytes"], "kv_cache": self._kv_cache_bytes}
        leaving = [tag for tag, state in target.items() if state != "resident" and self._memory[tag] == "resident"]
        self._memory |= target
        return {f"{tag}_freed_bytes": float(table[tag]) for tag in leaving}

    @rpc(scope="engine")
    def roll_back_memory(self) -> None:
        self._target = None

    @rpc(read_only=True)
    def memory_states(self) -> dict[str, str]:
        """'resident', 'offloaded' or 'discarded' by tag."""
        return dict(self._memory)

    @rpc(scope="engine")
    def start_weight_update(self) -> None:
        """Checks that the weights are resident; there are none to update."""
        assert self._memory["weights"] == "resident", "no memory for weights"

    @rpc(scope="engine")
    def update_weights(self, source: dict[str, Any]) -> dict[str, float]:
        """Ignores the contents of `source`."""
        return {"num_tensors": float(len(source.get("tensors", [])))}

    @rpc(scope="engine")
    def finish_weight_update(self, require_all: bool) -> dict[str, float]:
        """Accepts the update as complete."""
        return {}

    # -----------------------------------------------------------------------------------------------------------
    # The step.

    @rpc(scope="engine")
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """One step, or several; the sampled tokens on the output rank, None on the others.

        Raises AssertionError for an invalid step.
        """
        return self.execute(scheduler_output)

    def execute(self, step: SchedulerOutput, failing_row: int | None = None) -> ModelRunnerOutput | None:
        """`execute_model`, in which the request of `failing_row` (-1: of the step's first row) fails."""
        assert set(self._memory.values()) == {"resident"}, f"a step without its memory: {self._memory}"
        if step.kv_transfers is not None:
            self._store.transfer(step.kv_transfers)
        scheduled = self.rows.apply(step)
        for request in step.new_requests:
            self._note(request)
        self.last_work = scheduled.work
        self._num_steps += step.num_steps
        self._num_tokens += step.num_tokens
        sampling = self.rows.advance(scheduled.rows, scheduled.num_scheduled_tokens)
        all_sample = bool(sampling.all())
        rows = scheduled.rows if all_sample else scheduled.rows[sampling]
        spans = self._gains(step, rows, sampling)
        sampled = self._sample(rows, spans)
        if self.rank != self.config.parallel.layout.output_rank:
            return None
        errors: list[RowError] = []
        if failing_row is not None and len(scheduled.rows):
            failing = int(scheduled.rows[0]) if failing_row < 0 else failing_row
            errors.append(RowError(failing, f"row {failing} failed in step {step.step} (injected fault)"))
            good = rows != failing
            sampled, spans = sampled[spans.repeat(good)], spans.kept(good)
            rows, all_sample = rows[good], False
            self._prompts.forget(failing)
        return ModelRunnerOutput(
            step=step.step,
            rows=None if all_sample else int_array(rows),
            token_ids=sampled,
            logprobs=self._logprobs(rows, spans, sampled),
            row_errors=errors,
            prompt_logprobs=self._prompts.logprobs(rows),
            num_gained=None if spans.counts is None else int_array(spans.counts),
            pooled=self._prompts.pooled(rows),
        )

    def _note(self, request: NewRequest) -> None:
        self._tokens.start(request)
        self._num_logprobs.pop(request.row, None)
        self._prompts.note(request)
        params = request.sampling_params
        if params.logprobs is not None:
            self._num_logprobs[request.row] = self._num_asked(params.logprobs)

    def _num_asked(self, num_logprobs: int) -> int:
        return self.config.model.spec.vocab_size if num_logprobs == -1 else num_logprobs

    def _gains(self, step: SchedulerOutput, rows: np.ndarray, sampling: np.ndarray) -> RowSpans:
        """How many tokens each of `rows`, those of the step that `sampling` selects, gains in this step."""
        if step.max_gained is None:
            return RowSpans(step.num_steps)
        seeds, positions = self.rows.seed[rows], self.rows.num_tokens[rows]
        num_accepted = self._speculator.num_accepted(seeds, positions, step.max_gained[sampling] - 1)
        return RowSpans(1, 1 + num_accepted if num_accepted.any() else None)

    def _sample(self, rows: np.ndarray, spans: RowSpans) -> np.ndarray:
        """-> [num_tokens] int32: the sampled tokens, appended to the rows."""
        if not len(rows):
            return int_array()
        if spans.counts is None:
            sampled = self._sample_each(rows, spans.each)
        else:
            sampled = np.empty(spans.num_tokens(len(rows)), dtype=np.int32)
            for count in np.unique(spans.counts):
                has_count = spans.counts == count
                sampled[spans.repeat(has_count)] = self._sample_each(rows[has_count], int(count))
        self.rows.append_tokens(rows, spans.per_row)
        return sampled

    def _sample_each(self, rows: np.ndarray, count: int) -> np.ndarray:
        """-> [num_rows * count] int32"""
        return self._tokens.sample(rows, self.rows.seed[rows], self.rows.num_tokens[rows], count).reshape(-1)

    def _logprobs(self, rows: np.ndarray, spans: RowSpans, sampled: np.ndarray) -> list[TokenLogprobs | None] | None:
        """Uniform logprobs: the sampled token, then the tokens after it in the vocabulary."""
        if not self._num_logprobs or not any(row in self._num_logprobs for row in rows.tolist()):
            return None
        vocab_size = self.config.model.spec.vocab_size
        return [
            self._token_logprobs(token, self._num_logprobs[row], vocab_size) if row in self._num_logprobs else None
            for row, token in zip(spans.repeat(rows).tolist(), sampled.tolist(), strict=True)
        ]

    def _token_logprobs(self, token: int, num_top: int, vocab_size: int) -> TokenLogprobs:
        top = [(token + i) % vocab_size for i in range(num_top)]
        return TokenLogprobs([token, *top], [-math.log(vocab_size)] * (1 + num_top), [1, *range(1, num_top + 1)])

    # -----------------------------------------------------------------------------------------------------------
    # Health and statistics.

    @rpc(read_only=True)
    def stats(self) -> dict[str, float]:
        """Counts since the start, no CUDA graphs, and what the process uses."""
        return {
            "rank": self.rank,
            "num_steps": self._num_steps,
            "num_tokens": self._num_tokens,
            "num_graphs_left": 0,
        } | process_usage()

    @rpc(read_only=True)
    def memory(self) -> dict[str, int]:
        """The table of `determine_available_memory`, `resident_bytes`, and the bytes that the KV cache would take."""
        own = {"resident_bytes": resident_bytes(), "kv_cache_bytes": self._kv_cache_bytes}
        return own if self._stage in ("new", "device") else self._memory_table() | own

    @rpc(read_only=True)
    def stack(self) -> str:
        """The Python stack of every thread."""
        return thread_stacks()

    @rpc(read_only=True)
    def health(self) -> dict[str, Any]:
        """The rank and pid, the start-up stage ("new", "device", "model" or "ready"), and the device."""
        return {"rank": self.rank, "pid": os.getpid(), "stage": self._stage, "device": _DEVICE}

    @rpc(scope="engine")
    def shutdown(self) -> None:
        self._rows, self._kv_cache_bytes, self._stage = None, 0, "new"
