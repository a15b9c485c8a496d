"""Replicas of an engine without a model: who gets what, what a death costs, and what a restart loses."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from bounded_asyncio import WAIT_S, eventually, run
from fake_engine import KILLS, SLOW, FragileUniproc, expected, hurried, make_model_folder
from process_stat import is_alive
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ringcore import SamplingParams
from ringcore.errors import ConfigError, EngineDeadError, InvalidRequestError, SleepingError
from ringcore.front_end.replicas.replica_set import ReplicaSet

OPTIONS = {
    "load_format": "dummy",
    "executor": FragileUniproc,
    "max_model_len": 250,
    "block_size": 8,
    "num_blocks_override": 200,
    "enable_sleep_mode": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def replica_set(folder, size=2, **options) -> ReplicaSet:
    return ReplicaSet(folder, data_parallel_size=size, **(OPTIONS | options))


async def generate(engines, prompt, num_tokens=8, **options):
    params = SamplingParams(max_tokens=num_tokens, output_kind="final")
    return [output async for output in engines.generate(prompt, params, **options)][-1].outputs[0]


def streams_of(engines, number):
    return engines.replica(number).generations.current


def load(engines):
    return [engines.replica(number).num_unfinished for number in range(engines.num_replicas)]


def pids_of(engines):
    return [pid for i in range(engines.num_replicas) for pid in streams_of(engines, i).client.ready.pids.values()]


def kill(engines, number):
    os.kill(streams_of(engines, number).client.ready.pids["engine"], signal.SIGKILL)


async def killed(engines, number, folder) -> None:
    """Until it is known; no engine becomes ready before."""
    (holds := Path(folder, "holds")).touch()
    kill(engines, number)
    await eventually(lambda: not engines.replica(number).is_open)
    holds.unlink()


def read(engines):
    families = text_string_to_metric_families(generate_latest(engines.metrics("m")).decode())
    names = [(family.name, sample) for family in families for sample in family.samples]
    assert len({name for name, _ in names}) == len(list(dict.fromkeys(name for name, _ in names)))
    return {
        (one.name, one.labels.get("engine"), one.labels.get("finished_reason")): one.value
        for _, one in names
        if "le" not in one.labels
    }


async def ended(task) -> bool:
    """Whether it has a result."""
    await asyncio.wait([task])
    return task.exception() is None


NUM_SLOW = 120


def spread(engines):
    """A slow request on each of two replicas."""
    return [asyncio.ensure_future(generate(engines, [SLOW, i], NUM_SLOW)) for i in range(2)]


async def ended_well(tasks, folder, weights=0) -> bool:
    """Whether the tokens of `spread` are right, which it does not wait for."""
    with hurried(folder):
        results = await asyncio.gather(*tasks)
    return [one.token_ids for one in results] == [expected([SLOW, i], NUM_SLOW, weights) for i in range(2)]


def test_one_interface(folder):
    """Requests of every replica, the calls of all and of one, their metrics, and the end of everything."""
    num_threads = threading.active_count()

    async def scenario():
        async with replica_set(folder) as engines:
            read(engines)  # counts begin with the first look
            running = spread(engines)
            await eventually(lambda: load(engines) == [1, 1])
            assert engines.num_unfinished == 2
            named = [asyncio.ensure_future(generate(engines, [SLOW, 9], 200, request_id="one")) for _ in range(2)]
            with pytest.raises(InvalidRequestError, match="in use"):
                await asyncio.gather(*named)
            await engines.abort("one")
            assert "abort" in [one.result().finish_reason for one in named if await ended(one)]
            assert await ended_well(running, folder)
            assert (await generate(engines, "a text")).token_ids == expected(list(b"a text"), 8)

            assert await engines.collective_rpc("echo", ("x",)) == ["0:x", "0:x"]
            assert await engines.collective_rpc("echo", ("x",), unique_reply_rank=0) == ["0:x", "0:x"]
            assert await engines.replica(1).collective_rpc("echo", ("y",)) == ["0:y"]
            with pytest.raises(InvalidRequestError, match="replica=2: give a number from 0 to 1"):
                engines.replica(2)
            with pytest.raises(InvalidRequestError, match="replica 0: "):
                await engines.collective_rpc("no_such_method")

            health = await engines.health()
            assert (health.state, len(health.ranks)) == ("ready", 2)
            samples = read(engines)
            success = [samples["vllm:request_success_total", str(i), "length"] for i in range(2)]
            assert min(success) >= 1
            assert sum(success) == 3  # the others were aborted or refused
            assert samples["ringcore:num_tokenizer_jobs", None, None] == 0
            pids = pids_of(engines)
        with pytest.raises(EngineDeadError, match="was closed"):
            await generate(engines, [1])
        assert await engines.wait_dead() is None
        return pids

    pids = run(scenario())
    deadline = time.monotonic() + WAIT_S
    while any(map(is_alive, pids)) or threading.active_count() > num_threads:  # a thread ends after its call
        assert time.monotonic() < deadline, (pids, threading.enumerate())
        time.sleep(0.01)


def test_a_death(folder):
    """What had sent nothing is computed by the other replica, what had begun raises; the other serves meanwhile, and
    the dead one is replaced."""

    async def scenario():
        async with replica_set(folder) as engines:
            final = spread(engines)
            await eventually(lambda: load(engines) == [1, 1])
            begun = engines.generate([SLOW, 7], SamplingParams(max_tokens=100, output_kind="delta"))
            await anext(begun)
            dying = next(
                i for i in range(2) if begun._stream._stream.state.request_id in streams_of(engines, i).unfinished_ids
            )
            Path(folder, "holds").touch()
            kill(engines, dying)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                async for _ in begun:
                    pass
            assert not final[0].done()
            assert not final[1].done()
            await eventually(lambda: load(engines)[1 - dying] == 2)
            assert [one.state for one in await engines.replica_healths()][dying] == "starting"
            assert (await engines.health()).state == "ready"
            assert not engines.is_starting
            assert (await generate(engines, [1])).token_ids == expected([1], 8)
            assert await ended_well(final, folder)
            assert not engines.replica(dying).is_open
            Path(folder, "holds").unlink()
            await engines.replica(dying).wait_open()
            running = spread(engines)
            await eventually(lambda: load(engines) == [1, 1])
            assert await ended_well(running, folder)

    run(scenario())


def test_a_request_that_kills_replicas(folder):
    """It is tried by three, and then raises; what comes later waits for a replica, and all can be lost."""

    async def scenario():
        async with replica_set(folder, engine_restarts=2) as engines:
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await generate(engines, [KILLS, 1])
            restarts = [engines.replica(i).generations.num_restarts for i in range(2)]
            assert sum(restarts) == 3
            assert (await generate(engines, [1])).token_ids == expected([1], 8)
            while not engines._ends.died.done():
                with pytest.raises(EngineDeadError):
                    await generate(engines, [KILLS, 1])
            error = await engines.wait_dead()
            assert "as often as engine_restarts allows" in error.message
            assert (await engines.health()).state == "dead"
            with pytest.raises(EngineDeadError):
                await engines.restart()

    run(scenario())


def test_a_restart_under_load_loses_nothing(folder):
    """One replica after the other; requests that run are finished, later ones go to the other replica."""

    async def scenario():
        async with replica_set(folder, engine_restarts=1) as engines:
            before, answers, is_over = pids_of(engines), [], False

            async def ask(number):
                while not is_over:
                    prompt = [number, len(answers) % 200, SLOW][: 3 if len(answers) % 5 == 0 else 2]
                    answers.append(((await generate(engines, prompt)).token_ids, expected(prompt, 8)))

            asking = [asyncio.ensure_future(ask(number)) for number in range(6)]
            restarting = asyncio.ensure_future(engines.restart())
            await asyncio.sleep(0)
            with pytest.raises(InvalidRequestError, match="another one is in progress"):
                await engines.restart(1)
            while not restarting.done():
                assert sum(engines.replica(i).is_open for i in range(2)) >= 1
                assert not engines.is_starting
                await asyncio.sleep(0.01)
            await restarting
            num_meanwhile, is_over = len(answers), True
            await asyncio.gather(*asking)
            assert num_meanwhile >= 6  # more than ran when it began
            assert all(got == wanted for got, wanted in answers)
            assert set(pids_of(engines)).isdisjoint(before)
            assert [engines.replica(i).generations.num_restarts for i in range(2)] == [0, 0]

            # A replica that was lost comes back.
            for _ in range(2):
                await killed(engines, 0, folder)
                with suppress(EngineDeadError):
                    await engines.replica(0).wait_open()
            assert engines._ends.has(0)
            assert await engines.collective_rpc("echo", ("x",)) == ["0:x"]
            assert (await engines.health()).state == "ready"
            await engines.restart(0)
            assert await engines.collective_rpc("echo", ("x",)) == ["0:x", "0:x"]

    run(scenario())


def test_a_replica_that_does_not_serve_gets_nothing(folder):
    """One that sleeps; and one with older weights, as after its death."""

    async def scenario():
        async with replica_set(folder) as engines:
            await engines.replica(0).sleep(level=1)
            assert not await engines.is_sleeping()
            assert [(await generate(engines, [i])).token_ids for i in range(4)] == [expected([i], 8) for i in range(4)]
            await engines.replica(1).sleep(level=1)
            assert (await engines.health()).state == "sleeping"
            with pytest.raises(SleepingError):
                await generate(engines, [1])
            report = await engines.wake_up()
            assert (set(report.states.values()), len(report.ranks)) == ({"resident"}, 2)

            await engines.pause()
            waiting = spread(engines)
            await eventually(lambda: load(engines) == [1, 1])
            assert (await engines.health()).paused == "new"
            await engines.resume()
            assert await ended_well(waiting, folder)

            await engines.reload_weights(str(Path(folder, "5")))
            await killed(engines, 0, folder)
            await engines.replica(0).wait_open()
            for i in range(4):
                assert (await generate(engines, [i])).token_ids == expected([i], 8, weights=5)
            await engines.replica(0).reload_weights(str(Path(folder, "5")))
            waiting = spread(engines)
            await eventually(lambda: load(engines) == [1, 1])
            assert await ended_well(waiting, folder, weights=5)

    run(scenario())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size=0: give an integer of at least 1"),
        ({"data_parallel_size": True}, "data_parallel_size=True"),
        ({"data_parallel_size": 2, "routing": "random"}, "routing='random': give one of round-robin"),
        ({"data_parallel_size": 2, "engine_restarts": -1}, "engine_restarts=-1"),
    ],
)
def test_options_are_checked(folder, options, says):
    with pytest.raises(ConfigError, match=says):
        ReplicaSet(folder, **OPTIONS, **options)
