"""The GPU benchmarks where there is no GPU: their arithmetic, runs of engines without a model, and of tiny ones."""

from __future__ import annotations

import importlib.util
import json
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from gpu_runs import CPU, TINY, run, samples_of, specs_of

from benchmarks import gpu, gpu_attention, gpu_profile, gpu_startup, models
from benchmarks.driver import BenchmarkError, Driver
from benchmarks.gpu import Gpu, chosen_parts
from benchmarks.gpu_attention import GpuAttention
from benchmarks.gpu_ceilings import Ceilings
from benchmarks.gpu_floors import decode_floor, offline_floor, prefill_ceiling, shared_floor
from benchmarks.gpu_options import Deadline, with_options
from benchmarks.gpu_profile import ALL_REQUESTS, GpuProfile, grouped, rows_of, short_name
from benchmarks.gpu_startup import GpuStartup
from benchmarks.harness import engine_specs
from benchmarks.models import MODELS, find_published
from benchmarks.peers.gpu_loops import EngineChild, offline_lengths, offline_workload, shared_lengths, shared_workload
from benchmarks.peers.gpu_ringcore import engine_options
from benchmarks.peers.profile_ringcore import placed, spans
from benchmarks.result import FAILED, Findings

MACHINE = Ceilings(read_bytes_per_s=4.69e12, gemm_flops_per_s=687e12)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "tiny", TINY)
    monkeypatch.setitem(gpu.PARTS, "tiny", ("decode 1", "decode 3", "prefill", "offline", "shared"))
    monkeypatch.setattr(gpu, "DECODE_LOADS", (gpu.DecodeLoad(1, 16, 8), gpu.DecodeLoad(3, 32, 8)))
    monkeypatch.setattr(gpu, "WARM_UP_TOKENS", 2)
    monkeypatch.setattr(gpu, "OFFLINE_REQUESTS", 2)
    monkeypatch.setattr(gpu, "SHARED_REQUESTS", 16)
    monkeypatch.setattr(gpu, "PREFILL_PROMPTS", 8)
    monkeypatch.setattr(gpu, "PREFILL_TOKENS", 31)
    monkeypatch.setattr(gpu, "SETTLE_S", 0.01)
    monkeypatch.setattr(gpu, "measure_ceilings", lambda device, dtype: MACHINE)
    monkeypatch.setattr(gpu_attention, "measure_ceilings", lambda device, dtype: MACHINE)


# ---------------------------------------------------------------------------------------------------------------
# What can be reckoned.


def test_published_models_have_the_weights_they_are_named_for() -> None:
    counts = {name: model.num_weights / 1e9 for name, model in MODELS.items() if name != "tiny"}
    small = {"Llama-3.2-1B": 1.236, "Qwen3-0.6B": 0.596, "Llama-3.2-3B": 3.213, "Qwen3-4B": 4.022}
    large = {"Qwen3-8B": 8.190, "OLMo-2-7B": 7.298, "Granite-3.3-8B": 8.171, "GLM-4-9B": 9.399, "Phi-4": 14.659}
    experts = {"Qwen3-30B-A3B": 30.532, "DeepSeek-V2-Lite": 15.706}
    packed = {"Qwen3-8B-FP8": 8.190, "Qwen3-8B-AWQ": 8.190, "gpt-oss-20b": 20.908}
    packed["Qwen3-30B-A3B-FP8"] = experts["Qwen3-30B-A3B"]
    assert counts == pytest.approx(small | large | experts | packed, abs=1e-3)
    assert MODELS["Qwen3-8B"].step_weights / 1e9 == pytest.approx(7.568, abs=1e-3)
    assert MODELS["Qwen3-8B"].kv_numbers_a_token * 2 == 147_456
    assert MODELS["DeepSeek-V2-Lite"].kv_numbers_a_token == 27 * 576
    assert [model.name for model in find_published("Qwen3-8B,tiny")] == ["Qwen3-8B", "tiny"]
    with pytest.raises(BenchmarkError, match=r"no model 'gpt'; there are: Llama-3\.2-1B, Qwen3-0\.6B, Qwen3-8B"):
        find_published("gpt")


