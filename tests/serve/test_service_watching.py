"""/metrics, /health, /version, /tokenize and /detokenize."""

from __future__ import annotations

import json
from contextlib import ExitStack

import httpx
import pytest
from fake_engine import ROW_FAILS, SLOW, make_model_folder
from prometheus_client.parser import text_string_to_metric_families
from running_service import eventually, http, served

import ringcore


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(make_model_folder(tmp_path_factory.mktemp("model")), served_model_names=("fake",)) as running:
        yield running


def samples(service) -> dict[tuple[str, str], float]:
    """(name, the one label that is not the model's name) to value."""
    answer = http.get(f"{service.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.name.startswith(("vllm:", "ringcore:", "process_", "python_"))
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name", None) == (None if family.name.startswith("p") else "fake")
            labels.pop("engine", None)
            found[sample.name, next(iter(labels.values()), "")] = sample.value
    return found


def post(service, path="/v1/completions", **body) -> httpx.Response:
    return http.post(service.url + path, json=body)


def test_counters_and_histograms(service):
    before = samples(service)
    post(service, prompt="abc", max_tokens=5, n=2).raise_for_status()
    post(service, prompt="abcd", max_tokens=6, stream=True).raise_for_status()
    post(service, path="/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=1)
    assert post(service, prompt=[97, ROW_FAILS]).status_code == 500
    assert post(service, prompt="").status_code == 400
    after = samples(service)

    def gained(name: str, label: str = "") -> float:
        return after[name, label] - before[name, label]

    assert gained("vllm:prompt_tokens_total") == 3 + 4 + len("user:a;A:")
    assert gained("vllm:generation_tokens_total") == 2 * 5 + 6 + 1
    assert gained("vllm:request_success_total", "length") == 4
    assert gained("vllm:request_success_total", "error") == 1
    assert gained("vllm:request_success_total", "stop") == gained("vllm:request_success_total", "abort") == 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert gained(f"vllm:{name}_count") == 3, name
        assert gained(f"vllm:{name}_sum") > 0, name
    assert gained("vllm:inter_token_latency_seconds_count") == 2 * 4 + 5  # streamed or not
    assert gained("vllm:request_time_per_output_token_seconds_count") == 2
    assert gained("vllm:request_prompt_tokens_sum") == 3 + 4 + len("user:a;A:")
    assert gained("vllm:request_generation_tokens_sum") == 17
    assert gained("vllm:request_params_n_sum") == 4


def test_gauges(service):
    body = {"prompt": [97, SLOW], "max_tokens": 100, "stream": True, "n": 2}
    with http.stream("POST", f"{service.url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        eventually(lambda: samples(service)["vllm:num_requests_running", ""] == 2, "both run")
        running = samples(service)
    eventually(service.is_idle, "the request has ended")
    idle = samples(service)
    assert running["vllm:num_requests_waiting", ""] == 0
    assert 0 < running["vllm:kv_cache_usage_perc", ""] < 0.1
    assert idle["vllm:num_requests_running", ""] == idle["vllm:kv_cache_usage_perc", ""] == 0
    assert idle["vllm:request_success_total", "abort"] == running["vllm:request_success_total", "abort"] + 2


def test_cache_hits(service):
    before = samples(service)
    for _ in range(2):
        post(service, prompt="a prompt that is longer than two blocks", max_tokens=1).raise_for_status()
    after = samples(service)
    assert after["vllm:prefix_cache_hits_total", ""] - before["vllm:prefix_cache_hits_total", ""] >= 16
    assert after["vllm:prefix_cache_queries_total", ""] - before["vllm:prefix_cache_queries_total", ""] >= 39


def sleep_states(service) -> list[float]:
    found = samples(service)
    return [found["vllm:engine_sleep_state", state] for state in ("awake", "asleep")]


def test_sleep_state(service):
    assert sleep_states(service) == [1, 0]
    service.call(service.engine.sleep())
    try:
        assert post(service, prompt="ab").status_code == 503
        eventually(lambda: sleep_states(service) == [0, 1], "the engine says that it sleeps")
    finally:
        service.call(service.engine.wake_up())
    post(service, prompt="ab", max_tokens=1).raise_for_status()
    assert sleep_states(service) == [1, 0]


def test_health(service):
    answer = http.get(f"{service.url}/health")
    assert answer.status_code == 200
    counts = {"num_running": 0, "num_waiting": 0, "num_restarts": 0}
    assert answer.json() == {"state": "ready", "replicas": ["ready"]} | counts


def probe(service, kind: str) -> tuple[int, str | None]:
    answer = http.get(f"{service.url}/health/{kind}")
    assert answer.json()["is_ok"] == (answer.status_code == 200)
    return answer.status_code, answer.json()["reason"]


def test_probes(service):
    """Ready is what would compute a request now; what a new process would not mend is alive."""
    assert probe(service, "ready") == probe(service, "live") == (200, None)
    with ExitStack() as again:
        service.call(service.engine.pause())
        again.callback(lambda: service.call(service.engine.resume()))
        assert probe(service, "ready") == (503, "no engine serves: paused")
    with ExitStack() as again:
        service.call(service.engine.sleep(level=1))
        again.callback(lambda: service.call(service.engine.wake_up()))
        assert probe(service, "ready") == (503, "no engine serves: sleeping")
        assert probe(service, "live") == (200, None)
        assert http.get(f"{service.url}/health").status_code == 200
    assert probe(service, "ready") == (200, None)
    with ExitStack() as again:
        service.service.begin_ending()
        again.callback(lambda: setattr(service.service, "is_ending", False))
        assert probe(service, "ready") == (503, "the service ends")


def test_version(service):
    assert http.get(f"{service.url}/version").json() == {"version": ringcore.__version__}


def test_the_document_of_the_interface(service):
    document = http.get(f"{service.url}/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize"} <= set(document["paths"])
    answers = document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert answers["application/json"]["schema"]["$ref"].endswith("CompletionResponse")
    assert "text/event-stream" in answers
    assert http.get(f"{service.url}/docs").status_code == 404


def test_tokenize_a_prompt(service):
    answer = post(service, "/tokenize", model="fake", prompt="ab<|end|>", return_token_strs=True)
    assert answer.json() == {
        "count": 3,
        "max_model_len": 128,
        "tokens": [97, 98, 256],
        "token_strs": ["a", "b", "<|end|>"],
    }


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_tokenize_messages(service, add_generation_prompt):
    answer = post(
        service,
        "/tokenize",
        messages=[{"role": "user", "content": "a"}],
        add_generation_prompt=add_generation_prompt,
    ).json()
    assert bytes(answer["tokens"]).decode() == "user:a;A:"[: 9 if add_generation_prompt else 7]
    assert answer["count"] == len(answer["tokens"])
    assert answer["token_strs"] is None


def test_detokenize(service):
    assert post(service, "/detokenize", tokens=[97, 98, 256]).json() == {"prompt": "ab<|end|>"}
    assert post(service, "/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**31]}, "tokens[0]"),
        ("/detokenize", {"tokens": "ab"}, "tokens"),
    ],
)
def test_what_is_wrong_with_tokens(service, path, body, param):
    answer = http.post(service.url + path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_tokens_of_another_model(service, path, body):
    assert http.post(service.url + path, json=body | {"model": "other"}).status_code == 404
