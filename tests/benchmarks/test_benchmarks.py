"""Each benchmark, run on engines without a model."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.deterministic import Deterministic, deterministic_specs
from benchmarks.driver import BenchmarkError
from benchmarks.footprint import Footprint, import_cost, merge_peaks, process_memory
from benchmarks.gguf_decode import GgufDecode
from benchmarks.harness import EngineSpec, Fleet, Plan
from benchmarks.prompts import PromptStream
from benchmarks.startup import Startup
from benchmarks.throughput import Batch, Limits, count_equal_tokens, decode_limit, weights_read_a_step

MakeSpec = Callable[..., EngineSpec]
MakePlan = Callable[..., Plan]


class FakeLimits:
    """A machine that is measured twice, and was disturbed each time in another part."""

    def __init__(self) -> None:
        self._replies = [
            {"read_bytes_per_s": 4e9, "gemm_flops_per_s": 1e9, "num_threads": 2},
            {"read_bytes_per_s": 1e9, "gemm_flops_per_s": 8e9, "num_threads": 2},
        ]

    def call(self, command: str, timeout_s: float, **arguments: Any) -> Any:
        assert command == "measure"
        return self._replies.pop(0)


def test_throughput_of_one_batch(fake_spec: MakeSpec, make_plan: MakePlan) -> None:
    plan = make_plan(fake_spec("ringcore"), fake_spec("right"), fake_spec("wrong", shift=1), rounds=2, new_tokens=8)
    batch = Batch(3, plan)
    with Fleet(plan) as fleet:
        measurement = batch.measure(fleet, FakeLimits(), 1000)  # type: ignore[arg-type]
    assert measurement.name == "batch 3"
    assert measurement.higher_is_better
    assert {name: len(samples) for name, samples in measurement.samples.items()} == dict.fromkeys(plan.names, 2)
    assert all(rate > 0 for samples in measurement.samples.values() for rate in samples)
    assert measurement.limit == decode_limit(3, 1000, Limits(4e9, 8e9))
    right, wrong = batch.checks()
    assert (right.value, right.data) == ("24 of 24", [8, 8, 8])
    assert (wrong.value, wrong.data) == ("0 of 24", [0, 0, 0])


def test_gguf_files_are_measured_in_every_form(fake_spec: MakeSpec, make_plan: MakePlan, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(bytes(2_000_000))
    plan = make_plan(fake_spec("ringcore"), rounds=1, new_tokens=2, batch=[2], files=[tmp_path / "x.gguf"])
    speed, memory = GgufDecode().run(plan).measurements
    assert (speed.name, memory.name) == ("x.gguf, batch 2", "x.gguf of 2 MB, memory")
    assert list(speed.samples) == ["ringcore packed_int8", "ringcore packed", "ringcore expanded"]
    assert all(value > 0 for found in (speed, memory) for samples in found.samples.values() for value in samples)
    with pytest.raises(BenchmarkError, match="no such file"):
        GgufDecode().run(make_plan(fake_spec("ringcore"), files=[tmp_path / "y.gguf"]))


def test_the_cost_of_determinism_is_measured_beside_the_default(fake_spec: MakeSpec, make_plan: MakePlan) -> None:
    specs = fake_spec("ringcore"), fake_spec("vllm eager")
    plan = make_plan(*specs, rounds=1, new_tokens=4, batch=[2], device="cpu", dtype="float32", threads=1)
    decode, offline = Deterministic().run(plan).measurements
    assert (decode.name, offline.name) == ("decode, batch 2", "offline, prompts")
    names = ["ringcore deterministic", "ringcore", "vllm eager", "vllm eager batch-invariant"]
    assert list(decode.samples) == list(offline.samples) == names
    with_option, without, _, invariant = deterministic_specs(specs, "cpu", "float32")
    assert with_option.settings == {**without.settings, "deterministic": True}
    assert invariant.env["VLLM_BATCH_INVARIANT"] == "1"


def test_tokens_count_as_equal_up_to_the_first_difference() -> None:
    assert count_equal_tokens([1, 2, 3], [1, 2, 3]) == 3
    assert count_equal_tokens([1, 2, 3, 4], [1, 9, 3, 4]) == 1
    assert count_equal_tokens([], []) == 0


def test_the_limit_is_reading_at_small_batches_and_arithmetic_at_large_ones() -> None:
    machine = Limits(read_bytes_per_s=4e9, gemm_flops_per_s=100e9)
    # 1e9 weights: 4 GB are read in 1 s; 2 GFLOP a sequence take 0.02 s, so the two meet at batch 50.
    assert decode_limit(1, 10**9, machine).value == pytest.approx(1.0)
    assert decode_limit(16, 10**9, machine).value == pytest.approx(16.0)
    assert "4000 MB" in decode_limit(16, 10**9, machine).statement
    assert decode_limit(100, 10**9, machine).value == pytest.approx(50.0)
    assert "200.0 GFLOP" in decode_limit(100, 10**9, machine).statement


@pytest.mark.parametrize(("tied", "expected"), [(True, 6 * 4 + 4 * 4), (False, 4 * 4 + 6 * 4)])
def test_an_embedding_is_read_whole_only_as_the_output_head(tmp_path: Path, tied: bool, expected: int) -> None:
    tensors = {
        "model.embed_tokens.weight": np.ones((6, 4), np.float32),
        "model.layer.weight": np.ones((4, 4), np.float32),
    }
    if not tied:
        tensors["lm_head.weight"] = np.ones((6, 4), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert weights_read_a_step(tmp_path) == expected


def test_prompts_are_short_and_do_not_repeat() -> None:
    prompts = PromptStream(seed=1).take(3000)
    assert len(set(prompts)) == 3000
    assert all(3 <= len(prompt.split()) <= 14 for prompt in prompts)
    assert PromptStream(seed=1).take(5) == prompts[:5]
    assert PromptStream(seed=2).take(5) != prompts[:5]


def test_startup_measures_every_start_in_a_fresh_process(fake_spec: MakeSpec, make_plan: MakePlan) -> None:
    findings = Startup().run(make_plan(fake_spec("ringcore"), fake_spec("peer"), rounds=2, parked=False))
    rows = {m.name: m.samples for m in findings.measurements}
    assert list(rows) == ["construction to first token", "imports", "process start to first token"]
    assert list(findings.engines) == ["ringcore", "peer"]
    for engine in findings.engines:
        whole, parts = rows["process start to first token"][engine], rows["construction to first token"][engine]
        assert len(whole) == len(parts) == 2
        assert all(a > b for a, b in zip(whole, parts, strict=True))


def test_footprint_has_a_row_a_role_and_a_total(fake_spec: MakeSpec, make_plan: MakePlan) -> None:
    plan = make_plan(fake_spec("ringcore", helper=True), fake_spec("peer"), batch=2, new_tokens=2)
    findings = Footprint().run(plan)
    rows = {m.name: m for m in findings.measurements}
    assert {"import of the package", "imports of a script", "front end, idle", "helper, at work"} <= set(rows)
    assert set(rows["helper, idle"].samples) == {"ringcore"}
    assert set(rows["all processes, idle"].samples) == {"ringcore", "peer"}
    assert 1 < rows["front end, idle"].samples["peer"][0] < 200
    assert rows["all processes, at work"].samples["ringcore"][0] > rows["helper, at work"].samples["ringcore"][0] / 2
    assert [(check.name, check.value) for check in findings.checks] == [
        ("imports that load torch", "none"),
        ("processes of ringcore with torch loaded", "none"),
        ("processes of peer with torch loaded", "none"),
    ]


def test_an_import_is_timed_in_a_fresh_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("print('hello')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_cost(sys.executable, "import torch").loads_torch
    cost = import_cost(sys.executable, "import json")
    assert not cost.loads_torch
    assert cost.seconds > 0
    with pytest.raises(BenchmarkError, match="No module named 'no_such_module'"):
        import_cost(sys.executable, "import no_such_module")


def test_memory_of_a_process() -> None:
    """Of pages of its own: an allocator may give an array memory that the process has already."""
    before = process_memory(os.getpid())
    with mmap.mmap(-1, 50_000_000) as block:
        block.write(bytes(len(block)))
        after = process_memory(os.getpid())
        assert after["Rss"] - before["Rss"] > 0.9 * len(block)
    assert 0 < after["Pss"] <= after["Rss"]
    assert process_memory(2**22 + 1) == {"Rss": 0, "Pss": 0}  # above the largest process id there can be


def test_peaks_are_kept_row_by_row() -> None:
    assert merge_peaks({"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 2.0}) == {"a": 3.0, "b": 5.0}