def test_ringcore_and_transformers_know_the_published_models(tmp_path: Path) -> None:
    from transformers import AutoConfig

    from ringcore.config import EngineConfig

    for model in MODELS.values():
        path = model.write(tmp_path)
        spec = EngineConfig.from_options(model=path, load_format="dummy").model.spec
        known = AutoConfig.from_pretrained(path)
        assert (spec.num_layers, spec.hidden_size) == (known.num_hidden_layers, known.hidden_size)
        assert json.loads((path / "config.json").read_text()) == dict(model.config)


def test_floors_are_what_must_be_read_and_multiplied() -> None:
    small, large = MODELS["Qwen3-0.6B"], MODELS["Qwen3-8B"]
    one = decode_floor(small, MACHINE, 1, 2, batch=1, context=384)
    assert one.value == pytest.approx(0.264, abs=1e-3)
    assert one.statement == "reading 1.24 GB of weights and KV cache at 4.69 TB/s"
    assert decode_floor(large, MACHINE, 1, 2, 32, 1152).value == pytest.approx(4.386, abs=2e-3)
    assert decode_floor(large, MACHINE, 2, 2, 32, 1152).value == pytest.approx(4.386 / 2, abs=2e-3)
    assert decode_floor(large, MACHINE, 2, 2, 1, 384).statement.endswith("at 4.69 TB/s on 2 devices")
    experts, packed = MODELS["Qwen3-30B-A3B"], MODELS["Qwen3-8B-AWQ"]
    assert decode_floor(experts, MACHINE, 1, 2, 1, 384).value == pytest.approx(1.305, abs=1e-3)
    every_expert = experts.num_weights - experts.config["hidden_size"] * experts.config["vocab_size"]
    assert experts.step_bytes(10_000, 2) == pytest.approx(2 * every_expert)
    assert decode_floor(packed, MACHINE, 1, 2, 1, 384).value == pytest.approx(1.047, abs=1e-3)
    oss = MODELS["gpt-oss-20b"]
    # 24 layers of 64 heads and 8 KV heads of 64, a router, 4 experts of 3 matrices in 4.25 bits; the head in 16.
    layers = 24 * (2 * (2880 * 64 * 2 * (64 + 8) + 32 * 2880) + 4 * 3 * 2880 * 2880 * 4.25 / 8)
    assert oss.step_bytes(1, 2) == pytest.approx(layers + 2 * 2880 * 201_088)
    assert oss.kv_numbers(1000) == 12 * 2 * 8 * 64 * (1000 + 128)
    assert oss.kv_numbers_of_steps(100, 50) == pytest.approx(sum(oss.kv_numbers(100 + i + 0.5) for i in range(50)))
    assert oss.attention_flops(1000) == 12 * 4 * 64 * 64 * (1000 * 1000 / 2 + 128 * (1000 - 64))
    many = decode_floor(large, MACHINE, 1, 2, 4096, 1)
    assert many.value == pytest.approx(2 * large.step_weights * 4096 / 687e12 * 1e3)
    assert many.statement == "the products of 4096 tokens at 687 TFLOP/s"
    assert offline_floor(small, MACHINE, 1, 2, 256).value == pytest.approx(3.42, abs=0.05)
    assert offline_floor(large, MACHINE, 1, 2, 256).value == pytest.approx(10.04, abs=0.1)
    assert prefill_ceiling(large, MACHINE, 1, 64, 4095).value == pytest.approx(45_500, rel=0.01)
    # 512 x 160 prompt and 68 new tokens. Were the shared ones read by each request, that alone would take 0.9 s.
    assert shared_floor(small, MACHINE, 1, 2, 512).value == pytest.approx(0.348, abs=1e-3)


