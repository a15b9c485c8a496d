"""What a service takes: keys, sizes, times, and how much at once."""

from __future__ import annotations

import json
import socket

import httpx
import openai
import pytest
from fake_engine import SLOW, make_model_folder
from running_service import DEADLINE_S, eventually, http, served, text_of

from ringcore.errors import ConfigError
from ringcore.serve import ServiceOptions
from ringcore.serve.access import OPEN_PATHS

KEYS = ("first-key", "second-key")
MAX_BODY = 3000


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    options = {"api_keys": KEYS, "max_body_bytes": MAX_BODY, "body_timeout_s": 0.3, "max_concurrent_requests": 4}
    with served(make_model_folder(tmp_path_factory.mktemp("model")), **options) as running:
        yield running


@pytest.fixture
def client(service):
    with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {KEYS[1]}"}, timeout=DEADLINE_S) as made:
        yield made


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens(service, key):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S) as client:
        assert client.completions.create(model=None, prompt="ab", max_tokens=3).choices[0].text == text_of("ab", 3)


@pytest.mark.parametrize("key", ["third-key", "first-ke", "first-key2", "first-key,second-key"])
def test_another_key_does_not(service, key):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
        assert key not in caught.value.message


@pytest.mark.parametrize("header", [None, "", "Bearer", "Basic first-key", "first-key", "Bearer \xe4"])
def test_no_key_does_not(service, header):
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    answer = http.get(f"{service.url}/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


def test_only_what_watches_is_open(service):
    paths = [route.path for route in service.service_app.routes]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/version", "/openapi.json"} <= set(paths)
    for path in paths:
        status = http.get(service.url + path.replace("{name:path}", "x")).status_code
        assert status == (200 if path in OPEN_PATHS else 401), path


def test_the_largest_body(client):
    body = {"prompt": "ab", "max_tokens": 1, "user": ""}
    body["user"] = "x" * (MAX_BODY - len(json.dumps(body)))
    content = json.dumps(body)
    assert len(content) == MAX_BODY
    headers = {"content-type": "application/json"}
    assert client.post("/v1/completions", content=content, headers=headers).status_code == 200
    answer = client.post("/v1/completions", content=content + " ", headers=headers)
    assert answer.status_code == 413
    assert f"max_body_bytes={MAX_BODY}" in answer.json()["error"]["message"]


def test_a_body_without_a_length_is_bounded_too(client):
    def endless():
        for _ in range(100):
            yield b" " * 1000

    answer = client.post("/v1/completions", content=endless(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_a_body_that_never_comes(service):
    with socket.create_connection(("127.0.0.1", service.port), timeout=DEADLINE_S) as connection:
        key = KEYS[0].encode()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            + key
            + b"\r\nContent-Length: 9\r\n\r\n{"
        )
        received = b""
        while chunk := connection.recv(1 << 16):  # until the service closes the connection
            received += chunk
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b"within 0.3 s" in received


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_at_once(service, client, stream):
    """4 places: one request of 3 completions runs, another 2 do not fit, 1 does."""
    body = {"prompt": [97, SLOW], "max_tokens": 120}
    with client.stream("POST", "/v1/completions", json=body | {"n": 3, "stream": True}) as running:
        lines = running.iter_lines()
        next(lines)
        answer = client.post("/v1/completions", json={"prompt": ["ab", "c"], "max_tokens": 2, "stream": stream})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        message = {"messages": [{"role": "user", "content": "a"}], "n": 2, "stream": stream}
        assert client.post("/v1/chat/completions", json=message).status_code == 429
        assert client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2}).status_code == 200
    eventually(lambda: service.service.concurrency.num_in_flight == 0, "no completion is in flight")
    assert client.post("/v1/completions", json={"prompt": ["ab", "c"], "max_tokens": 2}).status_code == 200


def test_what_could_never_run_is_no_overload(client):
    answer = client.post("/v1/completions", json={"prompt": ["a", "b", "c"], "n": 2})
    assert answer.status_code == 400
    assert "raise max_concurrent_requests" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"max_n": 0}, "max_n"),
        ({"max_n": True}, "max_n"),
        ({"max_concurrent_requests": 1.5}, "max_concurrent_requests"),
        ({"body_timeout_s": float("inf")}, "body_timeout_s"),
        ({"body_timeout_s": 0}, "body_timeout_s"),
        ({"max_connections": 0}, "max_connections"),
        ({"max_connections_per_peer": 0}, "max_connections_per_peer"),
        ({"max_header_bytes": 0}, "max_header_bytes"),
        ({"header_timeout_s": 0}, "header_timeout_s"),
        ({"keep_alive_timeout_s": "5"}, "keep_alive_timeout_s"),
        ({"send_timeout_s": -1}, "send_timeout_s"),
        ({"served_model_names": ("",)}, "served_model_names"),
        ({"api_keys": ("",)}, "api_keys"),
        ({"api_keys": ("two words",)}, "api_keys"),
        ({"api_keys": ("schlüssel",)}, "api_keys"),
        ({"tool_call_parser": "hermess"}, "tool_call_parser"),
        ({"reasoning_parser": 5}, "reasoning_parser"),
    ],
)
def test_wrong_options(options, option):
    with pytest.raises(ConfigError) as caught:
        ServiceOptions(**options)
    assert caught.value.details["option"] == option
    assert not any(str(value) in str(caught.value) for value in options.get("api_keys", ()) if value)


def test_keys_are_not_shown():
    assert "secret" not in repr(ServiceOptions(api_keys=("secret",)))
