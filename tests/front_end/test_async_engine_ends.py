"""How an AsyncEngine ends, and what it survives: deaths, recovery, draining, and nobody closing it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from bounded_asyncio import WAIT_S, run
from fake_engine import (
    KILLS,
    KILLS_ONCE,
    SLOW,
    BrokenMultiproc,
    FakeMultiproc,
    FakeUniproc,
    FragileMultiproc,
    expected,
    hurried,
    make_model_folder,
)
from process_stat import is_alive

from ringcore import AsyncEngine, SamplingParams
from ringcore.errors import EngineDeadError, ModelLoadError
from ringcore.front_end.request_streams import RequestStreams

OPTIONS = {"load_format": "dummy", "executor": FakeMultiproc, "max_model_len": 128, "block_size": 8}


@pytest.fixture
def folder(tmp_path):
    return make_model_folder(tmp_path)


async def last_of(stream):
    return [output async for output in stream][-1]


def assert_gone(pids, num_threads):
    deadline = time.monotonic() + WAIT_S
    while any(map(is_alive, pids)) or threading.active_count() > num_threads:
        assert time.monotonic() < deadline, (list(pids), threading.enumerate())
        time.sleep(0.01)


async def started(engine, num_streams, max_tokens=100, **params):
    """Tasks that read streams which are under way."""
    params = SamplingParams(max_tokens=max_tokens, **params)
    streams = [engine.generate([7 if i else SLOW, i], params) for i in range(num_streams)]  # one is enough
    await asyncio.gather(*(anext(stream) for stream in streams))
    return [asyncio.ensure_future(last_of(stream)) for stream in streams]


def test_a_death_is_told_to_every_stream(folder):
    async def scenario():
        async with AsyncEngine(folder, **OPTIONS) as engine:
            tasks = await started(engine, 20)
            calls = [asyncio.ensure_future(engine.collective_rpc("nap", (WAIT_S,)))]
            await asyncio.sleep(0.05)
            os.kill(engine.ready.pids["engine"], signal.SIGKILL)
            results = await asyncio.gather(*tasks, *calls, return_exceptions=True)
            assert [type(result) for result in results] == [EngineDeadError] * 21
            assert results[0] is not results[1]
            assert {r.details["signal"] for r in results} == {"SIGKILL"}
            assert engine.num_unfinished == 0
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await anext(engine.generate("a"))
            assert (await engine.health()).state == "dead"

    run(scenario())


def test_a_worker_that_dies_is_not_noticed_where_it_is_replaced(folder):
    async def scenario():
        async with AsyncEngine(folder, **OPTIONS, max_worker_restarts=1) as engine:
            prompts = [[KILLS_ONCE, 1, 2], list(b"another"), [SLOW, 4]]
            params = SamplingParams(max_tokens=25, output_kind="delta")
            token_ids = {i: [] for i in range(3)}

            async def read(index):
                async for output in engine.generate(prompts[index], params):
                    token_ids[index] += output.outputs[0].token_ids

            await asyncio.gather(*map(read, range(3)))
            assert token_ids == {i: expected(prompt, 25) for i, prompt in enumerate(prompts)}
            assert (await engine.health()).num_restarts == 1

    run(scenario())


def test_a_worker_that_dies_ends_the_engine_where_it_is_not_replaced(folder):
    async def scenario():
        async with AsyncEngine(folder, **OPTIONS) as engine:
            with pytest.raises(EngineDeadError, match="worker 0"):
                await last_of(engine.generate([KILLS]))

    run(scenario())


def test_what_stops_the_start_is_raised_by_all(folder):
    says = "tensor 'x' is missing"
    num_threads = threading.active_count()

    async def scenario():
        engine = AsyncEngine(folder, **(OPTIONS | {"executor": BrokenMultiproc}))
        results = await asyncio.gather(
            engine.start(), engine.start(), anext(engine.generate("a")), return_exceptions=True
        )
        assert [type(result) for result in results] == [ModelLoadError] * 3
        assert len(set(map(id, results))) == 3
        with pytest.raises(ModelLoadError, match=says):
            await engine.start()
        with pytest.raises(ModelLoadError, match=says):
            async with engine:
                pass
        await engine.close()

    run(scenario())
    assert_gone([], num_threads)


def test_closing_aborts_what_runs(folder):
    num_threads = threading.active_count()

    async def scenario():
        async with AsyncEngine(folder, **OPTIONS) as engine:
            tasks = await started(engine, 5, n=2)
            pids = engine.ready.pids.values()
        for task in tasks:
            assert [one.finish_reason for one in (await task).outputs] == ["abort", "abort"]
        await engine.close()
        for call in (engine.generate("a").__anext__, lambda: engine.collective_rpc("echo", ("x",))):
            with pytest.raises(EngineDeadError, match="closed"):
                await call()
        assert engine.ready.max_model_len == 128
        return pids

    assert_gone(run(scenario()), num_threads)


def test_closing_drains(folder):
    async def scenario():
        engine = AsyncEngine(folder, **OPTIONS)
        tasks = await started(engine, 3, max_tokens=120)
        unread = engine.generate([SLOW, 9], SamplingParams(max_tokens=120))
        await anext(unread)
        closing = [asyncio.ensure_future(engine.close(timeout)) for timeout in (None, WAIT_S)]
        await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match="closed"):
            await anext(engine.generate("too late"))
        assert engine.num_unfinished == 4
        with hurried(folder):
            await asyncio.gather(*closing)
        assert [o.outputs[0].finish_reason for o in await asyncio.gather(*tasks)] == ["length"] * 3
        assert (await last_of(unread)).outputs[0].token_ids == expected([SLOW, 9], 120)

    run(scenario())


def test_draining_has_an_end(folder):
    async def scenario():
        engine = AsyncEngine(folder, **OPTIONS)
        (task,) = await started(engine, 1)
        began = time.monotonic()
        patient = asyncio.ensure_future(engine.close(None))
        await engine.close(0.2)
        assert time.monotonic() - began > 0.15
        await patient
        output = (await task).outputs[0]
        assert output.finish_reason == "abort"
        assert 0 < len(output.token_ids) < 100

    run(scenario())


def test_closing_while_it_starts(folder):
    num_threads = threading.active_count()

    async def scenario():
        Path(folder, "holds").touch()
        engine = AsyncEngine(folder, **(OPTIONS | {"executor": FragileMultiproc}))
        starting = asyncio.ensure_future(engine.start())
        await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await starting

    run(scenario())
    assert_gone([], num_threads)


def test_a_start_that_is_cancelled_leaves_nothing(folder):
    num_threads = threading.active_count()

    async def use():
        async with AsyncEngine(folder, **OPTIONS):
            await asyncio.sleep(WAIT_S)  # it is cancelled before, or here where the machine is slow to do it

    async def scenario():
        task = asyncio.ensure_future(use())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario())
    assert_gone([], num_threads)


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("where", ["here", "in a thread", "in its own thread"])
def test_dropping_it_ends_the_engine(folder, is_busy, where, monkeypatch):
    num_threads, num_fds = threading.active_count(), len(os.listdir("/proc/self/fd"))

    async def scenario():
        engine = AsyncEngine(folder, **OPTIONS)
        await engine.start()
        if is_busy:
            engine.stream = engine.generate([SLOW], SamplingParams(max_tokens=100))
            await anext(engine.stream)
            if where == "in its own thread":  # nothing but the collector, in the receiver, ends it
                monkeypatch.setattr(RequestStreams, "_wake", lambda self, streams: gc.collect())
        engine.itself = engine
        return engine.ready.pids.values()

    if where == "in a thread":
        pids = []
        thread = threading.Thread(target=lambda: (pids.extend(run(scenario())), gc.collect()))
        thread.start()
        thread.join(WAIT_S)
    else:
        gc.disable()
        pids = run(scenario())
        if where == "here" or not is_busy:
            gc.collect()
        gc.enable()
    assert_gone(pids, num_threads)
    assert len(os.listdir("/proc/self/fd")) <= num_fds


def test_a_failure_of_our_own_in_the_receiver_is_told_too(folder, monkeypatch, caplog):
    async def scenario():
        async with AsyncEngine(folder, **OPTIONS) as engine:
            (task,) = await started(engine, 1)

            def fail(self, front_end):
                raise ZeroDivisionError("ours")

            monkeypatch.setattr(RequestStreams, "_receive", fail)
            with pytest.raises(EngineDeadError, match="front end failed: ZeroDivisionError"):
                await task
            with pytest.raises(EngineDeadError, match="front end failed"):
                await anext(engine.generate("a"))

    run(scenario())
    assert "receives from the engine failed" in caplog.text


def test_in_the_engines_own_process_alone(folder):
    async def scenario():
        async with AsyncEngine(folder, **(OPTIONS | {"executor": FakeUniproc})) as engine:
            output = await last_of(engine.generate([1, 2], SamplingParams(max_tokens=9)))
            assert output.outputs[0].token_ids == expected([1, 2], 9)

    run(scenario())


SCRIPT = """
    import asyncio, sys
    sys.path.insert(0, {tests!r})
    from fake_engine import SLOW, FakeMultiproc
    from ringcore import AsyncEngine, SamplingParams

    kept = []
    async def main():
        engine = AsyncEngine({folder!r}, load_format="dummy", executor=FakeMultiproc, max_model_len=128)
        kept.append(engine)
        await engine.start()
        print(*engine.ready.pids.values(), flush=True)
        stream = engine.generate([SLOW], SamplingParams(max_tokens=100))
        await anext(stream)
        call = asyncio.ensure_future(engine.collective_rpc("nap", (0.2,)))
        await asyncio.sleep(0.05)
        {end}

    asyncio.run(main())
"""


@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os._exit(4)", 4)])
def test_a_script_that_ends_without_closing(folder, end, code):
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]), folder=folder, end=end)
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=Path(__file__).parents[2],
    )
    assert (ran.returncode, ran.stderr) == (code, "")
    pids = ran.stdout.split()
    assert len(pids) == 2
    assert_gone(pids, threading.active_count())