def test_the_offline_workload_is_nano_vllms() -> None:
    lengths = offline_lengths(256)
    assert (sum(prompt for prompt, _ in lengths), sum(new for _, new in lengths)) == (142_827, 133_966)
    first, _ = offline_workload(2, 0, 20_000)
    again, _ = offline_workload(2, 1, 20_000)
    assert [len(prompt) for prompt in first] == [len(prompt) for prompt in again]
    assert all(a != b for a, b in zip(first[0], again[0], strict=True))
    assert max(map(max, offline_workload(2, 3, 100)[0])) < 100


def test_the_shared_workload_begins_alike() -> None:
    prompts, new = shared_workload(9, 1, 5000)
    assert [(len(prompt) - 1000, count) for prompt, count in zip(prompts, new, strict=True)] == shared_lengths(9)
    assert all(20 <= own <= 300 and 8 <= count <= 128 for own, count in shared_lengths(512))
    assert len({tuple(prompt[:1000]) for prompt in prompts}) == 1
    assert len({tuple(prompt[1000:1020]) for prompt in prompts}) == 9
    assert shared_workload(9, 2, 5000)[0][0][:1000] != prompts[0][:1000]


class CountingEngine(EngineChild):
    """Notes what it is asked; its clock is its tokens."""

    packages: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self._vocab_size = 50

    def import_library(self) -> None: ...

    def construct(self, model: str, settings: Mapping[str, Any]) -> None: ...

    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        self.calls.append((prompts, max_tokens, temperature))
        return [[0] * new for new in max_tokens]

    def forget_prefixes(self) -> None:
        self.calls.append("forget")

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.calls.append("wake up")

    def num_kv_tokens(self) -> int:
        return 0


def test_a_step_is_measured_with_cached_prompts() -> None:
    child = CountingEngine()
    rows = child.decode(batch=2, prompt_tokens=5, new_tokens=9)
    assert [row[:2] for row in rows] == [("a step", "ms"), ("a request of one token, prompt cached", "ms")]
    assert [max_tokens for _, max_tokens, _ in child.calls] == [[1, 1], [1, 1], [9, 9]]
    assert all(prompts == child.calls[0][0] for prompts, _, _ in child.calls)
    assert [len(prompt) for prompt in child.calls[0][0]] == [5, 5]
    assert {temperature for _, _, temperature in child.calls} == {0.0}


def test_offline_and_prefill_find_no_prefix() -> None:
    child = CountingEngine()
    rows = {name: value for name, _, value in child.offline(2, turn=1)}
    assert rows["output"] * rows["all requests"] == pytest.approx(sum(offline_workload(2, 1, 50)[1]))
    child.prefill(3, 7, turn=2)
    child.prefill(3, 7, turn=3)
    child.shared(3, turn=1)
    assert [call == "forget" for call in child.calls] == [True, False] * 4
    assert child.calls[1][2] == 0.6
    assert child.calls[3][0] != child.calls[5][0]
    assert child.calls[5][1] == [1, 1, 1]


def test_a_fast_engine_that_leaves_tokens_out_is_found() -> None:
    class Short(CountingEngine):
        def generate(self, *arguments: Any) -> list[list[int]]:
            return [new[1:] for new in super().generate(*arguments)]

    with pytest.raises(RuntimeError, match="2 requests were to give 2 tokens, and gave 0"):
        Short().decode(2, 5, 9)


def test_the_time_that_kernels_run_counts_overlaps_once() -> None:
    events = [("a", 0.0, 10.0), ("b", 4.0, 2.0), ("c", 8.0, 4.0), ("d", 20.0, 5.0)]
    assert spans(events) == (25.0, [10.0, 0.0, 2.0, 5.0]), "c waits for a"


def test_kernels_are_told_by_their_place_in_a_layer() -> None:
    names = ["embed", "norm", "the_attention<1>", "f<2>(int)", "norm", "the_attention<1>", "f<2>(int)", *"abcdefgh"]
    events = placed([(name, float(at), 0.5) for at, name in enumerate(names)])
    assert events[3] == ("f<2>(int) +1", 3.0, 0.5)
    shown = [short_name(name) for name, *_ in events]
    assert shown[:5] == ["embed", "norm", "the_attention +0", "f +1", "norm +2"]
    assert shown[5:] == ["the_attention +0", "f +1", "a +2", "b +3", "c +4", "d +5", "e +6", "f +7", "g +8", "h"]


