"""A process that is forked from an engine's owner: its calls raise at once, and the owner's engine goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
from fake_engine import make_model_folder

from ringcore.config.admin_keys import create_keys

TESTS = Path(__file__).parents[1]
BOUND_S = 60.0

# `uses` are calls that the owner makes before and after, and that the child tries; `ends` are for the child alone.
PREAMBLE = """
    import asyncio, gc, json, os, sys
    sys.path.insert(0, {tests!r})
    from fake_engine import SLOW, FakeMultiproc, FakeUniproc, hurried
    from ringcore import LLM, AdminClient, AsyncEngine, EngineConfig, SamplingParams
    from ringcore.front_end.client import EngineCoreClient
    from ringcore.engine_core.core import EngineCore
    from ringcore.errors import RingcoreError

    FOLDER, KEYS = {folder!r}, {keys!r}
    OPTIONS = dict(load_format="dummy", executor=FakeMultiproc, max_model_len=128, block_size=8)
    PARAMS = SamplingParams(max_tokens=4)

    def fork(tries, leave):
        "What the child's calls raised, and how it ended."
        read, write = os.pipe()
        child = os.fork()
        if child:
            os.close(write)
            with open(read) as told:
                text = told.read()
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            return json.loads(text), code
        told = []
        for name, call in tries.items():
            try:
                call()
            except RingcoreError as error:
                told.append([name, type(error).__name__, error.message, error.details["owner_pid"] == os.getppid()])
            else:
                told.append([name, None, "", True])
        with open(write, "w") as out:
            json.dump(told, out)
        leave()
        sys.exit(7)  # with its finalizers

    def say(told, code, works):
        print(json.dumps([told, code, works]))
"""

LLM_SCRIPT = """
    llm = LLM(FOLDER, **OPTIONS)
    begun = llm.stream([[SLOW, 1]], SamplingParams(max_tokens=120), by="token")
    next(begun)
    client = llm._client
    tries = {
        "stream of before": lambda: next(begun),
        "generate": lambda: llm.generate([[1]], PARAMS, use_tqdm=False),
        "stream": lambda: llm.stream([[1]], PARAMS),
        "chat": lambda: llm.chat([{"role": "user", "content": "a"}], PARAMS, use_tqdm=False),
        "rpc": lambda: llm.collective_rpc("echo", ("x",)),
        "sleep": lambda: llm.sleep(0),
        "health": llm.health,
        "ready": lambda: llm.ready,
        "outputs": client.get_outputs,
        "add": lambda: client.add_requests([]) or client.abort(["a"]),
    }
    def leave():
        global llm, client, begun, tries
        llm.close()
        with llm:
            pass
        llm = client = begun = tries = None
        gc.collect()
    told = fork(tries, leave)
    with hurried(FOLDER):
        rest = [one.finished for one in begun]
    works = len(llm.generate([[1, 2]], PARAMS, use_tqdm=False)[0].outputs[0].token_ids)
    say(*told, [rest[-1], works, llm.collective_rpc("echo", ("x",))])
"""

CORE_SCRIPT = """
    core = EngineCore(EngineConfig.from_options(model=FOLDER, **(OPTIONS | {"executor": {executor}})))
    future = core.submit_rpc("echo", ("before",))
    tries = {
        "future": future.result,
        "rpc": lambda: core.collective_rpc("echo", ("x",)),
        "step": core.step,
        "abort": lambda: core.abort(["a"]),
        "pause": core.pause,
        "sleep": lambda: core.sleep(0),
    }
    if {executor} is FakeUniproc:
        del tries["future"]  # it is done
    def leave():
        global core, future, tries
        core.shutdown()
        core = future = tries = None
        gc.collect()
    told = fork(tries, leave)
    say(*told, [future.result(), core.collective_rpc("echo", ("x",))])
