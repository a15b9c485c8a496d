"""The benchmark of sleep: runs of engines without a model, and ringcore's own child with a tiny one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gpu_runs import CPU, TINY, run, samples_of, specs_of

from benchmarks import gpu_sleep, models
from benchmarks.driver import BenchmarkError
from benchmarks.gpu_memory import device_used_bytes, process_used_bytes
from benchmarks.gpu_sleep import GpuSleep
from benchmarks.harness import engine_specs
from benchmarks.models import DEFAULT_MODELS, MODELS

SECONDS = [
    "tiny, first sleep of level 1, s",
    "tiny, first wake-up, s",
    "tiny, later sleeps of level 1, s",
    "tiny, later wake-ups, s",
    "tiny, wake-up at once after a sleep, s",
    "tiny, first token after a wake-up, s",
    "tiny, sleep of level 2, s",
    "tiny, wake-up after level 2, s",
]
BYTES = [
    "tiny, freed by level 2, GB",
    "tiny, freed by level 1, GB",
    "tiny, freed of weights and KV cache, %",
    "tiny, left on the device by level 1, GB",
    "tiny, left to its processes by level 1, GB",
]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(models.MODELS, "tiny", TINY)
    monkeypatch.setattr(gpu_sleep, "PAUSE_S", 0.0)
    monkeypatch.setattr(gpu_sleep, "LATER_CYCLES", 2)
    monkeypatch.setattr(gpu_sleep, "_measure_copies", lambda device: {"to_host": 50e9, "to_device": 55.4e9})
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")  # where a driver's tool is, if a test has one


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that knows of 30 MiB that are nobody's, and of what the fake child holds."""
    held = tmp_path / "held"
    held.write_text("0 0")
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f"#!/bin/sh\nread pid mib < {held} || true\ncase $1 in\n"
        '  --query-gpu=memory.used) echo "$((mib + 10))"; echo 20;;\n'
        '  --query-compute-apps=*) echo "77, 5"; echo "$pid, $mib";;\n'
        "  *) exit 9;;\nesac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("FAKE_GPU", str(held))


def test_a_published_model_is_as_large_as_it_is() -> None:
    counts = {name: model.num_weights / 1e9 for name, model in MODELS.items() if name in DEFAULT_MODELS}
    assert counts == pytest.approx({"Llama-3.2-1B": 1.236, "Qwen3-0.6B": 0.596, "Qwen3-8B": 8.190}, abs=1e-3)


