"""The grammar compiler process: its results, and all the ways in which it ends; alone, and within an engine."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path

import pytest
from fake_engine import FakeMultiproc, expected, make_model_folder
from process_stat import is_alive, stat_fields

from ringcore import EngineConfig, SamplingParams
from ringcore.engine_core.grammar_compiler import GrammarCompiler
from ringcore.errors import InvalidRequestError, RingcoreError
from ringcore.front_end.client import EngineCoreClient
from ringcore.params.structured_outputs import StructuredOutputsParams
from ringcore.protocol.requests import EngineCoreRequest

pytest.importorskip("llguidance")

WAIT_S = 60.0
TICK_S = 0.01
GOOD = StructuredOutputsParams(regex="[a-z]+")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def make_config(folder, **options):
    options = {"structured_outputs_timeout_s": WAIT_S, "max_model_len": 128, "block_size": 8} | options
    return EngineConfig.from_options(model=folder, load_format="dummy", executor=FakeMultiproc, **options)


@pytest.fixture
def compiler(folder):
    made = GrammarCompiler(make_config(folder))
    yield made
    made.close()
    assert made.pid is None
    assert made.fds == []


def result_of(compiler):
    """Waits for it, as the engine's loop does."""
    deadline = time.monotonic() + WAIT_S
    while (found := compiler.poll()) is None:
        assert time.monotonic() < deadline, "no result"
        select.select(compiler.fds, [], [], TICK_S)
    return found.error


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(TICK_S)
    return found


def stop(pid: int) -> None:
    """Returns when it has stopped: on a busy machine it may yet answer what is sent just after the signal."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: stat_fields(pid)[0] == "T")


def ready(compiler) -> int:
    """The pid of a process that has compiled a grammar."""
    compiler.compile(GOOD)
    assert result_of(compiler) is None
    return compiler.pid


def test_verdicts_in_turn_by_one_process(compiler):
    assert compiler.pid is None  # who never asks has no process
    pid = ready(compiler)
    assert not compiler.is_busy
    assert compiler.fds == []
    compiler.compile(StructuredOutputsParams(regex="(a"))
    error = result_of(compiler)
    assert isinstance(error, InvalidRequestError)
    assert error.details["field"] == "structured_outputs.regex"
    compiler.compile(StructuredOutputsParams(json={"enum": ["é🙂" * 8000]}))  # more than a socket takes at once
    assert result_of(compiler) is None
    compiler.compile(StructuredOutputsParams(choice=["é", "\u2028\x00"]))
    result_of(compiler)
    assert compiler.pid == pid


def test_the_process_is_bounded_and_knows_no_torch(compiler):
    pid = ready(compiler)
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    (space,) = [line.split() for line in limits if line.startswith("Max address space")]
    assert int(space[3]) < 8 << 30
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


def test_a_grammar_that_takes_too_long_costs_the_process_and_nobody_else(compiler, monkeypatch):
    pid = ready(compiler)
    stop(pid)  # as good as a grammar that takes for ever
    compiler.compile(GOOD)
    assert compiler.poll() is None
    monkeypatch.setattr(compiler, "_deadline", 0.0)
    error = result_of(compiler)
    assert isinstance(error, InvalidRequestError)
    assert "took longer than 60 s" in error.message
    assert ready(compiler) != pid
    until(lambda: not is_alive(pid))


def test_a_grammar_of_which_compiling_takes_long_is_refused_in_time(folder):
    compiler = GrammarCompiler(make_config(folder, structured_outputs_timeout_s=0.05))
    try:
        compiler.compile(StructuredOutputsParams(grammar="root ::= " + " ".join(["[a-z]{1,9999}"] * 4000)))
        assert "structured_outputs_timeout_s" in result_of(compiler).message
    finally:
        compiler.close()


# The stacks are written at a SIGSEGV, while other threads go on and may answer: these end the process at once.
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSYS])
def test_a_crash_is_the_error_of_the_grammar_at_work(compiler, number):
    pid = ready(compiler)
    stop(pid)
    compiler.compile(GOOD)
    os.kill(pid, number)
    os.kill(pid, signal.SIGCONT)
    error = result_of(compiler)
    assert isinstance(error, InvalidRequestError)
    assert signal.Signals(number).name in error.message
    assert ready(compiler) != pid


def test_a_death_between_two_grammars_is_nobodys_error(compiler):
    pid = ready(compiler)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not compiler._process.child.is_alive())
    assert ready(compiler) != pid


def test_a_start_that_fails_says_why(folder, tmp_path, compiler):
    config = make_config(folder, tokenizer=str(tmp_path))
    broken = GrammarCompiler(config)
    broken.compile(GOOD)
    error = result_of(broken)
    assert isinstance(error, RingcoreError)
    assert str(tmp_path) in error.message
    broken.close()
    compiler.compile(GOOD)
    os.kill(compiler.pid, signal.SIGKILL)
    assert "did not start" in result_of(compiler).message


def test_cancelled(compiler):
    pid = ready(compiler)
    stop(pid)
    compiler.compile(GOOD)
    compiler.cancel()
    assert not compiler.is_busy
    until(lambda: compiler.poll() is None and not compiler.has_unreaped)
    assert not Path(f"/proc/{pid}").exists()
    ready(compiler)


def test_closed_while_it_compiles_and_while_it_starts(folder):
    for is_ready in (True, False):
        before = set(os.listdir("/proc/self/fd"))
        threads = set(threading.enumerate())
        compiler = GrammarCompiler(make_config(folder))
        if is_ready:
            stop(ready(compiler))
        compiler.compile(GOOD)
        pid = compiler.pid
        compiler.close()
        compiler.close()
        assert not is_alive(pid)
        assert set(os.listdir("/proc/self/fd")) == before
        assert set(threading.enumerate()) == threads


# ---------------------------------------------------------------------------------------------------------------
# Within an engine.


def request(request_id, spec=None, prompt=(5, 6)):
    params = SamplingParams(max_tokens=4, structured_outputs=spec)
    return EngineCoreRequest(request_id, list(prompt), params, arrival_s=time.monotonic())


def collect(client, *request_ids):
    """The last outputs of these requests and the tokens of each."""
    tokens, last = {request_id: [] for request_id in request_ids}, {}
    deadline = time.monotonic() + WAIT_S
    while last.keys() != set(request_ids):
        assert time.monotonic() < deadline, f"no end of {set(request_ids) - last.keys()}"
        for output in client.get_outputs(timeout=1).outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                last[output.request_id] = output
    return tokens, last


def children(pid: int) -> dict[str, int]:
    """Its child processes by name."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            found[Path(f"/proc/{child}/comm").read_text().strip()] = int(child)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def compiler_pid(client) -> int:
    return until(lambda: children(client.ready.pids["engine"]).get("ringcore gramma"))


