from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from benchmarks.driver import ROOT, BenchmarkError, is_alive
from benchmarks.harness import EngineSpec

MakeSpec = Callable[..., EngineSpec]

# A harness that stops its engine and says so; it is then killed from outside.
PAUSING_HARNESS = """
import sys, time
from benchmarks.driver import Driver
driver = Driver("fake", sys.argv[1:], {"PYTHONPATH": "."})
driver.call("load", 30.0, model="", settings={"helper": True})
pids = driver.call("pids", 30.0)
driver.pause()
print(*pids.values(), flush=True)
time.sleep(60)
"""


def test_commands_are_answered_though_libraries_print(fake_spec: MakeSpec) -> None:
    with fake_spec().start() as driver:
        loaded = driver.call("load", 30.0, model="m", settings={"shift": 100})
        assert set(loaded["packages"]) == {"msgspec"}
        assert loaded["import_s"] >= 0
        assert loaded["construct_s"] >= 0
        reply = driver.call("generate", 30.0, prompts=["a", "bcd"], max_tokens=3)
        assert reply["token_ids"] == [[101, 102, 103], [103, 104, 105]]


def test_an_error_is_the_error_of_its_command_alone(fake_spec: MakeSpec) -> None:
    with fake_spec().start() as driver:
        driver.call("load", 30.0, model="m", settings={})
        with pytest.raises(BenchmarkError, match="ValueError: a bad prompt"):
            driver.call("generate", 30.0, prompts=["raise"], max_tokens=1)
        with pytest.raises(BenchmarkError, match="KeyError: 'fly'"):
            driver.call("fly", 30.0)
        assert driver.call("generate", 30.0, prompts=["a"], max_tokens=1)["token_ids"] == [[1]]


def test_a_child_that_ends_is_an_error_with_its_last_words(fake_spec: MakeSpec) -> None:
    with fake_spec().start() as driver:
        driver.call("load", 30.0, model="m", settings={})
        with pytest.raises(BenchmarkError, match=r"(?s)ended before it replied.*last words"):
            driver.call("generate", 30.0, prompts=["die"], max_tokens=1)
        with pytest.raises(BenchmarkError, match="ended before it replied"):
            driver.call("pids", 30.0)


def test_a_missing_reply_is_an_error_at_the_deadline(fake_spec: MakeSpec) -> None:
    with fake_spec().start() as driver:
        driver.call("load", 30.0, model="m", settings={})
        driver.send("generate", 0.05, prompts=["hang"], max_tokens=1)
        with pytest.raises(BenchmarkError, match="no reply in time"):
            driver.receive()
        os.kill(driver.processes()[0].pid, signal.SIGKILL)  # it would sleep through the polite request to quit


def test_a_reply_can_be_polled_for(fake_spec: MakeSpec) -> None:
    with fake_spec().start() as driver:
        driver.send("load", 30.0, model="m", settings={})
        assert driver.replied(30.0)
        assert "python" in driver.receive()
        assert not driver.replied(0.0)


def test_pause_stops_every_process_and_a_turn_wakes_them(fake_spec: MakeSpec) -> None:
    with fake_spec().start() as driver:
        driver.call("load", 30.0, model="m", settings={"helper": True})
        driver.pause()
        assert len(driver.processes()) == 2
        wait_for(lambda: [p.status() for p in driver.processes()] == [psutil.STATUS_STOPPED] * 2)
        with driver.running():
            assert driver.call("generate", 30.0, prompts=["a"], max_tokens=1)["token_ids"] == [[1]]
        wait_for(lambda: [p.status() for p in driver.processes()] == [psutil.STATUS_STOPPED] * 2)


def test_close_leaves_no_process_and_may_be_repeated(fake_spec: MakeSpec) -> None:
    driver = fake_spec().start()
    driver.call("load", 30.0, model="m", settings={"helper": True})
    processes = driver.processes()
    driver.pause()
    driver.close()
    driver.close()
    assert len(processes) == 2
    assert not any(map(is_alive, processes))


def test_engines_get_their_own_thread_defaults(fake_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with fake_spec().start() as driver:
        driver.call("load", 30.0, model="m", settings={})  # so that it is past its start
        environ = driver.processes()[0].environ()
    assert "OMP_NUM_THREADS" not in environ
    assert environ["PYTHONPATH"] == str(ROOT)


def test_a_stopped_engine_does_not_outlive_a_killed_harness(fake_spec: MakeSpec) -> None:
    command = [sys.executable, "-c", PAUSING_HARNESS, *fake_spec().command]
    harness = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert harness.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in harness.stdout.readline().split()]
    assert len(processes) == 2
    harness.kill()
    harness.wait()
    harness.stdout.close()
    wait_for(lambda: not any(map(is_alive, processes)))


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        time.sleep(0.01)