def test_what_the_driver_says(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_used_bytes() == 30 * MIB
    assert process_used_bytes([77]) == 5 * MIB
    assert process_used_bytes([0, 77]) == 5 * MIB
    assert process_used_bytes([1]) is None
    (tmp_path / "held").write_text("12 [N/A]")
    assert process_used_bytes([12, 77]) is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert device_used_bytes() is None


def test_the_driver_is_asked_of_the_gpus_that_cuda_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ $# = 3 ] || echo 1\n[ $# = 2 ] || [ "$3" = --id=1,2 ] || exit 9\necho 2\necho 4\n')
    tool.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_used_bytes() == 7 * MIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert device_used_bytes() == 6 * MIB


def test_seconds_and_bytes_of_two_engines(gpu: None, fake: str) -> None:
    findings = run(GpuSleep, specs_of(fake, "", ""), *CPU, rounds=2)
    rows = samples_of(findings)
    assert list(rows) == SECONDS + BYTES
    assert all({name: len(taken) for name, taken in one.items()} == {"ringcore": 2, "vllm": 2} for one in rows.values())
    contents = 4 * (TINY.num_weights + 1000 * TINY.kv_numbers_a_token)
    for name, value in {
        "freed by level 1, GB": 780 * MIB / 1e9,
        "freed by level 2, GB": 790 * MIB / 1e9,
        "freed of weights and KV cache, %": 100 * 780 * MIB / contents,
        "left on the device by level 1, GB": 220 * MIB / 1e9,
        "left to its processes by level 1, GB": 220 * MIB / 1e9,
    }.items():
        assert rows[f"tiny, {name}"] == {engine: pytest.approx([value] * 2) for engine in ("ringcore", "vllm")}
    gains = [one.name.rpartition(", ")[2] for one in findings.measurements if one.higher_is_better]
    assert gains == ["freed by level 2", "freed by level 1", "freed of weights and KV cache"]
    limits = {one.name.removeprefix("tiny, "): one.limit for one in findings.measurements if one.limit}
    assert list(limits) == [name.removeprefix("tiny, ").removesuffix(", s") for name in SECONDS[:5]]
    down, up = limits["first sleep of level 1"], limits["later wake-ups"]
    assert down.value == pytest.approx(4 * TINY.num_weights / 50e9)
    assert up.value == pytest.approx(4 * TINY.num_weights / 55.4e9)
    assert up.statement.endswith("GB of weights to the device at 55.4 GB/s")
    assert [(check.name, check.value) for check in findings.checks] == [
        (f"tiny, greedy tokens of {name} after sleeps of level 1 equal to those before", "512 of 512")
        for name in ("ringcore", "vllm")
    ]
    settings = findings.engines["vllm"]["settings"]
    assert (settings["memory_share"], settings["enable_sleep_mode"]) == (0.02, True)


def test_each_engine_has_the_device_for_itself(fake: str) -> None:
    findings = run(GpuSleep, specs_of(fake, "", ""), *CPU[:-2])
    assert findings.engines["ringcore"]["settings"]["memory_share"] == 0.9


def test_without_a_driver_there_are_seconds_alone(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sleep, "device_used_bytes", lambda: None)
    monkeypatch.setattr(gpu_sleep, "process_used_bytes", lambda pids: None)
    assert list(samples_of(run(GpuSleep, specs_of(fake, ""), *CPU))) == SECONDS


def test_an_engine_that_wakes_with_other_weights_is_found(fake: str) -> None:
    findings = run(GpuSleep, specs_of(fake, "", "forgets"), *CPU)
    assert [check.value for check in findings.checks] == ["256 of 256", "0 of 256"]


def test_a_peer_that_cannot_sleep_leaves_the_other_alone(fake: str) -> None:
    findings = run(GpuSleep, specs_of(fake, "", "sleep"), *CPU, rounds=2)
    assert [list(one) for one in samples_of(findings).values()] == [["ringcore"]] * len(SECONDS)
    failure = findings.checks[-1]
    assert failure.name == "vllm failed, tiny"
    assert failure.value.startswith("vllm raised RuntimeError: no memory to keep the weights in")
    with pytest.raises(BenchmarkError, match="nothing was measured: ringcore raised"):
        run(GpuSleep, specs_of(fake, "sleep"), *CPU)


def test_a_round_has_all_engines_or_none(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False])
    monkeypatch.setattr(gpu_sleep.Deadline, "allows", lambda self, what: next(answers))
    findings = run(GpuSleep, specs_of(fake, "", ""), *CPU, rounds=2)
    for one in samples_of(findings).values():
        assert {name: len(taken) for name, taken in one.items()} == {"ringcore": 1, "vllm": 1}
    assert (findings.checks[-1].name, findings.checks[-1].value) == ("tiny, rounds for which there was time", "1 of 2")


def test_nothing_measured_is_an_error(fake: str) -> None:
    with pytest.raises(BenchmarkError, match="nothing was measured: there was no time"):
        run(GpuSleep, specs_of(fake, ""), *CPU, "--seconds=-1")


@pytest.mark.long_form
def test_the_rate_of_copies_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rates = gpu_sleep._measure_copies("cpu")
    assert rates.keys() == {"to_host", "to_device"}
    assert all(1e8 < rate < 1e13 for rate in rates.values())


def test_ringcore_itself_sleeps_and_wakes_up() -> None:
    spec = replace(engine_specs([], "eager")[0], env={"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"})
    findings = run(GpuSleep, [spec], *CPU)
    rows = samples_of(findings)
    assert list(rows)[: len(SECONDS)] == SECONDS
    assert all(one["ringcore"][0] > 0 for one in rows.values())
    assert findings.checks[0].value == "256 of 256"
