"""EngineCore: requests in, tokens out. One owner of the scheduler, the KV cache's bookkeeping and the executor.

    add_request ─▶ Scheduler ─schedule─▶ SchedulerOutput ─▶ Executor ─▶ workers
                       ▲                                                  │
                       └──update── ModelRunnerOutput ◀─────────────────────┘

It runs in the caller's process; `process.py` puts it into one of its own.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import msgspec

from ringcore.config import EngineConfig
from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.executor import executor_class
from ringcore.executor.base import Executor, RpcFuture
from ringcore.executor.timing import timed
from ringcore.kv_cache.manager import KVCacheManager
from ringcore.kv_cache.planner import plan_kv_cache
from ringcore.kv_cache.spec import KVCacheConfig, KVCacheSpec
from ringcore.protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    EngineStats,
    SchedulerOutput,
)
from ringcore.scheduler.scheduler import Scheduler

__all__ = ["EngineCore"]


class EngineCore:
    """The engine, in this process.

    Raises at construction what stopped it: `ModelLoadError`, `CapacityError`, `ConfigError`, `EngineDeadError`.
    A worker's death or an error in a step ends the engine: that call and every later one raise `EngineDeadError`.
    Not thread-safe: one thread at a time.

    Invariant: `_in_flight` holds the steps handed to the executor whose results were not taken in, oldest first,
    and never more than `steps_in_flight` of them.
    """

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        self.config = config
        self._executor = executor if executor is not None else executor_class(config.parallel.executor)(config)
        self._in_flight: deque[tuple[SchedulerOutput, RpcFuture]] = deque()
        self.num_steps_taken = 0  # steps whose results were taken in
        self._dead: EngineDeadError | None = None
        try:
            self.ready, self._scheduler = self._start()
        except BaseException:
            self._executor.shutdown()
            raise

    # -----------------------------------------------------------------------------------------------------------
    # Start-up.

    def _start(self) -> tuple[EngineReady, Scheduler]:
        config, executor = self.config, self._executor
        phases = executor.start()
        with timed(phases, "get_kv_cache_spec"):
            specs = msgspec.convert(executor.collective_rpc("get_kv_cache_spec"), list[dict[str, KVCacheSpec]])
        with timed(phases, "determine_available_memory"):
            tables = msgspec.convert(executor.collective_rpc("determine_available_memory"), list[dict[str, int]])
        with timed(phases, "plan_kv_cache"):
            plans = plan_kv_cache(
                specs,
                [table["available_kv_cache_bytes"] for table in tables],
                max_model_len=config.model.context_len,
                num_blocks_override=config.cache.num_blocks_override,
            )
        with timed(phases, "initialize_from_config"):
            self._initialize_workers(plans)
        scheduler = self._make_scheduler(plans[0])
        return self._describe(plans, tables, phases), scheduler

    def _initialize_workers(self, plans: list[KVCacheConfig]) -> None:
        """Every rank gets the one unified plan: the planner made them equal."""
        assert all(plan == plans[0] for plan in plans), "ranks have different KV cache plans"
        self._executor.collective_rpc("initialize_from_config", (plans[0],))

    def _make_scheduler(self, plan: KVCacheConfig) -> Scheduler:
        config = self.config
        kv_cache = KVCacheManager(plan.groups[0].spec, plan.num_blocks, config.cache.enable_prefix_caching)
        return Scheduler(
            config.scheduler,
            kv_cache=kv_cache,
            max_model_len=config.model.context_len,
            eos_token_ids=config.model.spec.eos_token_ids,
            vocab_size=config.model.spec.vocab_size,
            seed=config.model.seed,
        )

    def _describe(
        self, plans: list[KVCacheConfig], tables: list[dict[str, int]], phases: dict[str, float]
    ) -> EngineReady:
        spec, max_model_len = plans[0].groups[0].spec, self.config.model.context_len
        usable = plans[0].num_blocks - 1  # block 0 is the null block
        return EngineReady(
            num_blocks=usable,
            block_size=spec.block_size,
            token_capacity=usable * spec.block_size,
            max_model_len=max_model_len,
            max_concurrency=usable / spec.blocks_needed(max_model_len),
            phase_seconds=phases,
            memory_bytes=[table | {"kv_cache": plan.total_bytes} for table, plan in zip(tables, plans, strict=True)],
            pids={"engine": os.getpid()} | self._executor.pids(),
        )

    # -----------------------------------------------------------------------------------------------------------
    # Requests.

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request. Raises `InvalidRequestError` (or `CapacityError`) and is unchanged if it is wrong."""
        self._check_alive()
        self._scheduler.add_request(request)

    def abort(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """Ends requests at once, also one that a step in flight computes; returns the last output of each.

        Unknown and finished ids are ignored.
        """
        self._check_alive()
        return self._scheduler.abort(request_ids)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has something to do: a request that is not finished, or a step in flight."""
        return bool(self._in_flight) or self._scheduler.has_unfinished

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_steps_launched(self) -> int:
        return self.num_steps_taken + len(self._in_flight)

    # -----------------------------------------------------------------------------------------------------------
    # The step.

    def step(self, block: bool = True) -> EngineCoreOutputs:
        """Keeps `steps_in_flight` steps with the workers and takes in the result of the oldest.

        With `block=False` the result is taken in only if it is there. Empty if there is nothing to do.
        """
        outputs = self.advance(block)
        return EngineCoreOutputs(outputs=outputs or [], stats=self.stats())

    def advance(self, block: bool = False) -> list[EngineCoreOutput] | None:
        """`step` for an event loop: None where no result was taken in, so that the loop knows it may sleep."""
        self._check_alive()
        with self._errors_end_the_engine():
            while len(self._in_flight) < self.config.scheduler.steps_in_flight:
                scheduled = self._scheduler.schedule()
                if scheduled is None:
                    break
                self._in_flight.append((scheduled, self._executor.execute_model(scheduled)))
            if not self._in_flight:
                assert not self._scheduler.has_unfinished, "unfinished requests and nothing to schedule"
                return None
            scheduled, future = self._in_flight[0]
            if not block and not future.done():
                return None
            model_output = future.result()
            self._in_flight.popleft()  # only now: an interrupt while waiting must not lose the step
            self.num_steps_taken += 1
            return self._scheduler.update(scheduled, model_output)

    @contextmanager
    def _errors_end_the_engine(self) -> Iterator[None]:
        """The scheduler cannot know what an unfinished step left behind, so that no error in one can be survived."""
        try:
            yield
        except EngineDeadError as error:
            self._dead = error
            raise
        except Exception as error:
            self._dead = _step_failed(error)
            raise self._dead from error

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    # -----------------------------------------------------------------------------------------------------------
    # Administration.

    def submit_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, timeout: float | None = None
    ) -> RpcFuture:
        """Broadcasts a call to the workers; it is executed after the steps that are in flight."""
        self._check_alive()
        with self._death_ends_the_engine():
            return self._executor.submit(method, args, kwargs, timeout)

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Calls an `@rpc` method on every worker; one value a rank, in rank order.

        Raises `WorkerError` if it raised there, `RpcTimeoutError` after `timeout` seconds: the engine goes on.
        """
        future = self.submit_rpc(method, args, kwargs, timeout)
        with self._death_ends_the_engine():
            return list(future.result())

    @contextmanager
    def _death_ends_the_engine(self) -> Iterator[None]:
        try:
            yield
        except EngineDeadError as error:
            self._dead = error
            raise

    def wait_fds(self) -> list[int]:
        """Descriptors that become readable when a step or a call may have completed, or a worker has died.

        Asking any future takes in the replies of all, and makes them unreadable: see `process.EngineLoop`.
        """
        return self._executor.wait_fds()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False, and nothing changed, while a request uses a block."""
        self._check_alive()
        return self._scheduler.reset_prefix_cache()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    # -----------------------------------------------------------------------------------------------------------
    # The end.

    def shutdown(self) -> None:
        """Ends the workers and frees what they held. Idempotent; every later call raises `EngineDeadError`."""
        if self._dead is None:
            self._dead = EngineDeadError("the engine was shut down", process="engine")
        self._in_flight.clear()
        self._executor.shutdown()

    def __enter__(self) -> EngineCore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _step_failed(error: Exception) -> EngineDeadError:
    text = error.message if isinstance(error, RingcoreError) else f"{type(error).__name__}: {error}"
    details = error.details if isinstance(error, RingcoreError) else {}
    return EngineDeadError(f"a step failed and the engine cannot go on: {text}", **({"process": "engine"} | details))
