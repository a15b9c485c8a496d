"""The front end of a scenario: a process of its own, that serves until it is told or killed.

Reads scenarios from stdin, a line of JSON each, and answers each with one line on stdout: what every call of it came
to, and when (on the monotonic clock, which all processes share).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import chaos_engine
import chaos_plan
from chaos_engine import WAIT_S, TokenReader, check, check_serves, describe, make_config, make_request
from chaos_worker import LARGE_BYTES

from ringcore.errors import RingcoreError, WorkerDiedError
from ringcore.executor.ring_memory import unnamed_file
from ringcore.executor.stack_thread import arm_stack_dumps
from ringcore.front_end.client import EngineCoreClient

PROMPT = [1, 2, 3]


class Report:
    """What the calls of one scenario came to."""

    def __init__(self) -> None:
        self.ends: list[dict[str, Any]] = []
        self.wrong: list[str] = []

    @contextlib.contextmanager
    def ending(self, name: str):
        """Notes how the block ends, which may not end by itself but for an error of ours."""
        try:
            yield
        except RingcoreError as error:
            self.ends.append({"call": name, "at": time.monotonic(), **describe(error)})
        except BaseException as error:
            self.wrong.append(f"{name}: {type(error).__name__}: {error}")
        else:
            self.ends.append({"call": name, "at": time.monotonic(), "type": None})


def workload(client: EngineCoreClient, seed: int, is_stopped: Callable[[], bool]) -> dict[str, Callable[[], None]]:
    """What the threads of a scenario do again and again, each until its error or the end of the scenario."""
    rng = random.Random(seed)

    def tokens() -> None:
        reader = TokenReader(client, "t", rng)
        while not is_stopped():
            reader.add()
            while not reader.is_done:
                reader.take()

    def calls() -> None:
        while not is_stopped():
            value = rng.randbytes(rng.randint(0, 3000))
            check(client.collective_rpc("echo", [value]) == [[0, value], [1, value]], "echo")
            check([s["rank"] for s in client.collective_rpc("stats")] == [0, 1], "stats")

    def large_calls() -> None:
        value = os.urandom(LARGE_BYTES)
        while not is_stopped():
            check(client.collective_rpc("echo", [value]) == [[0, value], [1, value]], "large echo")
            time.sleep(0.002)

    return {"get_outputs": tokens, "collective_rpc": calls, "large collective_rpc": large_calls}


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    report = Report()
    plan = chaos_plan.Plan(**scenario["plan"] | {"stop": chaos_plan.Stop(**scenario["plan"]["stop"])})
    os.environ[chaos_plan.VARIABLE] = plan.to_environment()
    undo = chaos_plan.enter_front_end(plan)
    client: EngineCoreClient | None = None
    try:
        with report.ending("start"):
            client = EngineCoreClient(make_config(scenario["folder"], **scenario["options"]))
        if client is not None:
            serve(client, scenario, report)
        say({"pending": report.ends, "wrong": report.wrong})
        sys.stdin.readline()  # the test has looked at what is left
        return end(client)
    finally:
        undo()
        del os.environ[chaos_plan.VARIABLE]


def serve(client: EngineCoreClient, scenario: dict[str, Any], report: Report) -> None:
    """Uses the engine in the way of the scenario, until everything that uses it has its error."""
    kind = scenario["kind"]
    is_up = False
    with report.ending("wait_ready"):
        client.wait_ready()
        is_up = True
    if not is_up:
        report.ends[:] = report.ends[1:]  # that it was started is no end
        return
    report.ends.clear()
    if kind == "idle":
        chaos_engine.idle()  # stops here, with nothing under way
    stopped = threading.Event()
    threads = []
    for name, work in workload(client, scenario["seed"], stopped.is_set).items():
        arguments = (report, name, work, kind == "recover")
        threads.append(threading.Thread(target=_run_until_error, args=arguments, name=name, daemon=True))
        threads[-1].start()
    if kind == "recover":
        time.sleep(0.1)
        os.kill(client.ready.pids["worker 1"], signal.SIGKILL)
    if kind == "close":
        time.sleep(0.1)
        with report.ending("close"):
            client.close()
    for thread in threads:
        thread.join(WAIT_S)
        if thread.is_alive():
            report.wrong.append(f"{thread.name} is pending after {WAIT_S} s")
    stopped.set()


def _run_until_error(report: Report, name: str, work: Callable[[], None], num_deaths_survived: int) -> None:
    with report.ending(name):
        for _ in range(num_deaths_survived):
            with contextlib.suppress(WorkerDiedError):
                work()
        work()


def end(client: EngineCoreClient | None) -> dict[str, Any]:
    """The later calls: each must raise at once."""
    report = Report()
    started = time.monotonic()
    if client is not None:
        for name, call in {
            "add_requests": lambda: client.add_requests([make_request("late", PROMPT)]),
            "abort": lambda: client.abort(["t0"]),
            "get_outputs": client.get_outputs,
            "collective_rpc": lambda: client.collective_rpc("echo", ["late"]),
            "call_engine": lambda: client.call_engine("stats"),
        }.items():
            with report.ending(name):
                call()
        state = client.health().state
        if state != "dead":
            report.wrong.append(f"health() says {state}")
        with report.ending("close"):
            client.close()
    return {"later": report.ends, "later_s": time.monotonic() - started, "wrong": report.wrong}


def check_engine(scenario: dict[str, Any]) -> dict[str, Any]:
    """Whether a new engine starts and serves."""
    with EngineCoreClient(make_config(scenario["folder"], **scenario["options"])) as client:
        check_serves(client)
    return {"wrong": []}


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    arm_stack_dumps(unnamed_file("stacks"))  # for `stacks_of`, as every process that it starts
    for line in sys.stdin:
        scenario = json.loads(line)
        say(check_engine(scenario) if scenario["kind"] == "check" else run(scenario))


if __name__ == "__main__":
    main()