"""

ASYNC_SCRIPT = """
    import atexit
    loop = asyncio.new_event_loop()
    run = loop.run_until_complete
    engine = AsyncEngine(FOLDER, **OPTIONS)
    stream = engine.generate([SLOW, 1], SamplingParams(max_tokens=120))
    run(anext(stream))

    async def last_of(stream):
        return [one async for one in stream][-1].outputs[0].token_ids

    def trying(coroutine):
        return lambda: asyncio.new_event_loop().run_until_complete(coroutine())

    tries = {
        "stream of before": trying(lambda: last_of(stream)),
        "generate": trying(lambda: last_of(engine.generate([1], PARAMS))),
        "start": trying(engine.start),
        "rpc": trying(lambda: engine.collective_rpc("echo", ("x",))),
        "sleep": trying(lambda: engine.sleep(0)),
        "health": trying(engine.health),
        "abort": trying(lambda: engine.abort("a")),
        "wait_dead": trying(engine.wait_dead),
        "ready": lambda: engine.ready,
    }
    def leave():
        "Without the end of the owner's event loop, which would take descriptors out of the epoll that both share."
        global engine, stream, tries
        trying(engine.close)()
        engine = stream = tries = None
        gc.collect()
        atexit._run_exitfuncs()
        os._exit(7)
    told = fork(tries, leave)
    with hurried(FOLDER):
        works = [len(run(last_of(stream)))]
    works.append(len(run(last_of(engine.generate([1], PARAMS)))))
    say(*told, [*works, run(engine.collective_rpc("echo", ("x",)))])
    run(engine.close())
"""

ADMIN_SCRIPT = """
    llm = LLM(FOLDER, **OPTIONS, admin_endpoint="tcp://127.0.0.1:0", admin_keys=KEYS)
    admin = AdminClient(llm.ready.admin_endpoint, KEYS)
    tries = {
        "rpc": lambda: admin.collective_rpc("echo", ("x",)),
        "health": admin.health,
        "stats": admin.stats,
    }
    def leave():
        global admin, tries
        admin.close()
        admin = tries = None
        gc.collect()
    told = fork(tries, leave)
    say(*told, [admin.collective_rpc("echo", ("x",)), admin.health().state])
"""


def run(script: str, folder: str, keys: str = "") -> tuple[list, int, list]:
    code = textwrap.dedent(PREAMBLE.format(tests=str(TESTS), folder=folder, keys=keys)) + textwrap.dedent(script)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=TESTS.parent,
        start_new_session=True,
    ) as script:
        try:
            out, err = script.communicate(timeout=BOUND_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)  # its child too, where that hangs
    assert script.returncode == 0, err
    told, exit_code, works = json.loads(out)
    return told, exit_code, works


def assert_refused(told: list, exit_code: int) -> None:
    assert told
    for name, kind, message, is_owner in told:
        assert kind == "RingcoreError", (name, kind, message)
        assert "forked" in message, name
        assert is_owner, name
    assert exit_code == 7


@pytest.fixture
def folder(tmp_path):
    return make_model_folder(tmp_path)


def test_an_llm(folder):
    told, code, works = run(LLM_SCRIPT, folder)
    assert_refused(told, code)
    assert works == [True, 4, ["0:x"]]


@pytest.mark.parametrize("executor", ["FakeMultiproc", "FakeUniproc"])
def test_an_engine_core(folder, executor):
    told, code, works = run(CORE_SCRIPT.replace("{executor}", executor), folder)
    assert_refused(told, code)
    assert works == [["0:before"], ["0:x"]]


def test_an_async_engine(folder):
    told, code, works = run(ASYNC_SCRIPT, folder)
    assert_refused(told, code)
    assert works == [120, 4, ["0:x"]]


def test_an_admin_client(folder, tmp_path):
    keys = tmp_path / "keys"
    create_keys(keys)
    told, code, works = run(ADMIN_SCRIPT, folder, str(keys))
    assert_refused(told, code)
    assert works == [["0:x"], "ready"]


def test_a_child_of_multiprocessing(folder):
    """It ends with os._exit, after finalizers of its own."""
    told, code, works = run(
        """
    import multiprocessing
    llm = LLM(FOLDER, **OPTIONS)
    def use(queue):
        try:
            llm.generate([[1]], PARAMS, use_tqdm=False)
        except RingcoreError as error:
            queue.put(["generate", type(error).__name__, error.message, error.details["owner_pid"] == os.getppid()])
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=use, args=(queue,))
    child.start()
    told = queue.get()
    child.join()
    say([told], 7 + child.exitcode, len(llm.generate([[1]], PARAMS, use_tqdm=False)))
        """,
        folder,
    )
    assert_refused(told, code)
    assert works == 1
