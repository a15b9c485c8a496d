"""The metrics of an engine of this process, without a service."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from fake_engine import KILLS_ONCE, ROW_FAILS, FakeMultiproc, make_model_folder
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ringcore import LLM, AsyncEngine, SamplingParams
from ringcore.errors import ConfigError

OPTIONS = {
    "load_format": "dummy",
    "executor": FakeMultiproc,
    "max_model_len": 128,
    "block_size": 8,
    "num_blocks_override": 100,
}

_COMMON_LABELS = ("model_name", "engine", "le")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as made:
        yield made


def read(registry, label: str = "") -> dict[str, float]:
    """By name, and in parentheses the value of a label beside the model's name."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.documentation
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in _COMMON_LABELS}
            found[sample.name + (f"({','.join(labels.values())})" if labels else "")] = sample.value
    return found


def test_requests_and_steps(llm):
    registry = llm.metrics("small")
    before = read(registry)
    params = SamplingParams(max_tokens=6, n=2)
    llm.generate(["abc", "abcdefghijklmnopqrstuvwxyz"], params, use_tqdm=False)
    llm.generate("ab", SamplingParams(max_tokens=1), use_tqdm=False)
    after = read(registry)

    def gained(name: str) -> float:
        return after[name] - before[name]

    assert gained("vllm:prompt_tokens_total") == 3 + 26 + 2
    assert gained("vllm:generation_tokens_total") == 2 * 2 * 6 + 1
    assert gained("vllm:request_success_total(length)") == 5
    assert gained("vllm:inter_token_latency_seconds_count") == 4 * 5
    assert gained("vllm:request_max_num_generation_tokens_sum") == 6 + 6 + 1
    assert gained("vllm:request_params_max_tokens_sum") == 13
    # A second completion finds three blocks of the longer prompt. The first token comes with the prompt's step.
    assert gained("vllm:iteration_tokens_total_sum") == (3 + 3 + 26 + 2 + 2) + 4 * 5
    assert gained("ringcore:step_requests_sum") == 4 * 6 + 1
    assert gained("ringcore:step_seconds_count") == gained("ringcore:num_steps_total") >= 7
    assert gained("ringcore:step_seconds_sum") > 0
    assert [name for name in after if name.startswith("vllm:cache_config_info(8,auto,True,None,None,")]
    assert after["ringcore:worker_memory_bytes(total,1)"] == 1 << 30
    for process in ("engine", "worker 0", "worker 1"):
        resident = psutil.Process(llm.ready.pids[process]).memory_info().rss
        assert after[f"ringcore:process_resident_bytes({process})"] == pytest.approx(resident, rel=0.2)


def test_their_label_is_the_model(llm, folder):
    assert (
        f'vllm:num_requests_running{{engine="0",model_name="{folder}"}} 0.0' in generate_latest(llm.metrics()).decode()
    )


def test_requests_that_do_not_reach_their_end(llm):
    registry = llm.metrics()
    before = read(registry)
    for _ in llm.stream("abc", SamplingParams(max_tokens=100, n=2), by="token"):
        break
    llm.generate([97, ROW_FAILS], SamplingParams(n=2), use_tqdm=False, on_error="return")
    llm.generate("a", SamplingParams(max_tokens=50, stop=["a", "e", "i", "o", "u"]), use_tqdm=False)
    after = read(registry)
    ended = {reason: f"vllm:request_success_total({reason})" for reason in ("abort", "error", "stop", "length")}
    assert [after[name] - before[name] for name in ended.values()] == [2, 2, 1, 0]
    assert after["vllm:request_generation_tokens_count"] - before["vllm:request_generation_tokens_count"] == 1


def test_as_documented_with_a_server_of_its_own(llm):
    with llm.start_metrics_server(0) as server:
        accepting = urllib.request.Request(server.url, headers={"Accept": "application/openmetrics-text;version=1.0.0"})
        with urllib.request.urlopen(accepting, timeout=30) as answer:
            text = answer.read().decode()
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url + "x", timeout=30)
        with pytest.raises(ConfigError, match=f"port={server.port}: cannot listen at 127.0.0.1"):
            llm.start_metrics_server(server.port)
    assert "\nvllm:kv_cache_usage_perc" in text
    assert "\nringcore:step_seconds_bucket" in text
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.url, timeout=30)


def test_a_registry_keeps_no_engine(folder):
    llm = LLM(folder, **OPTIONS)
    registry, pids = llm.metrics(), list(llm.ready.pids.values())
    llm.generate("ab", SamplingParams(max_tokens=3), use_tqdm=False)
    assert "ringcore:process_resident_bytes(engine)" in read(registry)
    del llm
    gc.collect()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    gone = read(registry)
    assert gone["vllm:generation_tokens_total"] == 3
    assert gone["vllm:num_requests_running"] == 0
    assert "ringcore:process_resident_bytes(engine)" not in gone
    assert "ringcore:step_seconds_count" not in gone


def test_an_engine_that_is_replaced_counts_on(tmp_path):
    """Its requests are counted as errors, and the next engine's rows begin anew."""

    async def run() -> dict[str, float]:
        async with AsyncEngine(make_model_folder(tmp_path), engine_restarts=1, **OPTIONS) as engine:
            registry = engine.metrics("m")
            with pytest.raises(Exception, match="worker 0"):
                async for _ in engine.generate([97, KILLS_ONCE, 98], SamplingParams(max_tokens=9)):
                    pass
            async for _ in engine.generate("abc", SamplingParams(max_tokens=4)):
                pass
            return await asyncio.to_thread(read, registry)

    seen = asyncio.run(run())
    assert seen["vllm:request_success_total(error)"] == 1
    assert seen["vllm:request_success_total(length)"] == 1
    assert seen["ringcore:num_restarts_total"] == 1
    assert seen["vllm:generation_tokens_total"] > 4  # of both
    assert seen["vllm:inter_token_latency_seconds_sum"] < 2.0  # not from the one engine to the other


def test_without_the_extra(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "ringcore.metrics.exposition", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'ringcore[metrics]'")):
        llm.metrics()


def test_nothing_is_imported_unless_asked():
    code = "import sys, ringcore.front_end.llm, ringcore.engine_core.process; print('prometheus_client' in sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert out.stdout == "False\n"
