"""`ringcore serve` with few descriptors: a flood of slow heads, and accept() that fails."""

from __future__ import annotations

import os
import resource
import signal
import time

import pytest
from fake_engine import make_model_folder
from raw_http import connected
from running_service import DEADLINE_S, http
from test_serve_command import Command

NUM_DESCRIPTORS = 256
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def limit_descriptors(command: Command, num: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(command.process.pid, resource.RLIMIT_NOFILE, (num, min(hard, NUM_DESCRIPTORS)))


def test_a_flood_of_slow_heads(folder):
    """600 connections, where the process may have 256 descriptors; then more of them, for as long as it is asked."""
    starting = Command(folder, "--api-key", "key", "--no-access-log", "--block-size", "8")
    limit_descriptors(starting, 200)  # before it looks
    with starting as command:
        assert resource.prlimit(command.process.pid, resource.RLIMIT_NOFILE) == (NUM_DESCRIPTORS, NUM_DESCRIPTORS)
        port = int(command.url.rpartition(":")[2])
        flood = [connected(port, HALF) for _ in range(600)]
        for _ in range(5):
            answer = http.post(
                f"{command.url}/v1/completions",
                json={"prompt": "ab", "max_tokens": 2},
                headers={"Authorization": "Bearer key"},
            )
            assert answer.status_code == 200
            assert http.get(f"{command.url}/health").status_code == 200
            flood += [connected(port, HALF) for _ in range(50)]
        for one in flood:
            one.close()
        command.process.send_signal(signal.SIGINT)
        code, out, err = command.ends()
    assert code == 0
    assert "max_connections=4096 is cut to " in err
    assert "accept()" not in err
    assert len(out) + len(err) < 4000, err[:4000]


def test_accept_without_a_descriptor_is_logged_once_a_second(folder):
    with Command(folder, "--no-access-log") as command:
        port = int(command.url.rpartition(":")[2])
        num_open = len(os.listdir(f"/proc/{command.process.pid}/fd"))
        begun = time.monotonic()
        limit_descriptors(command, num_open)
        waiting = [connected(port, HALF) for _ in range(50)]
        time.sleep(2.5)
        limit_descriptors(command, NUM_DESCRIPTORS)
        assert http.get(f"{command.url}/health", timeout=DEADLINE_S).status_code == 200
        elapsed = time.monotonic() - begun
        for one in waiting:
            one.close()
        command.process.send_signal(signal.SIGINT)
        code, out, err = command.ends()
    assert code == 0
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if "accept(): Too many open files" in line]
    assert 1 <= len(lines) <= elapsed + 1
    assert len(out) + len(err) < 4000, err[:4000]
