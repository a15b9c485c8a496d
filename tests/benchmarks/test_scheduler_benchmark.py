"""The benchmarks of the control column: their loops, their arithmetic, and short runs of the real thing.

Where vLLM takes part, it is a fake interpreter that runs ringcore's child in its place.
"""

from __future__ import annotations

import gc
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks import simulator
from benchmarks.driver import ROOT, BenchmarkError
from benchmarks.harness import Benchmark, EngineSpec, Plan, child_specs, engine_specs, numbers
from benchmarks.null_engine import NullEngine
from benchmarks.peers import null_loops, prefix_loops, scheduler_loops
from benchmarks.peers.null_ringcore import RingcoreEngine, RingcoreNull
from benchmarks.peers.prefix_loops import PrefixChild, median_us, with_blocks
from benchmarks.peers.prefix_ringcore import RingcorePrefixCache
from benchmarks.peers.scheduler_loops import BLOCK_SIZE, TOKEN_ID, Load, Outcome, SchedulerChild, laps_of
from benchmarks.peers.scheduler_ringcore import RingcoreScheduler
from benchmarks.prefix_cache import PrefixCache, block_floors, shown_tokens
from benchmarks.scheduler import Scheduler, growth_exponent, slope, step_floor
from benchmarks.turns import measurements_from_rows
from ringcore.config import EngineConfig
from ringcore.testing.models import write_model_config

MakePlan = Callable[..., Plan]

