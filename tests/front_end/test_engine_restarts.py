"""An AsyncEngine whose engine dies, and is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from bounded_asyncio import WAIT_S, eventually, run
from fake_engine import SLOW, BrokenMultiproc, FragileMultiproc, expected, make_model_folder
from process_stat import children, is_alive, session_members

from ringcore import AsyncEngine, SamplingParams
from ringcore.errors import ConfigError, EngineDeadError, ModelLoadError

OPTIONS = {"load_format": "dummy", "executor": FragileMultiproc, "max_model_len": 128, "block_size": 8}


@pytest.fixture
def folder(tmp_path):
    return make_model_folder(tmp_path)


@pytest.fixture
def holds(folder):
    """A file: while it is there no engine of this folder becomes ready."""
    return Path(folder) / "holds"


async def last_of(stream):
    return [output async for output in stream][-1]


async def generate(engine, prompt, num_tokens=8):
    output = await last_of(engine.generate(prompt, SamplingParams(max_tokens=num_tokens)))
    return output.outputs[0].token_ids


async def kill(engine):
    """Kills the engine; returns the pids that it had once its death is known."""
    pids = list(engine.ready.pids.values())
    os.kill(pids[0], signal.SIGKILL)
    await eventually(lambda: engine.is_starting)
    return pids


def assert_gone(pids, num_threads):
    deadline = time.monotonic() + WAIT_S
    while any(map(is_alive, pids)) or threading.active_count() > num_threads:
        assert time.monotonic() < deadline, (list(pids), threading.enumerate())
        time.sleep(0.01)


def test_streams_have_their_error_and_what_comes_later_waits_for_the_new_engine(folder, holds):
    num_threads = threading.active_count()

    async def scenario():
        async with AsyncEngine(folder, **OPTIONS, engine_restarts=2) as engine:
            assert await generate(engine, [1, 2, 3]) == expected([1, 2, 3], 8)
            running = engine.generate([SLOW, 4], SamplingParams(max_tokens=100))
            await anext(running)
            before = engine.stats
            assert before.num_running == 1
            holds.touch()
            old = await kill(engine)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await last_of(running)

            waiting = asyncio.ensure_future(generate(engine, [5, 6]))
            health = await engine.health()
            assert health.state == "starting"
            assert "SIGKILL" in health.restart_cause
            assert engine.get_tokenizer().encode("a", True)
            stats = engine.stats
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            assert stats.num_prefix_query_tokens == before.num_prefix_query_tokens
            assert not waiting.done()
            holds.unlink()
            assert await waiting == expected([5, 6], 8)
            assert set(engine.ready.pids.values()).isdisjoint(old)
            assert (await engine.health()).state == "ready"
            assert engine.stats.num_prefix_query_tokens > before.num_prefix_query_tokens
            assert engine.stats.num_free_blocks == engine.ready.num_blocks
            assert await engine.collective_rpc("echo", ("x",)) == ["0:x"]
            return [*old, *engine.ready.pids.values()]

    assert_gone(run(scenario()), num_threads)


def test_none_is_left(folder):
    async def scenario():
        async with AsyncEngine(folder, **OPTIONS, engine_restarts=1) as engine:
            dying = asyncio.ensure_future(engine.wait_dead())
            await kill(engine)
            assert await generate(engine, [1]) == expected([1], 8)
            assert not dying.done()
            os.kill(engine.ready.pids["engine"], signal.SIGKILL)
            error = await dying
            assert "the engine was restarted 1 times, as often as engine_restarts allows" in error.message
            assert error.details["signal"] == "SIGKILL"
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await generate(engine, [1])
            assert (await engine.health()).state == "dead"
            assert not engine.is_starting

    run(scenario())


@pytest.mark.long_form
def test_starts_that_fail_count(folder):
    num_threads = threading.active_count()

    async def scenario():
        engine = AsyncEngine(folder, **OPTIONS, engine_restarts=3)
        await engine.start()
        pids = list(engine.ready.pids.values())
        (Path(folder) / "fails").touch()
        os.kill(pids[0], signal.SIGKILL)
        error = await engine.wait_dead()
        assert "no memory left; the engine was restarted 3 times" in error.message
        for call in (engine.start, lambda: generate(engine, [1])):
            with pytest.raises(EngineDeadError, match="no memory left"):
                await call()
        assert (await engine.health()).state == "dead"
        await engine.close()
        return pids

    assert_gone(run(scenario()), num_threads)


def test_a_first_start_that_fails_is_not_repeated(folder):
    async def scenario():
        engine = AsyncEngine(folder, **(OPTIONS | {"executor": BrokenMultiproc}), engine_restarts=5)
        with pytest.raises(ModelLoadError):
            await engine.start()
        assert isinstance(await engine.wait_dead(), ModelLoadError)
        await engine.close()

    run(scenario())


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.5])
def test_a_close_during_a_restart_ends_everything(folder, holds, seconds):
    num_threads, before = threading.active_count(), children()

    async def scenario():
        engine = AsyncEngine(folder, **OPTIONS, engine_restarts=1)
        await engine.start()
        holds.touch()
        pids = await kill(engine)
        waiting = asyncio.ensure_future(generate(engine, [1]))
        await asyncio.sleep(seconds)
        await engine.close()
        with pytest.raises(EngineDeadError):
            await waiting
        assert await engine.wait_dead() is None
        with pytest.raises(EngineDeadError):
            await generate(engine, [1])
        return pids

    assert_gone(run(scenario()), num_threads)
    assert not set(filter(is_alive, children())).difference(before)


@pytest.mark.parametrize("value", [-1, 1.5, True, "2", None])
def test_engine_restarts_is_checked(folder, value):
    with pytest.raises(ConfigError, match="engine_restarts="):
        AsyncEngine(folder, **OPTIONS, engine_restarts=value)


SCRIPT = """
    import asyncio, os, signal, sys
    sys.path.insert(0, {tests!r})
    from fake_engine import FakeMultiproc
    from ringcore import AsyncEngine

    async def main():
        async with AsyncEngine({folder!r}, load_format="dummy", executor=FakeMultiproc, max_model_len=128,
                               engine_restarts=100) as engine:
            while True:
                print("ready", flush=True)
                os.kill(engine.ready.pids["engine"], signal.SIGKILL)
                while not engine.is_starting:
                    await asyncio.sleep(0.001)
                await engine.start()

    asyncio.run(main())
"""


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.1, 0.4])
def test_nothing_is_left_where_the_owner_is_killed_in_a_restart(folder, seconds):
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]), folder=folder)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    ) as owner:
        assert owner.stdout.readline() == b"ready\n"
        time.sleep(seconds)
        owner.kill()
        owner.wait()
        deadline = time.monotonic() + WAIT_S
        while left := session_members(owner.pid):
            assert time.monotonic() < deadline, left
            time.sleep(0.01)
