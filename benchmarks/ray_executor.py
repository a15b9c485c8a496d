"""The executor on a Ray cluster beside the one on this host: a step's round trip, and what both take when idle."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import ClassVar

import numpy as np

from benchmarks.harness import Benchmark, Plan
from benchmarks.peers.queue_executor import EchoWorker, make_config
from benchmarks.peers.queue_loops import cpu_s
from benchmarks.peers.rows import facts, forget_garbage
from benchmarks.result import Check, Findings, Measurement
from ringcore.executor.multiproc import MultiprocExecutor
from ringcore.executor.ray_cluster.executor import RayExecutor
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import ModelRunnerOutput, SchedulerOutput
from ringcore.worker import rpc

__all__ = ["RayExecutorCost", "StepWorker"]

FACTORY = f"{__name__}:StepWorker"
HERE, ON_RAY, ELSEWHERE = "multiproc", "ray", "ray, another node"
RESOURCES = {HERE: None, ON_RAY: {"here": 1}, ELSEWHERE: {"there": 1}}  # by side: what leads its rank to its node
STEP_S = 5e-3  # a step of an 8B model at batch 1: 16 GB of weights at 3.3 TB/s
NUM_STEPS, NUM_LONG_STEPS, IDLE_S = 1000, 200, 10.0
STORE_BYTES = 80 << 20


class StepWorker(EchoWorker):
    """A step whose first row is 1 takes `STEP_S`, asleep, as the host's thread does while a device computes."""

    @rpc(scope="engine")
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if scheduler_output.rows[0]:
            time.sleep(STEP_S)
        return ModelRunnerOutput(scheduler_output.step, scheduler_output.rows, scheduler_output.rows)


class RayExecutorCost(Benchmark):
    """µs a step by the ray executor and by multiproc, and their CPU when idle; needs Ray, and no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 7

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--idle-s", type=float, default=IDLE_S, help="how long both are idle in each round")

    def run(self, plan: Plan) -> Findings:
        with _cluster() as address, contextlib.ExitStack() as stack:
            sides = [_Side(name, address) for name in RESOURCES]
            idle: dict[str, list[float]] = {}
            for side in sides:  # Ray's driver, a part of this process, is idle in the second one's time alone
                side.start()
                stack.callback(side.executor.shutdown)
                idle[side.name] = [side.idle_percent(plan.options.idle_s) for _ in range(plan.rounds)]
            rounds = [_round(sides, number) for number in range(1 + plan.rounds)][1:]
        for name, shares in idle.items():
            for one, share in zip(rounds, shares, strict=True):
                one[name][IDLE] = share
        measurements = [
            Measurement(
                name=name,
                unit=unit,
                higher_is_better=False,
                samples={side.name: [one[side.name][name] for one in rounds] for side in sides},
            )
            for name, unit in CASES.items()
        ]
        return Findings(
            measurements=measurements,
            engines={name: {**facts(("ray", "pyzmq", "msgspec")), "env": {}} for name in RESOURCES},
            conditions=_conditions(plan.options.idle_s),
            checks=_checks(rounds),
        )


EMPTY, LONG, IDLE = "a step that computes nothing", "a step of 5 ms", "idle"
CASES = {EMPTY: "µs", LONG: "µs", IDLE: "% of a core"}
Round = dict[str, dict[str, float]]  # by executor and case


def _conditions(idle_s: float) -> list[str]:
    return [
        "One rank. A step: a delta of one request sent by the executor, executed by a worker without a device, its "
        "output received; the next step is sent after that. The step of 5 ms sleeps. "
        "A sample is the median of a round's steps, in alternating order after one round that warms up.",
        "Ray: a cluster of two nodes, both this machine. A rank on the engine's own node is its child; one on another "
        "node is reached over an encrypted connection, here of the loopback device, and an agent.",
        f"Idle: CPU over {idle_s:g} s of the executor's process (Ray's driver too), the agent's and the worker's, "
        "without a call. Ray's own processes of a node (raylet, GCS) run without an engine too, and are not counted.",
    ]


def _checks(rounds: list[Round]) -> list[Check]:
    checks = []
    for name in (ON_RAY, ELSEWHERE):
        added_us = median(one[name][LONG] - one[HERE][LONG] for one in rounds)
        share = added_us / (STEP_S * 1e6)
        checks.append(
            Check(name=f"{name}: adds to a step of 5 ms", value=f"{added_us:.0f} µs, {share:.1%}", data=share)
        )
    return checks


@dataclass
class _Side:
    name: str
    address: str

    def start(self) -> None:
        resources = RESOURCES[self.name]
        self.executor: MultiprocExecutor
        if resources is None:
            self.executor = MultiprocExecutor(make_config(1, device="cpu"), worker_factory=FACTORY)
        else:
            options = {"executor": "ray", "ray_address": self.address, "ray_resources": resources}
            self.executor = RayExecutor(make_config(1, device="cpu", **options), worker_factory=FACTORY)
        self.executor.start()

    def median_us(self, first_row: int, count: int) -> float:
        taken_us = []
        for number in range(count):
            step = _step(number, first_row)
            began_s = time.perf_counter()
            self.executor.execute_model(step).result()
            taken_us.append((time.perf_counter() - began_s) * 1e6)
        return median(taken_us)

    def idle_percent(self, seconds: float) -> float:
        """The share of a core that this process and those of the side take without a call."""
        pids = self.pids()

        def used_s() -> float:
            return time.process_time() + sum(map(cpu_s, pids))

        before_s = used_s()
        time.sleep(seconds)
        return 100 * (used_s() - before_s) / seconds

    def pids(self) -> set[int]:
        """Its processes beside this one: workers, and the agent that is their parent."""
        workers = set(self.executor.pids().values())
        return (workers | {_parent_of(pid) for pid in workers}) - {os.getpid()}


def _step(number: int, first_row: int) -> SchedulerOutput:
    return SchedulerOutput(
        step=number,
        num_steps=1,
        finished_rows=int_array(),
        new_requests=[],
        new_blocks=[],
        rows=np.array([first_row], np.int32),
        num_scheduled_tokens=None,
        num_tokens=1,
    )


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _round(sides: list[_Side], number: int) -> Round:
    found: Round = {}
    for side in sides if number % 2 else reversed(sides):
        forget_garbage()
        found[side.name] = {EMPTY: side.median_us(0, NUM_STEPS), LONG: side.median_us(1, NUM_LONG_STEPS)}
    return found


@contextlib.contextmanager
def _cluster() -> Iterator[str]:
    """Of two nodes, which import from where this process does; this one is on the first."""
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    head = common | {"include_dashboard": False, "resources": {"here": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**common, resources={"there": 1})
    try:
        yield cluster.address
    finally:
        cluster.shutdown()