SMALL_SIZES = """
from benchmarks.peers import null_loops, prefix_loops, scheduler_loops
scheduler_loops.MIN_LAPS = scheduler_loops.MAX_LAPS = 1
prefix_loops.MIN_SECONDS, prefix_loops.MIN_REPEATS = 0.0, 1
null_loops.MIN_TOKENS = null_loops.MAX_TOKENS = 8
"""


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """What the loops hide from the garbage collector is shown to it again."""
    yield
    gc.unfreeze()


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that makes the children's loops short, and runs ringcore's children for whatever engine."""
    file = tmp_path / "python"
    script = f"import os, runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\n{SMALL_SIZES}"
    script += "module = sys.argv[2].replace('_vllm', '_ringcore')\nsys.argv[1:] = []\n"
    script += "runpy.run_module(module, run_name='__main__', alter_sys=True)\n"
    (tmp_path / "child.py").write_text(script)
    file.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/child.py "$@"\n')
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def specs(python: str) -> list[EngineSpec]:
    ours, vllm = engine_specs([f"vllm={python}"], "eager", ["vllm:A=b"])
    return [EngineSpec(ours.name, (python, *ours.command[1:]), ours.import_statement), vllm]


def run(benchmark: type[Benchmark], plan: Plan, *arguments: str) -> dict[str, Any]:
    """Its findings, with the measurements by name and unit."""
    parser = ArgumentParser()
    benchmark.add_arguments(parser)
    options = parser.parse_args(arguments)
    findings = benchmark().run(Plan(plan.specs, plan.model, plan.rounds, options))
    rows = {f"{one.name}, {one.unit}": one for one in findings.measurements}
    assert len(rows) == len(findings.measurements)
    assert list(findings.engines) == [spec.name.split()[0] for spec in plan.specs]
    for one in findings.measurements:
        assert all(len(samples) == plan.rounds and min(samples) > 0 for samples in one.samples.values())
        assert one.limit is None or one.limit.value > 0
    assert findings.conditions
    return {"rows": rows, "checks": {check.name: check for check in findings.checks}}


# ---------------------------------------------------------------------------------------------------------------
# What they share.


def test_the_child_of_each_engine_takes_part_once(specs: list[EngineSpec]) -> None:
    ours, vllm = child_specs([*specs, EngineSpec("vllm compiled", ("x",), "")], "prefix", "prefix cache")
    assert [ours.name, vllm.name] == ["ringcore", "vllm"]
    assert ours.command[1:] == ("-m", "benchmarks.peers.prefix_ringcore")
    assert vllm.command == ("x", "-m", "benchmarks.peers.prefix_vllm")
    ours, vllm = child_specs(specs, "scheduler", "scheduler", {"a": 1})
    assert vllm.command == (specs[1].python, "-m", "benchmarks.peers.scheduler_vllm")
    assert (vllm.env["A"], vllm.settings) == ("b", {"a": 1})
    with pytest.raises(BenchmarkError, match="--peer vllm: it has no simulator; leave it out"):
        child_specs(specs, "simulator", "simulator")


def test_rows_of_all_engines_become_measurements() -> None:
    taken = {
        "ringcore": [[["a", "µs", 1.0], ["b", "steps/s", 5.0]], [["a", "µs", 2.0], ["b", "steps/s", 6.0]]],
        "vllm": [[["a", "µs", 8.0]], [["a", "µs", 9.0]]],
    }
    a, b = measurements_from_rows(taken)
    assert (a.name, a.unit, a.higher_is_better) == ("a", "µs", False)
    assert a.samples == {"ringcore": [1.0, 2.0], "vllm": [8.0, 9.0]}
    assert (b.samples, b.higher_is_better) == ({"ringcore": [5.0, 6.0]}, True)


def test_numbers_between_commas() -> None:
    assert numbers("--x", "1,32") == [1, 32]
    with pytest.raises(BenchmarkError, match="--x 1,0: give numbers of at least 1"):
        numbers("--x", "1,0")


# ---------------------------------------------------------------------------------------------------------------
# The scheduler.


@dataclass
class FakeRequest:
    request_id: str
    tokens_left: int


@dataclass
class FakeScheduler(SchedulerChild):
    """Gives every request a token a step. `missing`: so many of them get none."""

    missing: int = 0
    packages: ClassVar[tuple[str, ...]] = ("numpy",)
    calls: list[str] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    prompts: set[tuple[int, ...]] = field(default_factory=set)

    def load(self, model: str) -> None: ...

    def start(self, load: Load) -> None:
        self.loads.append(load)
        self.requests: list[FakeRequest] = []

    def arrive(self, request_id: str, prompt: list[int], max_tokens: int) -> FakeRequest:
        assert tuple(prompt) not in self.prompts
        self.prompts.add(tuple(prompt))
        return FakeRequest(request_id, max_tokens)

    def add(self, request: FakeRequest) -> None:
        self.requests.append(request)

    def schedule(self) -> list[FakeRequest]:
        self.calls.append("schedule")
        return [request for request in self.requests if request.tokens_left]

    def send(self, step: list[FakeRequest]) -> int:
        return 10

    def execute(self, step: list[FakeRequest]) -> bytes:
        self.calls.append("execute")
        return bytes(len(step))

    def take(self, reply: bytes) -> int:
        return len(reply)

    def update(self, step: list[FakeRequest], reply: int) -> list[FakeRequest]:
        self.calls.append("update")
        assert len(step) == reply
        for request in step:
            request.tokens_left -= 1
        self.requests = [request for request in self.requests if request.tokens_left]
        return step[self.missing :]

    def deliver(self, outputs: list[FakeRequest]) -> Outcome:
        return Outcome(len(outputs), [request.request_id for request in outputs if not request.tokens_left])

    def counts(self) -> dict[str, int]:
        return {"running": len(self.requests), "preemptions": 0}


def test_steady_decode_has_a_row_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_loops, "MAX_LAPS", 2)
    monkeypatch.setattr(scheduler_loops, "MIN_LAPS", 2)
    child = FakeScheduler()
    rows = {(name, unit): value for name, unit, value in child.steady(3, steps_in_flight=1)}
    assert {name for name, unit in rows if unit == "µs"} == {"step", "schedule()", "messages", "update()", "outputs"}
    assert rows["message to the workers", "B"] == 10
    assert child.calls[:6] == ["schedule", "execute", "update"] * 2
    assert child.calls.count("schedule") == 16 + 16 + 2 * BLOCK_SIZE
    assert len(child.prompts) == 3
    assert all(len(prompt) == scheduler_loops.STEADY_PROMPT for prompt in child.prompts)
    (load,) = child.loads
    # Prompts and new tokens, which the last request does not get before the last step: 128 + 5 * 16 + 1 tokens.
    assert load == Load(max_num_seqs=3, num_blocks=3 * 14, steps_in_flight=1)


def test_two_steps_in_flight_are_scheduled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_loops, "MAX_LAPS", 1)
    monkeypatch.setattr(scheduler_loops, "MIN_LAPS", 1)
    child = FakeScheduler()
    assert [name for name, _, _ in child.steady(1, steps_in_flight=2)] == ["step"]
    assert child.calls[:6] == ["schedule", "execute", "schedule", "execute", "update", "schedule"]


def test_a_step_that_leaves_a_request_out_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="a step of 2 requests gave"):
        FakeScheduler(missing=1).steady(2, steps_in_flight=1)


def test_a_tenth_come_and_go_in_every_step() -> None:
    child = FakeScheduler()
    reply = child.churn(20, pool_share=1.0, is_burst=False, num_laps=2)
    assert (reply["running"], reply["finished"], reply["preempted"]) == (20, 2.0, 0.0)
    (step, finished) = reply["rows"]
    assert (step[:2], finished[:2]) == (("step", "µs"), ("a finished request", "µs"))
    assert 0 < finished[2] < step[2]
    assert child.loads[0].num_blocks == 20 * 33


def test_a_burst_comes_and_goes_as_one() -> None:
    child = FakeScheduler()
    reply = child.churn(20, pool_share=0.7, is_burst=True, num_laps=1)
    assert reply["finished"] == 2.0  # 20 in one of ten steps
    assert child.loads[0].num_blocks == int(20 * 33 * 0.7)


def test_a_sample_has_more_laps_where_few_run() -> None:
    assert laps_of(1) == scheduler_loops.MAX_LAPS
    assert laps_of(4096) == scheduler_loops.MIN_LAPS
    assert laps_of(256) == 8


def test_ringcores_scheduler_does_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_loops, "MAX_LAPS", 1)
    monkeypatch.setattr(scheduler_loops, "MIN_LAPS", 1)
    child = RingcoreScheduler()
    child.load("")
    rows = {(name, unit): value for name, unit, value in child.steady(4, steps_in_flight=1)}
    assert 0 < rows["message to the workers", "B"] < 100  # in most steps nothing but its number
    assert [name for name, _, _ in child.steady(4, steps_in_flight=2)] == ["step"]
    even = child.churn(20, pool_share=1.0, is_burst=False, num_laps=2)
    assert (even["finished"], even["preempted"]) == (2.0, 0.0)
    # 461 blocks: 14 prompts of 32 start, and leave 13. The next token of each is the first of a block: 13 run on.
    burst = child.churn(20, pool_share=0.7, is_burst=True, num_laps=2)
    assert burst["finished"] == 1.3
    assert burst["preempted"] > 0


def test_outcomes_are_read_as_the_front_end_reads_them() -> None:
    child = RingcoreScheduler()
    child.load("")
    child.start(Load(max_num_seqs=2, num_blocks=8, steps_in_flight=1))
    for name, max_tokens in (("a", 1), ("b", 2)):
        child.add(child.arrive(name, [1, 2, 3], max_tokens))
    for expected in (Outcome(2, ["a"]), Outcome(1, ["b"])):
        step = child.schedule()
        reply = child.take(child.execute(step))
        assert reply.token_ids.tolist() == [TOKEN_ID] * expected.num_tokens
        assert child.send(step) > 0
        assert child.deliver(child.update(step, reply)) == expected
    assert child.schedule() is None
    assert child.counts() == {"running": 0, "preemptions": 0}


def test_growth_is_a_slope_and_an_exponent() -> None:
    sizes = [1, 8, 32, 256]
    assert slope(sizes, [5 + 0.5 * n for n in sizes]) == pytest.approx(0.5)
    assert growth_exponent(sizes, [3.0 * n**0.25 for n in sizes]) == pytest.approx(0.25)


def test_the_floor_of_a_step_is_measured() -> None:
    assert 0 < step_floor(1).value < step_floor(1 << 12).value


def test_a_short_run_beside_a_peer(specs: list[EngineSpec], make_plan: MakePlan) -> None:
    found = run(Scheduler, make_plan(*specs), "--running=1,4", "--churn=20", "--churn-laps=1")
    rows, checks = found["rows"], found["checks"]
    names = list(rows)
    steps = ["1 running, step, µs", "4 running, step, µs"]
    overlapped = ["1 running, two steps in flight, step, µs", "4 running, two steps in flight, step, µs"]
    assert names[:4] == steps + overlapped
    assert {"4 running, outputs, µs", "4 running, message to the workers, B", "churn, step, µs"} < rows.keys()
    assert all(set(one.samples) == {"ringcore", "vllm"} for one in rows.values())
    assert {name for name, one in rows.items() if one.limit} == set(steps)
    assert {"exponent", "us_a_request"} == checks["a step, vllm"].data.keys()
    assert checks["churn, ringcore, a step"].value == "18 running, 2.0 finished, 0.0 preempted"
    assert 0 < checks["least share of a core that vllm had, in any turn"].data <= 1.0
    assert {"a step, two in flight, ringcore", "churn in bursts, 70% of the blocks, vllm, a step"} < checks.keys()


# ---------------------------------------------------------------------------------------------------------------
# The prefix cache.


class FakePrefixCache(PrefixChild):
    """Finds `error` more tokens than there are."""

    packages: ClassVar[tuple[str, ...]] = ()

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[str] = []
        self.cached: set[bytes] = set()

    def load(self) -> None: ...

    def start(self, num_blocks: int, max_model_len: int) -> None:
        self.num_blocks = num_blocks

    def request(self, prompt: np.ndarray) -> np.ndarray:
        return prompt

    def forget_hashes(self, request: Any) -> None:
        self.calls.append("forget")

    def hash(self, request: Any) -> int:
        self.calls.append("hash")
        return len(request) // BLOCK_SIZE

    def lookup(self, request: Any) -> int:
        data = request.tobytes()
        found = max((len(cached) // 4 for cached in self.cached if data.startswith(cached)), default=0)
        return min(found, len(request) - 1) + self.error

    def take(self, request: Any) -> None:
        self.calls.append("take")
        self.cached.add(request.tobytes())

    def free(self, request: Any) -> None:
        self.calls.append("free")

    def reset(self) -> None:
        self.calls.append("reset")
        self.cached.clear()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_loops, "MIN_SECONDS", 0.0)


@pytest.mark.long_form
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "child",
    [pytest.param(FakePrefixCache(), marks=pytest.mark.long_form), RingcorePrefixCache()],
    ids=["fake", "ringcore"],
)
def test_a_prefix_cache_has_a_row_of_everything(child: PrefixChild) -> None:
    child.load()
    rows = child.hashing(64)
    for hit_percent in (0, 50, 100):
        rows += child.looking(64, hit_percent)
    rows += child.taking(64)
    names = [name for name, unit, _ in rows if unit == "µs"]
    lookups = [f"lookup, {percent}% cached" for percent in (0, 50, 100)]
    taken = ["blocks taken and published, none cached", "blocks taken and published, all cached", "blocks given back"]
    assert names == ["hash", *lookups, *taken]
    assert all(value > 0 for _, _, value in rows)


@pytest.mark.usefixtures("quick")
def test_the_pool_is_full_of_others_where_blocks_must_be_evicted() -> None:
    child = FakePrefixCache()
    child.taking(64)
    assert child.num_blocks == prefix_loops.POOL_PROMPTS * 4
    resets = [index for index, call in enumerate(child.calls) if call == "reset"]
    filling = child.calls[resets[-1] + 1 :][: 3 * prefix_loops.POOL_PROMPTS]
    assert filling == ["hash", "take", "free"] * prefix_loops.POOL_PROMPTS
    assert child.calls[: resets[-1]].count("reset") == child.calls[: resets[-1]].count("take") + 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", [1, -17])
def test_a_lookup_that_finds_anything_else_ends_the_run(error: int) -> None:
    with pytest.raises(RuntimeError, match="32 of 64 tokens are cached; "):
        FakePrefixCache(error).looking(64, 50)


def test_repeats_are_prepared_and_the_first_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_loops, "MIN_SECONDS", 0.0)
    calls: list[str] = []
    assert median_us(lambda: calls.append("act"), lambda: calls.append("prepare")) > 0
    assert calls == ["prepare", "act"] * (prefix_loops.MIN_REPEATS + 1)
    assert with_blocks("x", 8.0, 64) == [("x", "µs", 8.0), ("x", "µs a block", 2.0)]


def test_lengths_have_names() -> None:
    assert [shown_tokens(n) for n in (256, 1024, 1500, 131072)] == [
        "256 tokens",
        "1K tokens",
        "1500 tokens",
        "128K tokens",
    ]


def test_a_short_run_of_the_prefix_cache(specs: list[EngineSpec], make_plan: MakePlan) -> None:
    rows = run(PrefixCache, make_plan(*specs), "--tokens=64,1024", "--taken=64")["rows"]
    assert next(iter(rows)) == "64 tokens, hash, µs"
    assert {"1K tokens, lookup, 50% cached, µs a block", "64 tokens, blocks given back, µs"} < rows.keys()
    assert rows["1K tokens, hash, µs a block"].limit is not None
    assert rows["1K tokens, hash, µs"].limit is None
    assert all(set(one.samples) == {"ringcore", "vllm"} for one in rows.values())


def test_the_floors_of_a_block() -> None:
    floors = block_floors()
    assert list(floors) == ["hash", "lookup, 100% cached"]
    assert floors["hash"].value > floors["lookup, 100% cached"].value > 0


# ---------------------------------------------------------------------------------------------------------------
# The null engine and the simulator.


def test_engines_without_a_model_stay_until_another_is_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(null_loops, "MIN_TOKENS", 8)
    monkeypatch.setattr(null_loops, "MAX_TOKENS", 8)
    child = RingcoreNull()
    child.prepare(write_model_config(tmp_path / "model"), {})
    try:
        for num_requests in (1, 3):
            (steps, token) = child.decode(num_requests, has_process=False)
            assert (steps[:2], token[:2]) == (("steps", "steps/s"), ("a token", "µs"))
            assert steps[2] * token[2] * num_requests == pytest.approx(1e6)
        engine = child._engine
        child.decode(3, has_process=False)
        assert child._engine is engine
    finally:
        child.close()
    assert child._engine is None


def test_prompts_in_chunks_get_their_tokens_when_they_are_computed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": write_model_config(tmp_path / "model"), "load_format": "dummy"}
    options |= {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 32, "steps_in_flight": 1}
    executor = "benchmarks.peers.ringcore_null_executor:NullExecutor"
    engine = RingcoreEngine(EngineConfig.from_options(executor=executor, **options), has_process=False)
    try:
        engine.add([list(range(5)), list(range(100, 110))], max_tokens=2)
        # Of 8 tokens a step: 5 and 3 of prompts; 1 and 7; then the second's own two.
        assert [engine.get() for _ in range(3)] == [1, 2, 1]
    finally:
        engine.close()


@pytest.mark.long_form
def test_a_short_run_of_the_null_engine(specs: list[EngineSpec], make_plan: MakePlan) -> None:
    rows = run(NullEngine, make_plan(*specs), "--requests=1")["rows"]
    assert list(rows)[:2] == [
        "engine in a process of its own, 1 request, steps, steps/s",
        "engine in a process of its own, 1 request, a token, µs",
    ]
    assert "engine in the caller's process, 1 request, a token, µs" in rows
    assert all(set(one.samples) == {"ringcore", "vllm"} for one in rows.values())


def test_a_short_run_of_the_simulator(
    specs: list[EngineSpec], make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "LOADS", {simulator.A_DAY: simulator.Load(2, 10.0)})
    found = run(simulator.Simulator, make_plan(specs[0]), "--requests=5")
    assert list(found["rows"])[:2] == [
        "a million a day, round-robin, replayed, requests/s",
        "a million a day, round-robin, engines' steps, steps/s",
    ]
    check = found["checks"]["a million a day, least-loaded, the whole day"]
    rate = found["rows"]["a million a day, least-loaded, replayed, requests/s"].samples["ringcore"][0]
    assert check.data == {"ringcore": pytest.approx(1e6 / rate / 60)}


# ---------------------------------------------------------------------------------------------------------------
# vLLM itself, where it is.


def test_vllms_children_do_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not in this environment")
    from benchmarks.peers.prefix_vllm import VllmPrefixCache
    from benchmarks.peers.scheduler_vllm import VllmScheduler

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(scheduler_loops, "MAX_LAPS", 1)
    monkeypatch.setattr(scheduler_loops, "MIN_LAPS", 1)
    scheduler = VllmScheduler()
    scheduler.load(write_model_config(tmp_path / "model", vocab_size=scheduler_loops.VOCAB_SIZE))
    for steps_in_flight in (1, 2):
        assert scheduler.steady(2, steps_in_flight)[0][0] == "step"
    cache = VllmPrefixCache()
    cache.load()
    for hit_percent in (0, 50, 100):
        assert cache.looking(64, hit_percent)
