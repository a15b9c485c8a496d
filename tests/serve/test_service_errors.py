"""An engine that sleeps, fails or dies, and a service that has a bug: clients get an error that they can read."""

from __future__ import annotations

import json
import os
import signal

import httpx
import openai
import pytest
from fake_engine import KILLS_ONCE, ROW_FAILS, SLOW, FragileMultiproc, make_model_folder
from prometheus_client.parser import text_string_to_metric_families
from running_service import DEADLINE_S, eventually, http, served, text_of


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(make_model_folder(tmp_path_factory.mktemp("model"))) as running:
        yield running


@pytest.fixture
def client(service):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as made:
        yield made


def error_of(answer: httpx.Response) -> dict:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    return body["error"]


def events_of(answer: httpx.Response) -> list[dict]:
    """The events of a stream that ended as one should."""
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n")[:-1]]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("stream", [False, True])
def test_a_sleeping_engine(service, client, stream):
    service.call(service.engine.sleep())
    try:
        assert http.get(f"{service.url}/health").json()["state"] == "sleeping"
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=None, prompt="ab", stream=stream)
        assert caught.value.status_code == 503
        assert caught.value.code == "engine_sleeping"
        assert "wake_up" in caught.value.message
    finally:
        service.call(service.engine.wake_up())
    assert client.completions.create(model=None, prompt="ab", max_tokens=2).choices[0].text == text_of("ab", 2)


def test_requests_that_a_sleep_ends(service):
    with http.stream(
        "POST", f"{service.url}/v1/completions", json={"prompt": [97, SLOW], "max_tokens": 99, "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        service.call(service.engine.sleep())
        try:
            *_, last, done = [line for line in lines if line]
        finally:
            service.call(service.engine.wake_up())
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    assert done == "data: [DONE]"


def test_one_request_that_fails(service, client):
    with pytest.raises(openai.InternalServerError, match="not finite") as caught:
        client.completions.create(model=None, prompt=[97, ROW_FAILS])
    assert caught.value.code == "engine_error"
    assert client.completions.create(model=None, prompt="ab", max_tokens=2).choices[0].text == text_of("ab", 2)


class Broken:
    """Outputs of a front end with a bug."""

    def __init__(self, outputs: list) -> None:
        self._outputs = outputs

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._outputs:
            return self._outputs.pop()
        raise ZeroDivisionError("a secret")

    async def aclose(self) -> None:
        pass


def test_a_bug_tells_clients_nothing_of_itself(service, monkeypatch):
    monkeypatch.setattr(service.engine, "generate", lambda *_, **__: Broken([]))
    for stream in (False, True):
        answer = http.post(f"{service.url}/v1/completions", json={"prompt": "ab", "stream": stream})
        assert answer.status_code == 500
        error = error_of(answer)
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert "secret" not in answer.text
    assert service.service.concurrency.num_in_flight == 0


def test_a_bug_in_mid_stream_is_the_last_event(service, monkeypatch):
    from ringcore import CompletionOutput, RequestOutput

    output = RequestOutput("a", "ab", [97, 98], [CompletionOutput(0, "x", [120])])
    monkeypatch.setattr(service.engine, "generate", lambda *_, **__: Broken([output]))
    answer = http.post(f"{service.url}/v1/completions", json={"prompt": "ab", "stream": True})
    first, last = events_of(answer)
    assert first["choices"][0]["text"] == "x"
    assert last["error"]["code"] == "internal_error"


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "says"),
    [
        ("GET", "/v1/completions", None, 405, "Method Not Allowed"),
        ("GET", "/nowhere", None, 404, "Not Found"),
        ("POST", "/v1/completions", "{", 400, "JSON decode error"),
        ("POST", "/v1/completions", "[1]", 400, "send a JSON object"),
        ("POST", "/v1/completions", "", 400, "send a JSON object"),
        ("POST", "/v1/completions", "[" * 100000, 400, "body"),
        ("POST", "/v1/completions", '{"prompt": "ab", "temperature": NaN}', 400, "give a number"),
        ("POST", "/v1/completions", '{"prompt": "ab", "seed": 1' + "0" * 5000 + "}", 400, "body"),
        ("POST", "/v1/completions", '{"prompt": "a\\ud800"}', 400, "prompt"),
        ("POST", "/v1/completions", '{"prompt": "ab", "a\\ud800": 1}', 400, "unicode"),
        ("POST", "/v1/chat/completions", '{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "surrogate"),
        ("POST", "/v1/completions", b"\xff\xfe", 400, "body"),
    ],
)
def test_what_is_no_request(service, method, path, content, status, says):
    headers = {"content-type": "application/json"}
    answer = http.request(method, service.url + path, content=content, headers=headers, timeout=DEADLINE_S)
    assert answer.status_code == status
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]


