from __future__ import annotations

import sys
from collections.abc import Callable

import psutil
import pytest

from benchmarks import BENCHMARKS
from benchmarks.driver import BenchmarkError, is_alive
from benchmarks.harness import (
    Benchmark,
    EngineSpec,
    Fleet,
    Plan,
    engine_specs,
    generate,
    interleave,
    load_benchmark,
    run_benchmark,
)
from benchmarks.result import Findings, Measurement, Result

MakeSpec = Callable[..., EngineSpec]
MakePlan = Callable[..., Plan]


def test_rounds_alternate_their_order_and_the_first_is_not_kept() -> None:
    calls: list[tuple[str, int]] = []

    def turn(name: str, round_: int) -> int:
        calls.append((name, round_))
        return len(calls)

    samples = interleave(["a", "b", "c"], 2, turn)
    assert [name for name, _ in calls] == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert [round_ for _, round_ in calls] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert samples == {"a": [6, 7], "b": [5, 8], "c": [4, 9]}


def test_only_the_engine_whose_turn_it_is_runs(fake_spec: MakeSpec, make_plan: MakePlan) -> None:
    with Fleet(make_plan(fake_spec("a"), fake_spec("b"))) as fleet:
        with fleet.turn("a") as a:
            token_ids = generate(a, ["xy"], 2).token_ids
            with fleet.turn("b") as b:
                pass
            assert b.processes()[0].status() == psutil.STATUS_STOPPED
            assert a.processes()[0].status() != psutil.STATUS_STOPPED
        assert token_ids == [[2, 3]]
        assert list(fleet.facts) == ["a", "b"]
        processes = a.processes() + b.processes()
    assert not any(map(is_alive, processes))


def test_an_engine_that_was_loaded_runs_on_for_a_while(
    fake_spec: MakeSpec, make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("benchmarks.harness.time.sleep", slept.append)
    with Fleet(make_plan(fake_spec("a"), fake_spec("b")), settle_s=7.0) as fleet, fleet.turn("b"):
        assert slept.count(7.0) == 2


def test_an_engine_that_generates_fewer_tokens_is_refused(fake_spec: MakeSpec, make_plan: MakePlan) -> None:
    message = r"2 completions of 4 tokens were asked for; 2 of \[3\]"
    plan = make_plan(fake_spec(missing=1))
    with Fleet(plan) as fleet, fleet.turn("fake") as driver, pytest.raises(BenchmarkError, match=message):
        generate(driver, ["a", "b"], 4)


def test_every_registered_benchmark_loads_and_says_what_it_is() -> None:
    for name in BENCHMARKS:
        benchmark = load_benchmark(name)
        assert issubclass(benchmark, Benchmark)
        assert benchmark.__doc__


def test_an_unknown_benchmark_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BenchmarkError, match="throughput, startup, footprint"):
        load_benchmark("warp")


def test_peers_are_named_by_their_interpreter() -> None:
    specs = engine_specs([f"vllm={sys.executable}", f"transformers={sys.executable}"], "both")
    assert [spec.name for spec in specs] == ["ringcore", "vllm eager", "vllm compiled", "transformers"]
    assert [spec.settings.get("mode") for spec in specs] == [None, "eager", "compiled", None]
    assert {spec.python for spec in specs} == {sys.executable}


def test_a_setting_reaches_its_peer_in_every_mode_and_no_other() -> None:
    peers = [f"vllm={sys.executable}", f"transformers={sys.executable}"]
    specs = engine_specs(peers, "both", ["vllm:A=1", "vllm:B=x=y"])
    assert [(spec.env.get("A"), spec.env.get("B")) for spec in specs] == [
        (None, None),
        ("1", "x=y"),
        ("1", "x=y"),
        (None, None),
    ]


@pytest.mark.parametrize("setting", ["vllm:A=1", "ringcore:A=1", "transformers:A", "A=1"])
def test_a_setting_of_no_peer_is_refused(setting: str) -> None:
    with pytest.raises(BenchmarkError, match="give NAME:VARIABLE=VALUE"):
        engine_specs([f"transformers={sys.executable}"], "eager", [setting])


@pytest.mark.parametrize(
    ("peers", "message"),
    [
        (["warp=/bin/sh"], "no peer 'warp'; there are: vllm, transformers, llama_cpp"),
        (["vllm"], "give vllm=PYTHON"),
        (["vllm=/no/such/python"], "give vllm=PYTHON"),
        ([f"vllm={sys.executable}"] * 2, "the same peer twice"),
    ],
)
def test_a_peer_that_cannot_be_run_is_refused(peers: list[str], message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        engine_specs(peers, "eager")


def test_what_there_is_of_a_long_run_is_written(monkeypatch: pytest.MonkeyPatch, make_plan: MakePlan) -> None:
    parts = [Measurement(name=name, unit="s", higher_is_better=False, samples={"a": [1.0]}) for name in "xyz"]

    class Long(Benchmark):
        def run(self, plan: Plan) -> Findings:
            for count in (1, 2):
                plan.keep(Findings(measurements=parts[:count], engines={}, conditions=[]))
            raise BenchmarkError("cut off")

    written: list[Result] = []
    monkeypatch.setattr("benchmarks.harness.load_benchmark", lambda name: Long)
    with pytest.raises(BenchmarkError, match="cut off"):
        run_benchmark("long", make_plan(rounds=2), "the command", "c0", written.append)
    assert [[one.name for one in result.findings.measurements] for result in written] == [["x"], ["x", "y"]]
    assert {(result.benchmark, result.commit, result.rounds) for result in written} == {("long", "c0", 2)}


def test_a_result_says_where_it_was_taken(fake_spec: MakeSpec, make_plan: MakePlan) -> None:
    result = run_benchmark("startup", make_plan(fake_spec("ringcore"), rounds=2, parked=False), "the command")
    assert (result.benchmark, result.command, result.rounds) == ("startup", "the command", 2)
    assert {"cpu", "cores", "memory_bytes", "os", "python", "packages", "load_average_1min"} <= set(result.machine)
    assert result.commit
    assert result.date.endswith("+00:00")
