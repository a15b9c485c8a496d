"""What vLLM's dashboards ask for is there, under its names and labels. `test_prometheus.py` asks a real Prometheus."""

from __future__ import annotations

import msgspec
import pytest
from fake_engine import make_model_folder
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ringcore.config import EngineConfig
from ringcore.front_end.engine_metrics import EngineMetrics, make_registry_of
from ringcore.metrics import StepLog
from ringcore.metrics.draft_log import DraftStats
from ringcore.protocol.expert_placement import ExpertBalanceStats
from ringcore.protocol.messages import EngineReady
from ringcore.protocol.requests import NO_STATS

HISTOGRAMS = [
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_inference_time_seconds",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
    "request_params_n",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_time_per_output_token_seconds",
    "time_per_output_token_seconds",  # of older dashboards
    "time_to_first_token_seconds",
]
NO_LABELS = [
    "generation_tokens_total",
    "gpu_cache_usage_perc",  # of older dashboards
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "num_requests_running",
    "num_requests_waiting",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "prompt_tokens_total",
]
LABELS = {
    **{f"{name}_{part}": set() for name in HISTOGRAMS for part in ("sum", "count")},
    **{f"{name}_bucket": {"le"} for name in HISTOGRAMS},
    **{name: set() for name in NO_LABELS},
    "request_success_total": {"finished_reason"},
    "engine_sleep_state": {"sleep_state"},
    "cache_config_info": {
        "block_size",
        "cache_dtype",
        "enable_prefix_caching",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "kv_cache_size_tokens",
        "num_gpu_blocks",
        "num_gpu_blocks_override",
    },
}
PROCESS = ("cpu_seconds_total", "max_fds", "open_fds", "resident_memory_bytes", "start_time_seconds")


class Client:
    """Of an engine that is ready."""

    stats, num_worker_restarts = NO_STATS, 0
    last_ready = EngineReady(100, 16, 1600, 64, 25.0, {}, [], {}, 2048)

    def call_engine(self, method, timeout):
        experts = ExpertBalanceStats(1.25, 1.5, 0.125, num_placements=3, moved_bytes=4096)
        drafts = DraftStats(num_drafts=5, num_draft_tokens=14, accepted_at=[4, 2, 0])
        return msgspec.structs.replace(StepLog().metrics(), experts=experts, drafts=drafts)


class NoPrompts:
    num_jobs = num_refused = 0


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    config = EngineConfig.from_options(model=folder, load_format="dummy", num_blocks_override=101)
    engines = [EngineMetrics(config, [], Client) for _ in range(2)]
    text = generate_latest(make_registry_of(engines, NoPrompts(), "a model")).decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


@pytest.mark.parametrize("name", LABELS)
def test_a_metric_of_each_engine(samples, name):
    found = [one.labels for one in samples if one.name == f"vllm:{name}"]
    assert {labels["engine"] for labels in found} == {"0", "1"}
    assert {labels["model_name"] for labels in found} == {"a model"}
    assert {frozenset(labels) - {"engine", "model_name"} for labels in found} == {frozenset(LABELS[name])}


def test_the_kv_cache(samples):
    (found,) = [one.labels for one in samples if one.name == "vllm:cache_config_info" and one.labels["engine"] == "1"]
    assert (found["block_size"], found["num_gpu_blocks"], found["kv_cache_size_tokens"]) == ("16", "100", "1600")
    assert (found["enable_prefix_caching"], found["num_gpu_blocks_override"]) == ("True", "101")


def test_the_load_of_experts(samples):
    """Which vLLM has in its log alone."""
    found = {one.name.removeprefix("ringcore:"): one.value for one in samples if one.name.startswith("ringcore:expert")}
    assert found == {
        "expert_imbalance": 1.25,
        "expert_imbalance_max": 1.5,
        "expert_hottest_share": 0.125,
        "expert_placements_total": 3,
        "expert_moved_bytes_total": 4096,
    }


def test_drafts(samples):
    start = "vllm:spec_decode_num_"
    found = {
        one.name.removeprefix(start) + one.labels.get("position", ""): one.value
        for one in samples
        if one.name.startswith(start)
    }
    assert found == {
        "drafts_total": 5,
        "draft_tokens_total": 14,
        "accepted_tokens_total": 6,
        "accepted_tokens_per_pos_total0": 4,
        "accepted_tokens_per_pos_total1": 2,
        "accepted_tokens_per_pos_total2": 0,
    }


@pytest.mark.parametrize("name", PROCESS)
def test_the_process_of_the_service(samples, name):
    (found,) = [one for one in samples if one.name == f"process_{name}"]
    assert found.value > 0