def test_an_engine_that_dies(tmp_path):
    """In mid-stream; and what is answered from then on."""
    with served(make_model_folder(tmp_path)) as service:
        body = {"prompt": [97, KILLS_ONCE, 98], "max_tokens": 50, "stream": True}
        *chunks, last = events_of(http.post(f"{service.url}/v1/completions", json=body, timeout=DEADLINE_S))
        assert chunks
        assert last["error"]["code"] == "engine_dead"
        assert last["error"]["type"] == "server_error"
        answer = http.post(f"{service.url}/v1/completions", json={"prompt": "ab"})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_dead")
        with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
            with pytest.raises(openai.InternalServerError, match="worker"):
                client.chat.completions.create(model=None, messages=[{"role": "user", "content": "a"}])
            assert client.models.list().data
        eventually(lambda: http.get(f"{service.url}/health").status_code == 503, "it is known to be dead")
        assert http.get(f"{service.url}/health").json()["state"] == "dead"
        assert http.get(f"{service.url}/metrics").status_code == 200
        assert service.service.concurrency.num_in_flight == 0


def test_the_client_raises_an_error_of_mid_stream(tmp_path):
    with (
        served(make_model_folder(tmp_path)) as service,
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client,
    ):
        chunks = client.completions.create(model=None, prompt=[97, KILLS_ONCE, 98], max_tokens=50, stream=True)
        with pytest.raises(openai.APIError, match="worker"):
            list(chunks)


def test_an_engine_that_is_started_again(tmp_path):
    """Streams have their error; what comes meanwhile is told to come again; no metric tells of what is gone."""
    folder, holds = make_model_folder(tmp_path), tmp_path / "holds"
    with served(folder, {"executor": FragileMultiproc, "engine_restarts": 1}) as service:
        body = {"prompt": [97, SLOW, 98], "max_tokens": 100, "stream": True}
        with http.stream("POST", f"{service.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            before = metrics(service)
            assert before["num_requests_running"] == 1
            assert before["kv_cache_usage_perc"] > 0
            holds.touch()
            os.kill(service.engine.ready.pids["engine"], signal.SIGKILL)
            *_, error, done = [line for line in lines if line]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert done == "data: [DONE]"
        chat = {"messages": [{"role": "user", "content": "a"}]}
        for path, asked in (("completions", {"prompt": "ab"}), ("completions", body), ("chat/completions", chat)):
            refused = http.post(f"{service.url}/v1/{path}", json=asked)
            assert (refused.status_code, error_of(refused)["code"]) == (503, "engine_starting")
            assert int(refused.headers["retry-after"]) > 0
        health = http.get(f"{service.url}/health")
        assert (health.status_code, health.json()["state"]) == (503, "starting")
        assert http.post(f"{service.url}/tokenize", json={"prompt": "ab"}).json()["count"] == 2
        meanwhile = metrics(service)
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert meanwhile[gauge] == 0, gauge
        holds.unlink()
        eventually(lambda: http.get(f"{service.url}/health").status_code == 200, "another engine is there")
        answer = http.post(f"{service.url}/v1/completions", json={"prompt": "ab", "max_tokens": 4})
        assert answer.json()["choices"][0]["text"] == text_of("ab", 4)
        eventually(service.is_idle, "the request has ended")
        after = metrics(service)
        for counter in ("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"):
            assert before[counter] <= meanwhile[counter] <= after[counter], counter
        assert after["prefix_cache_queries_total"] == before["prefix_cache_queries_total"] + 2
        assert after["kv_cache_usage_perc"] == 0


def metrics(service) -> dict[str, float]:
    families = text_string_to_metric_families(http.get(f"{service.url}/metrics").text)
    return {sample.name.removeprefix("vllm:"): sample.value for family in families for sample in family.samples}


def test_the_metrics_of_an_engine_that_died(tmp_path):
    with served(make_model_folder(tmp_path)) as service:
        body = {"prompt": [97, SLOW, KILLS_ONCE], "max_tokens": 50, "n": 2}
        answer = http.post(f"{service.url}/v1/completions", json=body)
        assert answer.status_code == 503
        seen = metrics(service)
        assert (seen["num_requests_running"], seen["num_requests_waiting"], seen["kv_cache_usage_perc"]) == (0, 0, 0)
