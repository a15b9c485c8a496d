"""A discrete-event simulator: replays an arrival trace over engine replicas in virtual time.

Each replica is the real EngineCore, with its scheduler and prefix cache, over a fake executor. Errors of a result come
from the step cost model, the lengths or the arrivals; not from the scheduling.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import os
from collections.abc import Sequence

import numpy as np

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError
from ringcore.routing.policies import ReplicaLoads, Router, make_router
from ringcore.testing.hardware import Hardware, find_hardware, model_dtype, native_spec
from ringcore.testing.prompts import PromptMaker
from ringcore.testing.replica import MAX_STEPS, Records, Replica, ReplicaTotals
from ringcore.testing.routing import pick_replica, route_all
from ringcore.testing.shards import Shard, run_shards
from ringcore.testing.simulation_result import SimulationResult, summarize
from ringcore.testing.speculator import FakeSpeculator
from ringcore.testing.step_cost import StepCost
from ringcore.testing.trace import Trace

__all__ = ["Simulator"]


class Simulator:
    """`num_replicas` engines of one configuration behind a router.

        config = EngineConfig.from_options(model=write_model_config("model"), load_format="dummy")
        result = Simulator(config, num_replicas=4, routing="least-loaded").run(read_trace("trace.jsonl"))

    Engines run with steps_in_flight=1: scheduling takes no virtual time, so that async scheduling has nothing to hide.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_replicas: int,
        *,
        routing: str = "round-robin",
        load_bound: float | None = 1.25,
        cost: StepCost | None = None,
        hardware: str | Hardware = "h200",
        num_processes: int | None = None,
        max_steps: int = MAX_STEPS,
        speculator: FakeSpeculator | None = None,
    ) -> None:
        """routing: "round-robin", "least-loaded" or "prefix-affinity"; load_bound is for the latter.
        cost: the cost model of a step; None derives it from the model and the hardware.
        hardware: the device of each rank.
        num_processes: for parallel simulation, if the routing does not depend on the replicas' loads; None: one a core.
        max_steps: the most steps scheduled as one. It does not change the result; 1 is the slow proof of that. (Except
        for a sliding-window model short of blocks: out-of-window blocks are freed after a multi-step message, not
        within it, so that another cached prefix may be evicted.)
        speculator: speculative decoding of every request, whose steps are then simulated one by one.

        Raises `ConfigError`.
        """
        if num_replicas < 1:
            raise ConfigError(
                f"num_replicas={num_replicas}: give at least 1", option="num_replicas", value=num_replicas
            )
        self.config = dataclasses.replace(
            config,
            scheduler=dataclasses.replace(config.scheduler, steps_in_flight=1),
            parallel=dataclasses.replace(config.parallel, max_worker_restarts=0, worker_extension=None),
        )
        self.hardware = find_hardware(hardware) if isinstance(hardware, str) else hardware
        self.cost = cost or StepCost.from_model(
            native_spec(config),
            self.hardware,
            dtype=model_dtype(config),
            tensor_parallel_size=config.parallel.tensor_parallel_size,
            kv_cache_dtype=config.cache.kv_cache_dtype,
        )
        self.num_replicas, self.routing = num_replicas, routing
        self._load_bound, self._max_steps, self._speculator = load_bound, max_steps, speculator
        self._num_processes = num_processes or len(os.sched_getaffinity(0))
        self._make_router()  # validates the options

    def _make_router(self) -> Router:
        return make_router(self.routing, self.num_replicas, self._load_bound)

    def run(self, trace: Trace) -> SimulationResult:
        """Simulates every request of the trace, from its arrival to its end.

        Raises `CapacityError` if a replica's memory does not hold one request of max_model_len.
        """
        router = self._make_router()
        if router.needs_loads:
            records, totals = self._run_with_loads(trace, router)
        else:
            records, totals = self._run_sharded(trace, route_all(router, trace, self.num_replicas))
        return summarize(trace, records, totals)

    # -----------------------------------------------------------------------------------------------------------
    # Static routing: replicas are independent.

    def _run_sharded(self, trace: Trace, replica_of: np.ndarray) -> tuple[Records, list[ReplicaTotals]]:
        num_shards = min(self._num_processes, self.num_replicas)
        parts = [np.flatnonzero(replica_of % num_shards == shard) for shard in range(num_shards)]
        shards = [
            Shard(
                config=self.config,
                cost=self.cost,
                hardware=self.hardware,
                trace=trace.part(part),
                replica_of=replica_of[part] // num_shards,
                num_replicas=len(range(shard, self.num_replicas, num_shards)),
                max_steps=self._max_steps,
                speculator=self._speculator,
            )
            for shard, part in enumerate(parts)
        ]
        records = Records.empty(len(trace))
        totals: dict[int, ReplicaTotals] = {}
        for shard, (part, result) in enumerate(zip(parts, run_shards(shards), strict=True)):
            records.place(part, result.records)
            totals |= {shard + num_shards * i: total for i, total in enumerate(result.totals)}
        return records, [totals[number] for number in range(self.num_replicas)]

    # -----------------------------------------------------------------------------------------------------------
    # Routing by load: needs the requests that have ended by each arrival.

    def _run_with_loads(self, trace: Trace, router: Router) -> tuple[Records, list[ReplicaTotals]]:
        """Advances a replica up to an arrival only if the request is routed to it, or if one of its requests may have
        ended by then (`Replica.next_end_s`). So each replica is called about as often as if it were alone.
        """
        records = Records.empty(len(trace))
        prompts = PromptMaker(self.config.model.spec.vocab_size, len(trace) + len(trace.prefix_ids))
        replicas = [
            Replica(self.config, self.cost, self.hardware, trace, prompts, records, self._max_steps, self._speculator)
            for _ in range(self.num_replicas)
        ]
        loads, ends = ReplicaLoads(self.num_replicas), _EndTracker(replicas)
        tokens = (trace.prompt_tokens + trace.output_tokens).tolist()
        for index, time_s in enumerate(trace.time_s.tolist()):
            for number, ended in ends.ended_by(time_s):
                loads.remove(number, tokens[ended])
            number = pick_replica(router, trace, index, loads)
            replicas[number].run_until(time_s)
            if replicas[number].add(index):
                loads.add(number, tokens[index])
            ends.refresh(number)
        return records, [replica.finish() for replica in replicas]


