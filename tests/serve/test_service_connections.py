"""Connections that are slow, too many, or say too much."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import httpx
import pytest
from fake_engine import SLOW, make_model_folder
from raw_http import answer_of, answers, connected, error_of, parted, rest_of
from running_service import DEADLINE_S, eventually, http, served

MAX_CONNECTIONS = 4
MAX_HEADER = 2000
HALF = b"GET /version HTTP/1.1\r\nHost: x\r\nX-Slow: "
WHOLE = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
OPTIONS = {
    "api_keys": ("key",),
    "max_connections": MAX_CONNECTIONS,
    "max_header_bytes": MAX_HEADER,
    "header_timeout_s": 0.5,
    "keep_alive_timeout_s": 1.0,
    "send_timeout_s": 0.3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def service(folder):
    with served(folder, **OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def patient(folder):
    """A service whose deadlines do not come into these tests."""
    with served(folder, **OPTIONS | {"header_timeout_s": 600.0, "keep_alive_timeout_s": 600.0}) as running:
        close(streaming(running, 1))
        eventually(running.is_idle, "the first request ended")
        yield running


def streaming(service, num: int) -> list:
    """Connections whose answers go on for seconds."""
    body = json.dumps({"prompt": [97, SLOW], "max_tokens": 120, "stream": True}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nContent-Type: application/json\r\n"
    )
    made = []
    for _ in range(num):
        made.append(connected(service.port, head + b"Content-Length: %d\r\n\r\n" % len(body) + body))
        assert made[-1].recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    return made


def close(connections: list) -> None:
    for connection in connections:
        connection.close()


def has_no_connection(service) -> bool:
    return service.is_idle() and not service._server.server_state.connections


def test_a_head_that_never_ends(service):
    status, _, error = error_of(answers(service.port, HALF))
    assert status == 408
    assert "header_timeout_s=0.5" in error["message"]


def test_a_head_that_drips(service):
    """The deadline is of the head, and not of each byte."""
    with connected(service.port, HALF) as connection:
        begun = time.monotonic()
        try:
            while time.monotonic() - begun < DEADLINE_S:
                connection.sendall(b"a")
                time.sleep(0.05)
        except OSError:  # it was closed
            return
    pytest.fail("it was never closed")


def test_a_connection_that_says_nothing(service):
    assert answers(service.port, b"") == b""


def test_a_further_head_has_a_deadline_too(service):
    with connected(service.port, WHOLE) as connection:
        assert parted(answer_of(connection))[0] == 401
        connection.sendall(HALF)
        assert error_of(rest_of(connection))[0] == 408


def test_an_idle_connection_is_closed(service):
    with connected(service.port, WHOLE) as connection:
        status, _, rest = parted(rest_of(connection))
    assert status == 401
    assert rest.count(b"HTTP/1.1") == 0


def test_a_body_after_its_answer_is_no_reason_to_stay(service):
    with connected(
        service.port, b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    ) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 401 ")
        begun = time.monotonic()
        try:
            while time.monotonic() - begun < DEADLINE_S:
                connection.sendall(b" ")
                time.sleep(0.05)
        except OSError:
            return
    pytest.fail("it was never closed")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /version HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * MAX_HEADER + b"\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * (1 << 20),
        b"GET /" + b"a" * MAX_HEADER + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + b"a" * (1 << 20),
        b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * MAX_HEADER,
        b"\r\n" * MAX_HEADER,
    ],
    ids=["a header", "half a header", "a target", "half a target", "headers", "empty lines"],
)
def test_a_large_head(patient, sent):
    status, _, error = error_of(answers(patient.port, sent))
    assert status == 431
    assert f"max_header_bytes={MAX_HEADER}" in error["message"]


def test_trailers_without_an_end(patient):
    """They are headers that follow a body."""
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(patient.port, head + b"1\r\n{\r\n0\r\n") as connection:
        for _ in range(MAX_HEADER):
            try:
                connection.sendall(b"a: b\r\n" * 10)
            except OSError:
                break
        assert error_of(rest_of(connection))[0] == 431


def test_the_largest_head_and_a_body_in_one_piece(patient):
    """A body, or the end of one before a head, counts for nothing."""
    body = json.dumps({"prompt": "a"}).encode() + b" " * (50 * MAX_HEADER)
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\nX-Long: " % len(body)
    head += b"a" * (MAX_HEADER - len(head) - 50) + b"\r\n\r\n"
    with connected(patient.port, (head + body) * 2 + HALF) as connection:
        received = b""
        while received.count(b"HTTP/1.1 200 ") < 2:
            received += connection.recv(1 << 16)


def test_slow_heads_only_fight_themselves(patient):
    slow = [connected(patient.port, HALF) for _ in range(5 * MAX_CONNECTIONS)]
    try:
        headers = {"Authorization": "Bearer key"}
        with httpx.Client(base_url=patient.url, headers=headers, timeout=DEADLINE_S) as client:
            for _ in range(3):
                assert client.get("/version").status_code == 200
                slow += [connected(patient.port, HALF) for _ in range(MAX_CONNECTIONS)]
        assert [rest_of(one) for one in slow[: 4 * MAX_CONNECTIONS]] == [b""] * 4 * MAX_CONNECTIONS
    finally:
        close(slow)
        eventually(lambda: has_no_connection(patient), "all is over")


def test_idle_connections_give_way(patient):
    idle = []
    try:
        for _ in range(3 * MAX_CONNECTIONS):
            idle.append(connected(patient.port, WHOLE))
            assert parted(answer_of(idle[-1]))[0] == 401
        assert rest_of(idle[0]) == b""
    finally:
        close(idle)
        eventually(lambda: has_no_connection(patient), "all is over")


def test_where_all_are_busy(patient):
    busy = streaming(patient, MAX_CONNECTIONS)
    try:
        status, headers, error = error_of(answers(patient.port, WHOLE))
        assert status == 503
        assert headers["retry-after"] == "1"
        assert f"max_connections={MAX_CONNECTIONS}" in error["message"]
        assert error_of(answers(patient.port, HALF))[0] == 503  # after a short while
        for _ in range(3):
            assert parted(answers(patient.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 200
            assert http.get(f"{patient.url}/metrics").status_code == 200
        slow = [connected(patient.port, HALF) for _ in range(100)]  # these give way in the reserve
        assert http.get(f"{patient.url}/health").status_code == 200
        assert all(b"data: " in one.recv(1 << 16) for one in busy)
        busy += slow
    finally:
        close(busy)
        eventually(lambda: has_no_connection(patient), "all is over")
    assert http.get(f"{patient.url}/version", headers={"Authorization": "Bearer key"}).status_code == 200


def test_a_bound_for_each_peer(folder):
    with served(folder, max_connections_per_peer=2, api_keys=("key",)) as service:
        busy = streaming(service, 2)
        try:
            status, headers, error = error_of(answers(service.port, WHOLE))
            assert status == 429
            assert headers["retry-after"] == "1"
            assert "max_connections_per_peer=2" in error["message"]
            assert http.get(f"{service.url}/health").status_code == 200
        finally:
            close(busy)
            eventually(lambda: not service._server.server_state.connections, "all are closed")
        assert http.get(f"{service.url}/version").status_code == 401


def protocols(service) -> list:
    return list(service._server.server_state.connections)


@pytest.mark.parametrize("last", [b"", b"Connection: close\r\n"])
def test_an_answer_that_is_not_read(patient, last):
    """The application waits to send more; or it is done, and the connection ends once all is sent."""
    ask, state = b"GET /page/page.js HTTP/1.1\r\nHost: x\r\n", patient._server.server_state
    with connected(patient.port) as connection:
        eventually(lambda: len(protocols(patient)) == 1, "it is accepted")
        (protocol,) = protocols(patient)
        while not (protocol.transport.get_write_buffer_size() if last else protocol.flow.write_paused):
            num_answered = state.total_requests
            connection.sendall((ask + b"\r\n") * 8)  # at most 64 KiB, from where on the transport pauses
            eventually(lambda n=num_answered: protocol.flow.write_paused or state.total_requests == n + 8, "answers")
        with suppress(OSError):  # it may be closed by now
            connection.sendall(ask + last + b"\r\n")
        eventually(lambda: not protocols(patient), "it is closed")


def test_many_requests_at_once_on_one_connection(patient):
    """A few wait for their answers, in order; thousands are not kept."""
    with connected(patient.port, WHOLE * 10) as connection:
        received = b""
        while received.count(b"HTTP/1.1 401 ") < 10:
            received += connection.recv(1 << 16)
    assert answers(patient.port, WHOLE * 1000).count(b"HTTP/1.1 401 ") < 1000
