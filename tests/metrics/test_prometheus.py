"""Dashboards on a real Prometheus: every query has data. Skipped where there is no prometheus program."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from fake_engine import FakeMultiproc, make_model_folder

from ringcore import LLM, SamplingParams

PROGRAM = shutil.which("prometheus")
DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana_dashboard.json"
DEADLINE_S = 60.0
MODEL = "small model"

# What vLLM's dashboards show: the metrics, each in some of these forms, by the model's name.
_QUANTILES = [
    "e2e_request_latency_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_prompt_tokens",
]
_RATES = [
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_max_num_generation_tokens_sum",
    "iteration_tokens_total_count",
]
_GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
_HEATMAPS = ["request_prompt_tokens", "request_generation_tokens"]
_ONE, _SOME = f'{{model_name="{MODEL}"}}', f'{{model_name=~"{MODEL}|other"}}'
VLLM_QUERIES = [
    *(f"histogram_quantile(0.5, sum by(le) (rate(vllm:{name}_bucket{_ONE}[1m])))" for name in _QUANTILES),
    *(f"histogram_quantile(0.99, sum by(le) (rate(vllm:{name}_bucket{_ONE}[1m])))" for name in _QUANTILES),
    *(f"histogram_quantile(0.9, sum by(le, model_name) (rate(vllm:{name}_bucket{_SOME}[1m])))" for name in _QUANTILES),
    *(f"histogram_quantile(0.95, sum by(le) (rate(vllm:{name}_bucket[1m])))" for name in _QUANTILES),
    *(f"rate(vllm:{name}_sum{_ONE}[1m]) / rate(vllm:{name}_count{_ONE}[1m])" for name in _QUANTILES),
    *(f"sum(increase(vllm:{name}_sum[1m])) / sum(increase(vllm:{name}_count[1m]))" for name in _QUANTILES),
    *(f"rate(vllm:{name}{_ONE}[1m])" for name in _RATES),
    *(f"sum by (model_name) (rate(vllm:{name}{_SOME}[1m]))" for name in _RATES),
    *(f"vllm:{name}{_ONE}" for name in _GAUGES),
    *(f"sum by(le) (increase(vllm:{name}_bucket{_ONE}[1m]))" for name in _HEATMAPS),
    f"sum by(finished_reason) (increase(vllm:request_success_total{_ONE}[1m]))",
    f"sum(rate(vllm:prompt_tokens_total{_SOME}[1m])) / sum(rate(vllm:request_success_total{_SOME}[1m]))",
]


def our_queries() -> list[str]:
    """With Grafana's variables replaced as it does."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(found) > 20
    replaced = [expr.replace("$__rate_interval", "1m").replace("$model_name", MODEL) for expr in found]
    assert "$" not in "".join(replaced)
    return replaced


class Prometheus:
    """The program, which scrapes one port of this host."""

    def __init__(self, folder: Path, port: int) -> None:
        config = folder / "prometheus.json"  # JSON is YAML
        job = {"job_name": "ringcore", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        config.write_text(json.dumps({"global": {"scrape_interval": "200ms"}, "scrape_configs": [job]}))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._url = f"http://{address}/api/v1/"
        self._log = folder / "prometheus.log"
        command = [PROGRAM, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        with self._log.open("wb") as log:
            command += [f"--web.listen-address={address}", "--log.level=warn"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(self, path: str, **parameters: str):
        """None while it does not answer."""
        assert self._process.poll() is None, self._log.read_text()
        url = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it starts
                return None
            raise AssertionError(error.read().decode()) from error
        except OSError:
            return None

    def values(self, query: str) -> list[float]:
        """The numbers that a query has now."""
        data = self.ask("query", query=query)
        values = [float(one["value"][1]) for one in (data or {}).get("result", ())]
        return [value for value in values if not math.isnan(value)]

    def wait_for(self, query: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self.values(query):
            assert time.monotonic() < deadline, (query, self._log.read_text())
            time.sleep(0.05)

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """It has seen an engine before and after some requests."""
    if PROGRAM is None:
        pytest.skip("no prometheus: Debian's package of that name has it")
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    options = {"executor": FakeMultiproc, "max_model_len": 128, "block_size": 8, "num_blocks_override": 100}
    with LLM(folder, load_format="dummy", **options) as llm:
        folder_of_data = tmp_path_factory.mktemp("prometheus")
        with (
            llm.start_metrics_server(0, model_name=MODEL) as server,
            Prometheus(folder_of_data, server.port) as running,
        ):
            running.wait_for(f"vllm:num_requests_running{_ONE}")
            prompts = ["a prompt of more than one block", "a prompt of more than one block", "c"]
            for _ in range(2):
                llm.generate(prompts, SamplingParams(max_tokens=20), use_tqdm=False)
                running.wait_for("rate(vllm:generation_tokens_total[1m]) > 0")
            running.wait_for("rate(ringcore:step_seconds_count[1m]) > 0")
            yield running


def test_vllms_dashboards_have_data(prometheus):
    assert [query for query in VLLM_QUERIES if not prometheus.values(query)] == []
    assert prometheus.ask("label/model_name/values") == [MODEL]
    assert prometheus.values("vllm:nonsense") == []


def test_our_dashboard_has_data(prometheus):
    assert [query for query in our_queries() if not prometheus.values(query)] == []


def test_figures_are_right(prometheus):
    """What was generated, as Prometheus has it."""
    prometheus.wait_for(f"vllm:generation_tokens_total{_ONE} == {2 * 3 * 20}")
    (ended,) = prometheus.values(f'vllm:request_success_total{{model_name="{MODEL}", finished_reason="length"}}')
    assert ended == 6