class _EndTracker:
    """The ended requests of all replicas at a given time, advancing replicas as little as possible.

    Invariant: ends drained from a replica's `ended` are in `_ends` until their time; each replica with work has one
    valid entry in `_wake`, the one with its latest version, at a time not after its next unknown end.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._wake: list[tuple[float, int, int]] = []  # (time, replica, version)
        self._versions = [0] * len(replicas)
        self._ends: list[tuple[float, int, int]] = []  # (time, replica, request)

    def refresh(self, number: int) -> None:
        """Updates the heaps after the replica has run or has got a request."""
        replica = self._replicas[number]
        for time_s, request in replica.ended:
            heapq.heappush(self._ends, (time_s, number, request))
        replica.ended.clear()
        self._versions[number] += 1
        if (next_end_s := replica.next_end_s()) < math.inf:
            heapq.heappush(self._wake, (next_end_s, number, self._versions[number]))

    def ended_by(self, time_s: float) -> list[tuple[int, int]]:
        """(replica, request) of the requests that have ended since the last call."""
        while self._wake and self._wake[0][0] < time_s:
            _, number, version = heapq.heappop(self._wake)
            if version == self._versions[number]:
                self._replicas[number].run_until(time_s)
                self.refresh(number)
        ended = []
        while self._ends and self._ends[0][0] <= time_s:
            _, number, request = heapq.heappop(self._ends)
            ended.append((number, request))
        return ended