def test_kernels_are_grouped_by_what_remains_of_their_names() -> None:
    assert short_name("void at::native::(anonymous namespace)::f<float, 4>(int, float*)") == "at::native::f"
    assert short_name("_decode_kernel") == "_decode_kernel"
    kernels = [("f<1>(int)", 2, 5.0, 1.0), ("g", 1, 9.0, 8.0), ("f<2>(int)", 3, 5.0, 2.0)]
    assert list(grouped(kernels).items()) == [("g", (1, 9.0, 8.0)), ("f", (5, 10.0, 3.0))]
    kernels = [("g", 1, 9.0, 8.0), ("f", 2, 5.0, 3.0), ("h", 1, 1.0, 1.0)]
    one = {"clock_us": 30.0, "span_us": 25.0, "busy_us": 12.0, "kernels": kernels}
    rows = {row.name: row.samples["ringcore"] for row in rows_of("m, batch 1", "ringcore", [one, one], top=2)}
    assert rows == {
        "m, batch 1, a step by the clock": [30.0, 30.0],
        "m, batch 1, a step on the device": [25.0, 25.0],
        "m, batch 1, of it without a kernel": [13.0, 13.0],
        "m, batch 1, all 4 kernels": [15.0, 15.0],
        "m, batch 1, 1 x `g`": [9.0, 9.0],
        "m, batch 1, 1 x `g` exclusive": [8.0, 8.0],
        "m, batch 1, 2 x `f`": [5.0, 5.0],
        "m, batch 1, 2 x `f` exclusive": [3.0, 3.0],
        "m, batch 1, all others": [1.0, 1.0],
    }
    (row, *_) = rows_of("m, offline", "ringcore", [one], top=2, span=ALL_REQUESTS)
    assert (row.name, row.unit, row.samples) == ("m, offline, all requests by the clock", "ms", {"ringcore": [0.03]})


def test_options_choose_what_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.PARTS, "m", ("decode 1", "offline", "prefill"))
    assert chosen_parts("m", "decode,offline", None) == ["decode 1", "offline"]
    assert chosen_parts("m", "prefill", None) == ["prefill"]
    assert chosen_parts("m", "prefill", "3") == ["prefill"]
    # A batch that is named is measured of a model that has no such part.
    assert chosen_parts("m", "decode", "3") == ["decode 3"]
    assert chosen_parts("m", "offline,decode", "3,1") == ["decode 1", "decode 3", "offline"]
    with pytest.raises(BenchmarkError, match="no 'speed'; there are: decode, prefill, offline, shared"):
        chosen_parts("m", "speed", None)
    with pytest.raises(BenchmarkError, match="--batches 2: no '2'; there are: 1, 3"):
        chosen_parts("m", "decode", "2")
    assert Deadline(None).allows("all")
    assert not Deadline(-1.0).allows("a model")
    assert "left out for lack of time: a model" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------
# Runs of engines without a model.


def test_two_engines_take_turns_at_every_case(fake: str) -> None:
    findings = run(Gpu, specs_of(fake, "", ""), *CPU, rounds=2)
    rows = samples_of(findings)
    assert list(rows) == [
        "tiny, batch 1 (16 in, 8 out), a step, ms",
        "tiny, batch 1 (16 in, 8 out), a request of one token, prompt cached, ms",
        "tiny, batch 3 (32 in, 8 out), a step, ms",
        "tiny, batch 3 (32 in, 8 out), a request of one token, prompt cached, ms",
        "tiny, prefill of 8 prompts of 31 tokens, prompts, tokens/s",
        "tiny, offline, 2 requests, all requests, s",
        "tiny, offline, 2 requests, output, tokens/s",
        "tiny, 16 requests that share 1,000 tokens, all requests, s",
        "tiny, 16 requests that share 1,000 tokens, output, tokens/s",
    ]
    assert all({name: len(taken) for name, taken in one.items()} == {"ringcore": 2, "vllm": 2} for one in rows.values())
    assert list(findings.engines) == ["ringcore", "vllm"]
    assert findings.engines["vllm"]["settings"]["memory_share"] == 0.02
    limited = [one.name.rpartition(", ")[2] for one in findings.measurements if one.limit]
    assert limited == ["a step", "a step", "prompts", "all requests", "all requests"]
    assert not findings.checks


