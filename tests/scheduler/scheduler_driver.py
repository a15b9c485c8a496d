"""Drives a Scheduler with the fake worker, one operation at a time, and checks everything after each."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from fake_model import FakeWorker, WorkersKilled

from ringcore.config import SchedulerConfig
from ringcore.errors import EngineDeadError
from ringcore.kv_cache.block_hash import BlockHasher
from ringcore.kv_cache.manager import KVCacheManager
from ringcore.kv_cache.spec import FullAttentionSpec
from ringcore.protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    ModelRunnerOutput,
    RowError,
    SchedulerOutput,
    decoder,
    encoder,
    int_array,
)
from ringcore.sampling_params import SamplingParams
from ringcore.scheduler.scheduler import Scheduler

EOS = 0


class Death(NamedTuple):
    """An end of the workers: the seeds of the rows in each step that was lost, and of the one that killed them."""

    lost: list[set[int]]
    killer: int | None


class Driver:
    """An engine without processes: `step` is schedule, execute, update, with `depth` steps in flight."""

    def __init__(
        self,
        *,
        num_blocks: int = 9,
        block_size: int = 4,
        max_model_len: int = 1000,
        max_num_seqs: int = 8,
        budget: int = 100,
        chunk: int | None = None,
        caching: bool = True,
        depth: int = 1,
        vocab_size: int = 50,
        hasher: BlockHasher | None = None,
    ) -> None:
        self.depth = depth
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=chunk,
            steps_in_flight=depth,
        )
        self.spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32")
        self.num_blocks, self.hasher = num_blocks, hasher
        self.kv_cache = KVCacheManager(self.spec, num_blocks, caching, hasher=hasher)
        self.scheduler = Scheduler(
            self.config,
            kv_cache=self.kv_cache,
            max_model_len=max_model_len,
            eos_token_ids=[EOS],
            vocab_size=vocab_size,
            seed=0,
            clock=iter(range(10**9)).__next__,
        )
        self.worker = FakeWorker(num_blocks, block_size, max_num_seqs, vocab_size)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._seeds_in_flight: deque[set[int]] = deque()
        self.deaths: list[Death] = []
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self._encoder, self._decoder = encoder(), decoder(SchedulerOutput)

    def add(self, request_id: str, prompt: list[int], *, salt: str | None = None, **params) -> None:
        params.setdefault("ignore_eos", True)
        self.scheduler.add_request(
            EngineCoreRequest(request_id, prompt, SamplingParams(**params), arrival_s=0.0, cache_salt=salt)
        )
        self.outputs[request_id] = []
        self.scheduler.check()

    def abort(self, *request_ids: str) -> list[EngineCoreOutput]:
        outputs = self._take(self.scheduler.abort(request_ids))
        self.scheduler.check()
        return outputs

    def schedule(self) -> SchedulerOutput | None:
        """Schedules, sends over the wire and executes a step; its result waits for `update`.

        If the step kills the workers, there are new ones afterwards, and nothing in flight.
        """
        scheduled = self.scheduler.schedule()
        self.scheduler.check()
        if scheduled is not None:
            self._check_step(scheduled)
            try:
                rows, token_ids, failed = self.worker.execute(self._decoder.decode(self._encoder.encode(scheduled)))
            except WorkersKilled as kill:
                self._seeds_in_flight.append(self._seeds(scheduled))
                self.die(killer=kill.args[0])
                return scheduled
            self._seeds_in_flight.append(self._seeds(scheduled))
            errors = [RowError(row, "logits are not finite") for row in failed]
            output = ModelRunnerOutput(scheduled.step, int_array(rows), int_array(token_ids), row_errors=errors)
            self.in_flight.append((scheduled, output))
        return scheduled

    def update(self) -> list[EngineCoreOutput]:
        self._seeds_in_flight.popleft()
        outputs = self._take(self.scheduler.update(*self.in_flight.popleft()))
        self.scheduler.check()
        return outputs

    def schedule_unsent(self) -> None:
        """Schedules a step that no worker gets, since they are dead."""
        self.scheduler.schedule()
        self.scheduler.check()

    def die(self, killer: int | None = None, num_blocks: int | None = None) -> list[EngineCoreOutput]:
        """The workers die with every step in flight; new ones come, with a cache of `num_blocks`."""
        self.deaths.append(Death(list(self._seeds_in_flight), killer))
        num_executed = len(self._seeds_in_flight)
        self.in_flight.clear()
        self._seeds_in_flight.clear()
        self.num_blocks = num_blocks or self.num_blocks
        caching = self.kv_cache.enable_prefix_caching
        self.kv_cache = KVCacheManager(self.spec, self.num_blocks, caching, hasher=self.hasher)
        old = self.worker
        self.worker = FakeWorker(self.num_blocks, old.block_size, old.num_rows, old.vocab_size, killers=old.killers)
        cause = EngineDeadError("worker 0 was killed", process="worker 0", rank=0)
        outputs = self._take(self.scheduler.recover(self.kv_cache, cause, num_executed))
        self.scheduler.check()
        return outputs

    def _seeds(self, scheduled: SchedulerOutput) -> set[int]:
        return {self.worker.rows[row].seed for row in scheduled.rows.tolist()}

    def step(self) -> dict[int, int]:
        """Fills the steps in flight, takes in the oldest; what the last one scheduled, tokens by row."""
        scheduled = None
        while len(self.in_flight) < self.depth and (one := self.schedule()) is not None:
            scheduled = one
        if self.in_flight:
            self.update()
        return {} if scheduled is None else tokens_by_row(scheduled)

    def drain(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left, every step in flight included."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and not self.in_flight:
                return
            before = len(self.in_flight)
            assert self.step() or before, "nothing is in flight, and nothing was scheduled"
        raise AssertionError(f"not drained after {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def finish_reason(self, request_id: str) -> str | None:
        outputs = self.outputs[request_id]
        return outputs[-1].finish_reason if outputs else None

    def _take(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        for output in outputs:
            assert self.finish_reason(output.request_id) is None, "an output after the last one"
            assert output.new_token_ids or output.finish_reason, "an output that says nothing"
            self.outputs[output.request_id].append(output)
        return outputs

    def _check_step(self, step: SchedulerOutput) -> None:
        assert 0 < step.num_tokens <= self.config.max_num_batched_tokens
        counts = step.num_scheduled_tokens.tolist()
        assert all(1 <= count <= (self.config.long_prefill_token_threshold or count) for count in counts)
        assert len(counts) <= self.config.max_num_seqs


def tokens_by_row(step: SchedulerOutput) -> dict[int, int]:
    return dict(zip(step.rows.tolist(), step.num_scheduled_tokens.tolist(), strict=True))
