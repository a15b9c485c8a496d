"""What is no request of HTTP, methods that there are not, HEAD and OPTIONS."""

from __future__ import annotations

import pytest
from fake_engine import make_model_folder
from raw_http import answer_of, answers, connected, error_of, parted, rest_of
from running_service import http, served

HOST = b"Host: x\r\n"
GETS = ["/health", "/version", "/metrics", "/v1/models", "/openapi.json", "/", "/page/page.css", "/v1/models/fake"]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(make_model_folder(tmp_path_factory.mktemp("model")), served_model_names=("fake",)) as running:
        yield running


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
        b"GET /version HTTP/9.9\r\n" + HOST + b"\r\n",
        b"GET /version FTP/1.1\r\n" + HOST + b"\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET version HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /version HTTP/1.1\r\n" + HOST + b"a b: c\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Content-Length: one\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n",
    ],
)
def test_what_is_no_http(service, sent):
    status, _, error = error_of(answers(service.port, sent))
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert "not a valid HTTP/1.1 request" in error["message"]


def test_what_is_no_http_after_a_request(service):
    with connected(service.port, b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n") as connection:
        assert parted(answer_of(connection))[0] == 200
        connection.sendall(b"\0\0\0")
        assert error_of(rest_of(connection))[0] == 400


@pytest.mark.parametrize(
    "sent", [b"GET /version HTTP/1.1\r\n\r\n", b"GET /version HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"]
)
def test_a_request_has_one_host(service, sent):
    with connected(service.port, sent) as connection:
        status, _, body = parted(answer_of(connection))
    assert status == 400
    assert b"one Host header" in body


def test_an_old_client_needs_no_host(service):
    assert parted(answers(service.port, b"GET /version HTTP/1.0\r\n\r\n"))[0] == 200


@pytest.mark.parametrize("line", [b"FOO /v1/models", b"GETX /v1/models", b"get /v1/models", b"CONNECT x:443"])
def test_a_method_that_http_does_not_have_here(service, line):
    status, headers, error = error_of(answers(service.port, line + b" HTTP/1.1\r\n" + HOST + b"\r\n"))
    assert status == 405
    assert headers["allow"] == "get, head, post, options"
    assert repr(line.split()[0].decode()) in error["message"]


@pytest.mark.parametrize("method", ["DELETE", "PUT", "PATCH", "PROPFIND", "TRACE"])
@pytest.mark.parametrize(
    ("path", "allow"), [("/v1/models", "GET, HEAD, OPTIONS"), ("/v1/completions", "POST, OPTIONS"), ("/nowhere", None)]
)
def test_a_method_that_a_path_does_not_take(service, method, path, allow):
    answer = http.request(method, service.url + path)
    assert answer.status_code == (404 if allow is None else 405)
    assert answer.headers.get("allow") == allow
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", GETS)
def test_head_is_get_without_a_body(service, path):
    got = http.get(service.url + path)
    head = http.request("HEAD", service.url + path)
    assert head.status_code == got.status_code == 200
    assert head.content == b""
    volatile = {"date", "content-length"} if path == "/metrics" else {"date"}
    assert {k: v for k, v in head.headers.items() if k not in volatile} == {
        k: v for k, v in got.headers.items() if k not in volatile
    }


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/v1/completions", 405), ("/v1/models/other", 404)])
def test_head_of_what_get_does_not_have(service, path, status):
    answer = http.request("HEAD", service.url + path)
    assert (answer.status_code, answer.content) == (status, b"")


def test_nothing_follows_the_answer_to_head(service):
    with connected(service.port, b"HEAD /version HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n") as connection:
        status, headers, body = parted(rest_of(connection))
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) > 0


@pytest.mark.parametrize(
    ("path", "status", "allow"),
    [
        ("/v1/models", 204, "GET, HEAD, OPTIONS"),
        ("/", 204, "GET, HEAD, OPTIONS"),
        ("/v1/chat/completions", 204, "POST, OPTIONS"),
        ("/nowhere", 404, None),
    ],
)
def test_options(service, path, status, allow):
    answer = http.request("OPTIONS", service.url + path)
    assert (answer.status_code, answer.headers.get("allow")) == (status, allow)
    assert (answer.content == b"") == (status == 204)


def test_options_of_the_service(service):
    with connected(service.port, b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n") as connection:
        head = connection.recv(1 << 16)
    assert head.startswith(b"HTTP/1.1 204 ")
    assert b"allow: GET, HEAD, POST, OPTIONS" in head


@pytest.mark.parametrize(("path", "status"), [("/v1/models", 200), ("/v1/realtime", 404)])
def test_another_protocol_is_not_spoken(service, path, status, caplog):
    """It is HTTP that goes on, also for what follows at once."""
    upgrade = (
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x3JJ\r\n\r\n"
    )
    next_one = b"GET /version HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
    ask = b"GET " + path.encode() + b" HTTP/1.1\r\n" + HOST + upgrade + next_one
    received = answers(service.port, ask)
    first, second = received.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"%d " % status)
    assert second.startswith(b"200 ")
    assert caplog.text == ""