@pytest.mark.parametrize(
    ("fault", "failed", "reason"),
    [
        ("load", "vllm failed, tiny", "vllm raised ValueError: no such device"),
        ("3", "vllm failed, tiny, batch 3 (32 in, 8 out)", "vllm ended before it replied"),
        ("short", "vllm failed, tiny, batch 1 (16 in, 8 out)", "vllm raised RuntimeError: 1 requests were to give 2"),
    ],
)
def test_a_peer_that_fails_leaves_the_others_alone(fake: str, fault: str, failed: str, reason: str) -> None:
    findings = run(Gpu, specs_of(fake, "", fault), *CPU)
    (check,) = findings.checks
    assert check.name == failed
    assert check.value.startswith(reason)
    rows = samples_of(findings)
    assert len(rows) == 9
    assert all(one["ringcore"] for one in rows.values())
    assert [name for name, one in rows.items() if "vllm" in one] == (list(rows)[:2] if fault == "3" else [])


def test_engines_are_loaded_one_at_a_time(fake: str) -> None:
    findings = run(Gpu, specs_of(fake, "", ""), *CPU, "--what", "decode", "--one-by-one")
    assert {frozenset(one.samples) for one in findings.measurements} == {frozenset(("ringcore", "vllm"))}
    assert any("their rounds do not alternate" in condition for condition in findings.conditions)


def test_of_engines_one_at_a_time_a_peer_that_cannot_be_loaded_is_told(fake: str) -> None:
    findings = run(Gpu, specs_of(fake, "", "load"), *CPU, "--what", "decode", "--one-by-one")
    assert {frozenset(one.samples) for one in findings.measurements} == {frozenset(("ringcore",))}
    assert [check.name for check in findings.checks] == [f"vllm{FAILED}tiny"]


def test_an_engine_alone_has_the_whole_device(fake: str) -> None:
    findings = run(Gpu, specs_of(fake, ""), *CPU[:-2], "--what=decode", "--batches=1", "--tensor-parallel-size=2")
    settings = findings.engines["ringcore"]["settings"]
    assert (settings["memory_share"], settings["tensor_parallel_size"]) == (0.9, 2)
    assert next(iter(samples_of(findings))) == "tiny on 2 devices, batch 1 (16 in, 8 out), a step, ms"


def test_stages_have_devices_of_their_own(fake: str) -> None:
    sizes = ("--tensor-parallel-size=2", "--pipeline-parallel-size=3")
    findings = run(Gpu, specs_of(fake, ""), *CPU[:-2], "--what=decode", "--batches=1", *sizes)
    settings = findings.engines["ringcore"]["settings"]
    assert (settings["tensor_parallel_size"], settings["pipeline_parallel_size"]) == (2, 3)
    assert next(iter(samples_of(findings))) == "tiny on 6 devices in 3 stages, batch 1 (16 in, 8 out), a step, ms"


def test_prompts_of_lengths_that_are_asked_for(fake: str) -> None:
    findings = run(Gpu, specs_of(fake, ""), *CPU, "--what=decode", "--batches=1", "--prompt-tokens=20,5000")
    steps = [name for name in samples_of(findings) if name.endswith("a step, ms")]
    assert steps == ["tiny, batch 1 (20 in, 8 out), a step, ms", "tiny, batch 1 (5,000 in, 8 out), a step, ms"]
    assert findings.engines["ringcore"]["settings"]["max_model_len"] == 6024
    with pytest.raises(BenchmarkError, match="--prompt-tokens 5,0: give numbers of at least 1"):
        run(Gpu, specs_of(fake, ""), *CPU, "--prompt-tokens=5,0")


