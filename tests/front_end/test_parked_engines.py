"""Engines that are started ahead and adopted: by whom, once, and what is left after any end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from admin_peers import WAIT_S, wait_until
from fake_engine import expected, make_model_folder
from process_stat import is_alive
from typer.testing import CliRunner

from ringcore import EngineConfig, ParkedEngines, SamplingParams
from ringcore.cli.app import make_app
from ringcore.errors import ConfigError, EngineDeadError, InvalidRequestError
from ringcore.front_end.client import EngineCoreClient
from ringcore.front_end.client_start import start_client
from ringcore.front_end.doctor.host_checks import check_parked
from ringcore.front_end.engine_survey import survey
from ringcore.front_end.local_engines import local_engines
from ringcore.front_end.parking import parked_engines
from ringcore.front_end.parking.adoption import adopt_parked
from ringcore.front_end.parking.key import differences, parked_key
from ringcore.front_end.parking.park_socket import connect_to_park, find_parks
from ringcore.protocol.parking import TAKE
from ringcore.protocol.requests import EngineCoreRequest

TESTS = Path(__file__).parents[1]
OPTIONS = {"executor": "fake_engine:FakeUniproc", "load_format": "dummy", "max_model_len": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    (folder := tmp_path_factory.mktemp("models") / f"parked-{os.getpid()}").mkdir()
    return make_model_folder(folder)


@pytest.fixture(scope="module", autouse=True)
def short_pauses():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parked_engines, "_FIRST_PAUSE_S", 0.01)
        yield


@pytest.fixture(scope="module")
def pool(folder):
    """One engine at a time, which sleeps."""
    with ParkedEngines(folder, **OPTIONS, enable_sleep_mode=True) as pool:
        yield pool


@pytest.fixture
def parked(pool):
    """The processes of the pool's engine."""
    pool.wait(WAIT_S)
    return pool._offer().pids[0]


def wanted(pool, **options) -> EngineConfig:
    given = OPTIONS | {"enable_sleep_mode": True, "start_from": "parked_only"} | options
    return EngineConfig.from_options(model=pool.config.model.model, **given)


def tokens(client, prompt) -> list[int]:
    params = SamplingParams(max_tokens=4)
    client.add_requests([EngineCoreRequest("a", prompt, params, arrival_s=time.monotonic())])
    found = []
    while not found or not found[-1].finish_reason:
        found += client.get_outputs(timeout=WAIT_S).outputs
    return [token for output in found for token in output.new_token_ids]


def are_gone(pids) -> bool:
    deadline = time.monotonic() + WAIT_S
    while any(map(is_alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# ---------------------------------------------------------------------------------------------------------------
# Adoption.


def test_of_two_that_ask_at_once_one_adopts_it_and_the_next_is_parked(pool, parked):
    found, start = [], threading.Barrier(2)

    def ask():
        start.wait()
        try:
            found.append(start_client(wanted(pool)))
        except ConfigError as error:
            found.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused, adopted = sorted(found, key=lambda one: isinstance(one, EngineCoreClient))
    assert str(refused).endswith(f"process {os.getpid()}: it has none that has started")
    with adopted as client:
        ready = client.wait_ready()
        assert ready.pids == parked
        assert list(ready.phase_seconds) == ["adopt_parked"]
        assert not client.is_sleeping()
        assert tokens(client, [5, 6]) == expected([5, 6], 4)
        assert client.health().state == "ready"
        pool.wait(WAIT_S)
        assert not set(pool._offer().pids[0].values()) & set(parked.values())
    assert are_gone(parked.values())


def test_what_differs_is_named(pool, parked, monkeypatch):
    ours = os.getpid()
    with pytest.raises(ConfigError, match=rf"process {ours}: max_model_len is 64 there and 32 here$"):
        adopt_parked(wanted(pool, max_model_len=32))
    monkeypatch.setenv("OMP_SCHEDULE", "static")
    with pytest.raises(ConfigError, match=r"OMP_SCHEDULE is not set there and 'static' here$"):
        adopt_parked(wanted(pool))
    assert adopt_parked(wanted(pool, start_from="parked")) is None  # a new one is started
    assert all(map(is_alive, parked.values()))


def test_other_code_and_other_files_differ(pool):
    key = parked_key(pool.config)
    other = msgspec.structs.replace(key, model=b"other", versions=key.versions | {"ringcore": "0"})
    assert differences(key, key) == []
    ours = key.versions["ringcore"]
    assert differences(other, key) == [f"ringcore is '0' there and {ours!r} here", "the model's files were changed"]


def test_without_a_pool_there_is_none(folder):
    config = EngineConfig.from_options(model=folder, **OPTIONS, start_from="parked_only")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringcore.front_end.parking.adoption.find_parks", list)
        with pytest.raises(ConfigError, match="this user keeps none in this network namespace; run 'ringcore park'"):
            adopt_parked(config)
        assert adopt_parked(replace(config, parallel=replace(config.parallel, start_from="parked"))) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"keep": 0}, "keep=0: give an integer of at least 1"),
        ({"level": 3}, "level=3: give 0, 1 or 2"),
        ({"level": 1}, "level=1: only an engine with enable_sleep_mode=True can sleep so"),
        ({"level": 2, "enable_sleep_mode": True}, "level=2: weights of dummy files cannot be read again"),
    ],
)
def test_what_cannot_be_parked(folder, given, says):
    with pytest.raises(ConfigError, match=says):
        ParkedEngines(folder, **OPTIONS, **given)