@pytest.fixture
def client(folder):
    with EngineCoreClient(make_config(folder, tensor_parallel_size=2)) as one:
        yield one


def test_the_engine_serves_by_grammars_and_refuses_wrong_ones(client):
    client.add_requests([request("a", GOOD), request("b", StructuredOutputsParams(regex="(a")), request("c")])
    tokens, last = collect(client, "a", "b", "c")
    assert tokens["a"] == tokens["c"] == expected([5, 6], 4)
    assert last["b"].error.type == "InvalidRequestError"
    assert "a ( without its )" in last["b"].error.message
    assert client.health().state == "ready"


def test_a_grammar_at_work_is_in_nobodys_way(client):
    client.add_requests([request("a", GOOD)])
    collect(client, "a")
    pid = compiler_pid(client)
    stop(pid)
    client.add_requests([request("held", StructuredOutputsParams(regex="b"))])
    client.add_requests([request("known", GOOD), request("plain")])
    tokens, _ = collect(client, "known", "plain")
    assert tokens["known"] == tokens["plain"] == expected([5, 6], 4)
    assert client.call_engine("stats")["num_waiting"] == 1
    assert client.collective_rpc("stats", timeout=WAIT_S)
    os.kill(pid, signal.SIGKILL)
    client.add_requests([request("next", StructuredOutputsParams(regex="c"))])
    tokens, last = collect(client, "held", "next")
    assert "SIGKILL" in last["held"].error.message
    assert tokens["next"] == expected([5, 6], 4)
    assert compiler_pid(client) != pid


def test_an_abort_while_it_is_compiled(client):
    client.add_requests([request("a", GOOD)])
    collect(client, "a")
    pid = compiler_pid(client)
    stop(pid)
    client.add_requests([request("held", StructuredOutputsParams(regex="b"))])
    client.abort(["held"])
    _, last = collect(client, "held")
    assert last["held"].finish_reason == "abort"
    with contextlib.suppress(ProcessLookupError):  # the abort may have come before it was the compiler's turn
        os.kill(pid, signal.SIGCONT)
    client.add_requests([request("b", StructuredOutputsParams(regex="c"))])
    tokens, _ = collect(client, "b")
    assert tokens["b"] == expected([5, 6], 4)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_no_process_is_left_by_an_engine_that_ends_while_compiling(folder, end):
    client = EngineCoreClient(make_config(folder))
    try:
        client.add_requests([request("a", GOOD)])
        collect(client, "a")
        pid, engine = compiler_pid(client), client.ready.pids["engine"]
        if end == "close":
            stop(pid)
        client.add_requests([request("held", StructuredOutputsParams(regex="b"))])
        if end == "kill":
            os.kill(engine, signal.SIGKILL)
        else:
            client.close()
        until(lambda: not is_alive(pid) and not is_alive(engine))
    finally:
        client.close()