def test_two_engines_share_the_device(fake: str) -> None:
    findings = run(Gpu, specs_of(fake, "", ""), *CPU[:-2], "--what=decode", "--batches=1")
    assert findings.engines["ringcore"]["settings"]["memory_share"] == 0.4


def test_native_classes_and_transformers_modules_beside_each_other(fake: str) -> None:
    findings = run(Gpu, specs_of(fake, "", ""), *CPU[:-2], "--what=decode", "--batches=1", "--model-impl=both")
    impls = {name: engine["settings"].get("model_impl") for name, engine in findings.engines.items()}
    assert impls == {"ringcore": "native", "ringcore by transformers": "transformers", "vllm": None}
    assert {engine["settings"]["memory_share"] for engine in findings.engines.values()} == {0.8 / 3}


def test_what_is_measured_is_kept_case_by_case(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[str]] = []

    def keep(findings: Findings) -> None:
        kept.append(sorted({one.name.rpartition(",")[0] for one in findings.measurements}))

    run(Gpu, specs_of(fake, ""), *CPU, "--what=decode", "--batches=1,3", keep=keep)
    first, second = "tiny, batch 1 (16 in, 8 out)", "tiny, batch 3 (32 in, 8 out)"
    assert [{name.split(", a ")[0] for name in names} for names in kept] == [{first}, {first, second}]
    kept.clear()
    cases = [gpu_attention.Case("decode", 2, 20, 30, 4, 2), gpu_attention.Case("prefill", 2, 20, 20, 4, 2)]
    monkeypatch.setattr(gpu_attention, "CASES", cases)
    options = ("--device=cpu", "--dtype=float32", "--backends=torch_sdpa", "--kv-cache-dtypes=auto")
    run(GpuAttention, [], *options, "--block-sizes=16,32", keep=keep)
    assert [len(names) for names in kept] == [1, 2, 3, 4]
    assert sum(name.endswith(", blocks of 32") for name in kept[-1]) == 2


def test_nothing_measured_is_an_error(fake: str) -> None:
    with pytest.raises(BenchmarkError, match="nothing was measured"):
        run(Gpu, specs_of(fake, ""), *CPU, "--seconds=-1")
    with pytest.raises(BenchmarkError, match="nothing was measured: ringcore raised"):
        run(GpuStartup, specs_of(fake, "load"), *CPU)


def test_both_implementations_read_the_same_packages(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(gpu_startup, "import_cost", lambda python, statement, env: read.append(statement))
    with pytest.raises(BenchmarkError, match="nothing was measured"):
        run(GpuStartup, specs_of(fake, "load"), *CPU, "--model-impl=both")
    assert read == [gpu_startup.STATEMENTS["ringcore"]] * 2


@pytest.mark.long_form
def test_starts_are_cold_and_then_warm(fake: str) -> None:
    findings = run(GpuStartup, specs_of(fake, "", "load"), *CPU)
    rows = samples_of(findings)
    phases = [
        f"tiny, {start}, {name}, s"
        for start in ("cold", "warm")
        for name in (
            "imports",
            "construction",
            "construction to first token",
            "process start to first token",
            "phase nothing",
        )
    ]
    assert list(rows) == phases
    assert [list(one) for one in rows.values()] == [["ringcore"]] * len(phases)
    assert findings.engines["ringcore"]["env"] == {"FAKE_FAULT": ""}
    assert findings.engines["ringcore"]["settings"]["memory_share"] == 0.02
    (check,) = findings.checks
    assert check.name == "vllm failed, tiny"


# ---------------------------------------------------------------------------------------------------------------
# Runs of ringcore itself, tiny.


def test_ringcores_child_does_what_is_measured(tmp_path: Path) -> None:
    from benchmarks.peers.gpu_ringcore import RingcoreChild

    child = RingcoreChild()
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "memory_share": 0.01}
    try:
        reply = child.load(str(TINY.write(tmp_path)), {**settings, "tensor_parallel_size": 1})
        assert reply["construct_s"] > 0
        assert child.first_token() > 0
        assert all(value > 0 for _, _, value in child.decode(3, 20, 8))
        assert child.prefill(2, 40, 0)[0][2] > 0
        assert "load_model" in child.phases()
        with pytest.raises(RuntimeError, match="request-"):
            child.generate([[1] * 100], [1], 0.0)
    finally:
        child.close()