# ---------------------------------------------------------------------------------------------------------------
# Deaths.


def test_one_that_dies_while_parked_is_replaced(pool, parked):
    os.kill(parked["engine"], signal.SIGKILL)
    assert are_gone(parked.values())
    wait_until(lambda: pool.num_parked and pool._offer().pids[0] != parked)


def test_one_whose_adopter_vanishes_ends(pool, parked):
    sock, _ = connect_to_park(next(name for name in find_parks() if name.pid == os.getpid()))
    with sock:
        sock.send(TAKE)  # and it never receives the answer
    assert are_gone(parked.values())


def run_script(text: str, *arguments: str) -> subprocess.Popen:
    path = os.pathsep.join([str(TESTS), *sys.path])
    command = [sys.executable, "-c", textwrap.dedent(text), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})


ADOPTER = """
    import sys, time
    from ringcore import EngineConfig
    from ringcore.front_end.client_start import start_client
    options = dict(executor="fake_engine:FakeUniproc", load_format="dummy", max_model_len=64)
    config = EngineConfig.from_options(model=sys.argv[1], start_from="parked_only", enable_sleep_mode=True, **options)
    client = start_client(config)
    client.wait_ready()
    print("up", flush=True)
    time.sleep(600)
"""


def test_it_dies_with_the_process_that_adopted_it(pool, parked, folder):
    """Which is not its parent."""
    adopter = run_script(ADOPTER, folder)
    with adopter:
        assert adopter.stdout.readline() == "up\n"
        (engine,) = (one for one in local_engines() if one.pid == parked["engine"])
        assert engine.description.owner_pid == os.getpid()
        assert engine.owner_pid == survey([engine], WAIT_S)[0].owner_pid == adopter.pid
        adopter.kill()
    assert are_gone(parked.values())
    pool.wait(WAIT_S)


def test_the_command_is_killed_and_what_was_adopted_lives(folder):
    """The parked engine ends with it."""
    command = "import sys; from ringcore.cli import main; sys.argv[0] = 'ringcore'; main()"
    flags = ["--executor", OPTIONS["executor"], "--load-format", "dummy", "--max-model-len", "32", "--keep", "2"]
    park = run_script(command, "park", folder, *flags)
    with park:
        assert park.stdout.readline() == f"ringcore: 2 of {folder} parked; Ctrl-C ends\n"
        (name,) = (name for name in find_parks() if name.pid == park.pid)
        sock, offer = connect_to_park(name)
        sock.close()
        options = OPTIONS | {"max_model_len": 32, "start_from": "parked"}
        with start_client(EngineConfig.from_options(model=folder, **options)) as client:
            adopted = client.wait_ready().pids
            assert adopted in offer.pids
            park.kill()
            park.wait()
            left = {pid for pids in offer.pids if pids != adopted for pid in pids.values()}
            assert len(left) == 1
            assert are_gone(left)
            assert tokens(client, [7]) == expected([7], 4)
        assert are_gone(adopted.values())
    assert name not in find_parks()


# ---------------------------------------------------------------------------------------------------------------
# Operators. The last test ends the pool.


def invoke(*arguments: str):
    return CliRunner().invoke(make_app(["park"]), ["park", *arguments], catch_exceptions=True)


def test_the_list_and_the_doctor(pool, parked, folder):
    header, *lines = invoke("--list").stdout.splitlines()
    assert header.split() == ["PID", "MODEL", "PARKED", "LEVEL", "ENGINES", "MEMORY"]
    (ours,) = (line.split() for line in lines if line.startswith(f"{os.getpid()} "))
    assert ours[1:7] == [folder, "1", "of", "1", "1", str(parked["engine"])]
    (finding,) = (one for one in check_parked() if f"process {os.getpid()}:" in one.found)
    assert (finding.level, finding.check) == ("ok", "parked engines")
    assert finding.found.startswith(f"1 of {folder}, kept by process {os.getpid()}: ")


def test_a_model_is_needed():
    assert "name the model to park" in str(invoke().exception)


def test_they_are_stopped_by_the_model(pool, parked, folder):
    assert isinstance(invoke("--stop", "another").exception, InvalidRequestError)
    ended = threading.Thread(target=lambda: pool.wait_closed() and pool.close())
    ended.start()
    assert f"process {os.getpid()} keeps no more of {folder}" in invoke(os.path.basename(folder), "--stop").stdout
    ended.join(WAIT_S)
    assert are_gone(parked.values())
    with pytest.raises(EngineDeadError, match="the pool of parked engines was closed"):
        pool.wait()
