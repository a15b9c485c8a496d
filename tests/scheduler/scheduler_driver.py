"""Drives a Scheduler with the fake worker, one operation or `step` at a time, and checks everything after each."""

from __future__ import annotations

import math
import random
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from fake_model import FakeWorker, Group, Sampled, WorkersKilled

from ringcore.config import SchedulerConfig
from ringcore.errors import EngineDeadError
from ringcore.kv_cache.block_hash import BlockHasher
from ringcore.kv_cache.block_store import BlockStore
from ringcore.kv_cache.manager import KVCacheManager
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheSpec, SlidingWindowSpec
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import decoder, encoder, int_array
from ringcore.protocol.output_reader import OutputReader
from ringcore.protocol.requests import EngineCoreOutput, EngineCoreRequest, OutputColumns, PromptLogprobs
from ringcore.protocol.steps import ModelRunnerOutput, RowError, SchedulerOutput
from ringcore.scheduler.scheduler import Scheduler

EOS = 0


class Death(NamedTuple):
    """An end of the workers: the seeds of the rows in each step that was lost, and of the one that killed them."""

    lost: list[set[int]]
    killer: int | None


def kv_cache_config(
    num_blocks: int, groups: list[Group], *, max_model_len: int, max_tokens_in_flight: int
) -> KVCacheConfig:
    """A cache whose groups have pages of one size, whatever their block sizes."""
    page = math.lcm(*(group.block_size for group in groups))

    def spec(group: Group) -> KVCacheSpec:
        size = {"block_size": group.block_size, "num_kv_heads": 1, "head_size": page // group.block_size}
        if group.window is None:
            return FullAttentionSpec(dtype="float32", **size)
        return SlidingWindowSpec(dtype="float32", sliding_window=group.window, **size)

    return KVCacheConfig(
        num_blocks=num_blocks,
        groups=[KVCacheGroup(layer_names=[f"layer.{i}"], spec=spec(group)) for i, group in enumerate(groups)],
        max_model_len=max_model_len,
        max_tokens_in_flight=max_tokens_in_flight,
    )


class Driver:
    """An engine without processes: `step` is schedule, execute, update, with `depth` steps in flight, and as many more
    as there are stages of a pipeline but one.

    groups: of the KV cache, (block_size, window) each; one with full attention by default.
    max_gain: the most tokens that a request gains in a step; every fourth one, by its seed, gains one at a time.
    num_stored: the most blocks that a store beyond the device holds, of which a load fails to read `failure_rate`.
    checks: whether `Scheduler.check` is called after every operation.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 9,
        block_size: int = 4,
        groups: list[tuple[int, int | None]] | None = None,
        max_model_len: int = 1000,
        max_num_seqs: int = 8,
        budget: int = 100,
        chunk: int | None = None,
        caching: bool = True,
        depth: int = 1,
        num_stages: int = 1,
        max_steps: int = 1,
        policy: str = "fcfs",
        preempt_lower_priority: bool = False,
        max_skip_ahead: int = 0,
        vocab_size: int = 50,
        max_gain: int = 1,
        hasher: BlockHasher | None = None,
        num_stored: int = 0,
        failure_rate: float = 0.0,
        checks: bool = True,
        speculative: dict[str, Any] | None = None,
    ) -> None:
        self.num_stored, self.failure_rate, self.loads_rng = num_stored, failure_rate, random.Random(0)
        self.max_steps = max_steps
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=chunk,
            scheduling_policy=policy,
            preempt_lower_priority=preempt_lower_priority,
            max_skip_ahead=max_skip_ahead,
            steps_in_flight=depth,
            num_stages=num_stages,
            speculative=speculative,
        )
        self.depth = self.config.max_steps_in_flight
        self.groups = [Group(*group) for group in groups or [(block_size, None)]]
        self.caching, self.hasher, self.checks = caching, hasher, checks
        self.num_blocks = num_blocks
        self.kv_cache = self._new_kv_cache()
        self.scheduler = Scheduler(
            self.config,
            kv_cache=self.kv_cache,
            eos_token_ids=[EOS],
            vocab_size=vocab_size,
            seed=0,
            clock=iter(range(10**9)).__next__,
            max_gain=lambda request: 1 if (request.sampling_params.seed or 0) % 4 == 3 else max_gain,
        )
        self.worker = FakeWorker(num_blocks, self.groups, max_num_seqs, vocab_size, num_stages > 1)
        self.work: dict[int, int] = {}  # of the last step: tokens by row, in its order
        self.work_by_seed: dict[int, int] = {}  # and by the requests' seeds
        self.given_back: set[int] = set()  # the seeds of those whose rows the last step reported as finished
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._seeds_in_flight: deque[set[int]] = deque()
        self.deaths: list[Death] = []
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self._requests: dict[str, EngineCoreRequest] = {}
        self._reader = OutputReader()
        self._encoder, self._decoder = encoder(), decoder(SchedulerOutput)
        self._columns_decoder = decoder(OutputColumns)

    def _new_kv_cache(self) -> KVCacheManager:
        config = kv_cache_config(
            self.num_blocks,
            self.groups,
            max_model_len=self.max_model_len,
            max_tokens_in_flight=self.config.max_tokens_in_flight,
        )
        max_num_seqs = self.config.max_num_seqs
        store = BlockStore(self.num_stored, block_bytes=1) if self.num_stored else None
        return KVCacheManager(
            config,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=self.caching,
            hasher=self.hasher,
            store=store,
        )

    def check(self) -> None:
        if self.checks:
            self.scheduler.check()

    # Requests in and out.

    def add(
        self,
        request_id: str,
        prompt: list[int],
        *,
        salt: str | None = None,
        priority: int = 0,
        arrival_s: float = 0.0,
        **params,
    ) -> None:
        params.setdefault("ignore_eos", True)
        request = EngineCoreRequest(
            request_id, prompt, SamplingParams(**params), arrival_s=arrival_s, priority=priority, cache_salt=salt
        )
        self.scheduler.add_request(request)
        self.outputs[request_id] = []
        self._requests[request_id] = request
        self.check()

    def abort(self, *request_ids: str) -> list[EngineCoreOutput]:
        outputs = self._take(self.scheduler.abort(request_ids))
        self.check()
        return outputs

    # Steps.

    def schedule(self) -> SchedulerOutput | None:
        """Schedules, sends over the wire and executes a step; its result waits for `update`.

        If the step kills the workers, there are new ones afterwards, and nothing in flight.
        """
        scheduled = self._schedule()
        self.check()
        return scheduled

    def _schedule(self) -> SchedulerOutput | None:
        scheduled = self.scheduler.schedule(self.max_steps)
        if scheduled is None:
            return None
        self.given_back = {self.worker.rows[row].seed for row in scheduled.finished_rows.tolist()}
        worker, sampled, killer = self.worker, None, None
        try:
            sampled = worker.execute(self._decoder.decode(self._encoder.encode(scheduled)))
        except WorkersKilled as kill:
            killer = kill.args[0]
        self.work = worker.work
        self.work_by_seed = {worker.rows[row].seed: count for row, count in self.work.items()}
        self._check_step(scheduled)
        self._seeds_in_flight.append(set(self.work_by_seed))
        if sampled is None:
            self.die(killer)
        else:
            self.in_flight.append((scheduled, _model_output(scheduled.step, sampled)))
        return scheduled

    def launch(self) -> dict[int, int] | None:
        """`schedule`, and what it came to: tokens by row."""
        return None if self.schedule() is None else self.work

    def update(self) -> list[EngineCoreOutput]:
        outputs = self._update()
        self.check()
        return outputs

    def _update(self) -> list[EngineCoreOutput]:
        self._seeds_in_flight.popleft()
        columns = self.scheduler.update(*self.in_flight.popleft())
        return self._take(self._reader.read(self._columns_decoder.decode(self._encoder.encode(columns))))

    def step(self) -> dict[int, int]:
        """Fills the steps in flight, takes in the oldest; what the last one scheduled, tokens by row."""
        work: dict[int, int] = {}
        self.finish_loads()
        while len(self.in_flight) < self.depth and self._schedule() is not None:
            work = self.work
        if self.in_flight:
            self._update()
        self.check()
        return work

    def finish_loads(self) -> None:
        """Some of the loads in flight are carried out, and reported."""
        for number, is_loaded in self.worker.finish_loads(self.loads_rng, self.failure_rate).items():
            self.scheduler.finish_load(number, is_loaded)
            self.check()

    def drain(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left, every step in flight included."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and not self.in_flight and not self.scheduler.loading.in_flight:
                return
            before = len(self.in_flight) + len(self.scheduler.loading.in_flight)
            num_steps = self.scheduler.stats().step
            self.step()
            assert before or self.scheduler.stats().step > num_steps, "nothing is in flight, and nothing was scheduled"
        raise AssertionError(f"not drained after {max_steps} steps")

    # The workers' death.

    def schedule_unsent(self) -> None:
        """Schedules a step that no worker gets, since they are dead."""
        self.scheduler.schedule(self.max_steps)
        self.check()

    def die(self, killer: int | None = None, num_blocks: int | None = None) -> list[EngineCoreOutput]:
        """The workers die with every step in flight; new ones come, with a cache of `num_blocks`."""
        self.deaths.append(Death(list(self._seeds_in_flight), killer))
        num_executed = len(self._seeds_in_flight)
        self.in_flight.clear()
        self._seeds_in_flight.clear()
        self.num_blocks = num_blocks or self.num_blocks
        self.kv_cache = self._new_kv_cache()
        old = self.worker
        self.worker = FakeWorker(self.num_blocks, old.groups, old.num_rows, old.vocab_size, old.takes_turns)
        self.worker.killers = old.killers
        self.worker.num_accepted_drafts, self.worker.num_rejected_drafts = (
            old.num_accepted_drafts,
            old.num_rejected_drafts,
        )
        cause = EngineDeadError("worker 0 was killed", process="worker 0", rank=0)
        outputs = self._take(self.scheduler.recover(self.kv_cache, cause, num_executed))
        self.check()
        return outputs

    # What came of it.

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def finish_reason(self, request_id: str) -> str | None:
        outputs = self.outputs[request_id]
        return outputs[-1].finish_reason if outputs else None

    def _take(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        for output in outputs:
            assert self.finish_reason(output.request_id) is None, "an output after the last one"
            assert output.new_token_ids or output.finish_reason, "an output that says nothing"
            self._check_prompt_logprobs(output)
            self.outputs[output.request_id].append(output)
        return outputs

    def _check_prompt_logprobs(self, output: EngineCoreOutput) -> None:
        """They come with the first token of whoever asked, and with no other; they are of the request's own prompt."""
        request, told = self._requests[output.request_id], output.prompt_logprobs
        asked = request.sampling_params.prompt_logprobs
        is_first = bool(output.new_token_ids) and not self.tokens(output.request_id)
        assert (told is not None) == (asked is not None and is_first), "of prompts, too much or too little"
        if told is not None:
            assert told.token_ids.tolist() == prompt_columns(request.prompt_token_ids, asked)
            assert told.logprobs.dtype == np.float32
            assert told.logprobs.tolist() == [-0.5 * token for token in told.token_ids.tolist()]
            assert len(told.ranks) == len(told.token_ids)

    def _check_step(self, step: SchedulerOutput) -> None:
        counts = [count + self.worker.max_gained[row] - 1 for row, count in self.work.items()]
        assert 1 <= step.num_steps <= self.max_steps
        assert step.num_steps == 1 or set(counts) == {1}
        assert (sum(counts) > 0) == (bool(counts) or step.kv_transfers is None), "a step that does nothing"
        assert sum(counts) <= self.config.max_num_batched_tokens
        assert all(1 <= count <= (self.config.long_prefill_token_threshold or count) for count in counts)
        assert len(counts) <= self.config.max_num_seqs


def prompt_columns(prompt: list[int], count: int) -> list[int]:
    return [token + i for token in prompt[1:] for i in range(1 + count)]


def _prompt_logprobs(row: int, count: int, prompt: list[int]) -> PromptLogprobs:
    token_ids = int_array(prompt_columns(prompt, count))
    logprobs = (-0.5 * token_ids).astype(np.float32)
    return PromptLogprobs(row, count, token_ids, logprobs, int_array([1] * len(token_ids)))


def _model_output(step: int, sampled: Sampled) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        step,
        None if sampled.rows is None else int_array(sampled.rows),
        int_array(sampled.token_ids),
        row_errors=[RowError(row, "logits are not finite") for row in sampled.failed],
        prompt_logprobs=[_prompt_logprobs(row, *asked) for row, asked in sampled.prompts.items()],
        num_gained=None if sampled.num_gained is None else int_array(sampled.num_gained),
    )