@pytest.mark.long_form
def test_a_profile_of_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_profile, "NUM_STEPS", 3)
    monkeypatch.setattr(gpu_profile, "MANY_PROMPT_TOKENS", 24)
    monkeypatch.setattr(gpu_profile, "LONG_PROMPT_TOKENS", 40)
    monkeypatch.setattr(gpu_profile, "NUM_PROMPT_STEPS", 2)
    monkeypatch.setattr(gpu_profile, "offline_lengths", lambda count: [(20, 4), (30, 6)])
    monkeypatch.setattr(gpu_profile, "SHARED_REQUESTS", 2)
    findings = run(GpuProfile, engine_specs([], "eager"), *CPU, "--batches=2", "--top=3")
    rows = samples_of(findings)
    assert list(rows)[:3] == [
        "tiny, batch 2, a step by the clock, µs",
        "tiny, batch 2, a step on the device, µs",
        "tiny, batch 2, of it without a kernel, µs",
    ]
    assert len(rows) == 4 * (3 + 1 + 2 * 3 + 1)
    for case in ("batch 2", "prompts of 40 tokens"):
        assert rows[f"tiny, {case}, a step on the device, µs"]["ringcore"][0] > 0
    for case in ("offline, 2 requests", "2 requests that share 1,000 tokens"):
        assert rows[f"tiny, {case}, all requests on the device, ms"]["ringcore"][0] > 0
    options = "--batches=2", "--what=decode", "--deterministic", "--by-place"
    assert list(run(GpuProfile, engine_specs([], "eager"), *CPU, *options).engines) == ["ringcore deterministic"]
    with pytest.raises(BenchmarkError, match="--what"):
        run(GpuProfile, engine_specs([], "eager"), *CPU, "--what=paper")


def test_an_engine_with_an_option_runs_beside_the_default() -> None:
    specs = with_options(engine_specs([], "eager"), ["max_cudagraph_capture_size=2048", "attention_backend=triton"])
    names = ["ringcore", "ringcore max_cudagraph_capture_size=2048", "ringcore attention_backend=triton"]
    assert [spec.name for spec in specs] == names
    settings = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 9, "tensor_parallel_size": 1, "memory_share": 1}
    default, larger, triton = (engine_options({**spec.settings, **settings}) for spec in specs)
    assert larger == {**default, "max_cudagraph_capture_size": 2048}
    assert triton == {**default, "attention_backend": "triton"}
    for wrong in ("no_such_option=1", "attention_backend"):
        with pytest.raises(BenchmarkError, match=f"--with-option {wrong}: give an engine option"):
            with_options(specs, [wrong])


@pytest.mark.long_form
def test_attention_of_every_backend_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = gpu_attention.Case("decode", 3, 20, 50, 4, 2)
    monkeypatch.setattr(gpu_attention, "CASES", (decode, gpu_attention.Case("prefill", 2, 40, 40, 4, 2)))
    findings = run(GpuAttention, engine_specs([], "eager"), "--device=cpu", "--dtype=float32")
    rows = samples_of(findings)
    assert list(rows) == [
        "decode, 3 x 20 to 50 tokens, 4 query and 2 KV heads, KV cache read, GB/s",
        "decode, 3 x 20 to 50 tokens, 4 query and 2 KV heads, a layer, µs",
        "decode, 3 x 20 to 50 tokens, 4 query and 2 KV heads, KV in FP8, KV cache read, GB/s",
        "decode, 3 x 20 to 50 tokens, 4 query and 2 KV heads, KV in FP8, a layer, µs",
        "prefill, 2 x 40 tokens, 4 query and 2 KV heads, products, TFLOP/s",
        "prefill, 2 x 40 tokens, 4 query and 2 KV heads, a layer, µs",
        "prefill, 2 x 40 tokens, 4 query and 2 KV heads, KV in FP8, products, TFLOP/s",
        "prefill, 2 x 40 tokens, 4 query and 2 KV heads, KV in FP8, a layer, µs",
    ]
    assert "torch_sdpa" in findings.engines
    others = {"triton", "triton_rows", "flash_attn", "triton_mla", "torch_mla"}  # of GPUs, and of latents
    assert not others & set(findings.engines)
    refusals = {f"{name} refuses{stored}" for name in others for stored in ("", ", KV in FP8")}
    refusals.add("cpu_attn refuses, KV in FP8")
    assert {check.name for check in findings.checks} == refusals
    with pytest.raises(BenchmarkError, match="--backends: no 'paper'"):
        run(GpuAttention, [], "--backends=paper")


def test_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.peers import attention_backends
    from ringcore.attention.backends import TorchSdpaBackend

    right: Callable[..., torch.Tensor] = TorchSdpaBackend.forward
    shape = gpu_attention.Case("decode", 2, 20, 50, 4, 2).shape("float32")
    children = attention_backends.Backends()
    children.load("cpu")
    for is_fp8 in (False, True):
        assert children.measure("torch_sdpa", "decode", shape | {"is_fp8": is_fp8})[0][2] > 0
    monkeypatch.setattr(TorchSdpaBackend, "forward", lambda self, *rest: right(self, *rest) * 1.01)
    anew = attention_backends.Backends()
    anew.load("cpu")
    for kind, is_fp8 in (("decode", False), ("prefill", True)):
        with pytest.raises(RuntimeError, match="torch_sdpa is wrong"):
            anew.measure("torch_sdpa", kind, shape | {"is_fp8": is_fp8})


def test_what_a_graph_reads_stays_as_long_as_its_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringcore.kernels.launch import device_timer

    class Memory:
        def __call__(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: nullcontext())
    monkeypatch.setattr(device_timer, "_event_s", lambda action, repeats: 30.0)
    read = Memory()
    alive = weakref.ref(read)
    seconds = device_timer.timer(read, 3, torch.device("cuda"), True)
    del read
    assert alive() is not None
    assert seconds() == 30.0 / (4 * 3)


@pytest.mark.long_form
def test_the_ceilings_of_this_machine() -> None:
    with Driver("ceilings", (sys.executable, "-m", "benchmarks.gpu_ceilings")) as driver:
        ceilings = Ceilings.of(driver.call("measure", 60.0, device="cpu", dtype="float32"))
    assert 1e8 < ceilings.read_bytes_per_s < 1e13
    assert 1e8 < ceilings.gemm_flops_per_s < 1e15


@pytest.mark.long_form
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not in this environment")
def test_the_read_kernel_reads_all() -> None:
    """In a process of its own where there is no GPU: Triton's interpreter is chosen at its import."""
    script = "import torch\nfrom benchmarks.read_kernel import read_all\n"
    script += "x = torch.randint(-9, 9, (3 * 4096 * 2 + 5,), dtype=torch.int32, device=DEVICE)\n"
    script += "sums = torch.full((3,), 77, dtype=torch.int32, device=DEVICE)\n"
    script += "assert read_all(x, sums) == 3 * 4096 * 2 * 4\n"
    script += "assert sums.tolist() == x[: 3 * 4096 * 2].view(3, -1).sum(1).tolist()\n"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    env = {} if device == "cuda" else {"TRITON_INTERPRET": "1"}
    from benchmarks.footprint import import_cost

    assert import_cost(sys.executable, script.replace("DEVICE", repr(device)), env).loads_torch
