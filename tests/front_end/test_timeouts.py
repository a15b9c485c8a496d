"""Every timeout that a public call takes is checked at once, by one rule."""

from __future__ import annotations

import asyncio
import math
import time

import pytest
from fake_engine import FakeMultiproc, FakeUniproc, make_model_folder

from ringcore import LLM, AsyncEngine, EngineConfig
from ringcore.cli import main
from ringcore.engine_core.core import EngineCore
from ringcore.errors import ConfigError, InvalidRequestError
from ringcore.front_end.client import EngineCoreClient
from ringcore.params.field_checks import MAX_TIMEOUT_S, check_timeout, is_timeout
from ringcore.protocol.operations import Sleep
from ringcore.serve import ServiceOptions

WRONG = [math.inf, -math.inf, math.nan, -1, -0.5, True, False, "1", b"1", [1], 1e7]
OPTIONS = {"load_format": "dummy", "max_model_len": 128, "block_size": 8}
SOON_S = 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, executor=FakeMultiproc, **OPTIONS) as made:
        yield made


@pytest.mark.parametrize("value", [0, 0.0, 1, 2.5, MAX_TIMEOUT_S])
def test_what_one_can_wait_for(value):
    assert is_timeout(value)
    check_timeout("timeout", value, or_none=False)


def test_none_is_no_deadline_where_it_may_be():
    check_timeout("timeout", None)
    with pytest.raises(InvalidRequestError, match=r"timeout=None: give seconds, from 0 to 5$"):
        check_timeout("timeout", None, 5, or_none=False)


def calls(engine) -> dict:
    """What `LLM`, `EngineCoreClient`, `EngineCore` and `AsyncEngine` have in common."""
    return {
        "collective_rpc": lambda t: engine.collective_rpc("echo", ("x",), timeout=t),
        "sleep": lambda t: engine.sleep(timeout=t),
        "wake_up": lambda t: engine.wake_up(timeout=t),
        "start_weight_update": lambda t: engine.start_weight_update(timeout=t),
        "update_weights": lambda t: engine.update_weights({"kind": "paper", "number": 3}, timeout=t),
        "finish_weight_update": lambda t: engine.finish_weight_update(timeout=t),
        "reload_weights": lambda t: engine.reload_weights("/no/such", timeout=t),
    }


def assert_refused(call, value) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"timeout=.*: give seconds, from 0 to") as caught:
        call(value)
    assert time.monotonic() - started < SOON_S
    assert caught.value.details["field"] == "timeout"


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_of_a_client_and_an_llm(llm, value):
    client = llm._client
    own = {
        "llm.health": llm.health,
        "health": client.health,
        "get_outputs": client.get_outputs,
        "call_engine": lambda t: client.call_engine("stats", timeout=t),
    }
    for call in (*calls(llm).values(), *calls(client).values(), *own.values()):
        assert_refused(call, value)
    assert llm.collective_rpc("echo", ("x",), timeout=SOON_S) == ["0:x"]
    assert not llm.is_sleeping()


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_of_a_start(folder, value):
    config = EngineConfig.from_options(model=folder, executor=FakeMultiproc, **OPTIONS)
    with pytest.raises(InvalidRequestError, match="start_timeout_s="):
        EngineCoreClient(config, start_timeout_s=value)


@pytest.mark.parametrize("executor", [FakeMultiproc, FakeUniproc])
def test_of_an_engine_in_this_process(folder, executor):
    with EngineCore(EngineConfig.from_options(model=folder, executor=executor, **OPTIONS)) as core:
        for value in WRONG:
            for call in calls(core).values():
                assert_refused(call, value)
            if executor is FakeMultiproc:  # a future of the other is done when it is there
                assert_refused(core.submit_rpc("echo", ("x",)).result, value)
            assert_refused(core.submit_operation(Sleep(0)).result, value)
        assert core.collective_rpc("echo", ("x",), timeout=SOON_S) == ["0:x"]


def test_of_an_async_engine(folder):
    async def scenario():
        async with AsyncEngine(folder, executor=FakeMultiproc, **OPTIONS) as engine:
            for value in WRONG:
                for call in (*calls(engine).values(), engine.health, engine.close):
                    with pytest.raises(InvalidRequestError, match="timeout="):
                        await call(value)
            assert await engine.collective_rpc("echo", ("x",), timeout=SOON_S) == ["0:x"]

    asyncio.run(scenario())


@pytest.mark.parametrize("value", [*WRONG, 0], ids=repr)
@pytest.mark.parametrize(
    "option", ["step_timeout_s", "engine_timeout_s", "stall_warning_s", "structured_outputs_timeout_s"]
)
def test_of_options(folder, option, value):
    with pytest.raises(ConfigError, match=f"{option}=.*: give a positive number of seconds"):
        EngineConfig.from_options(model=folder, **{option: value})


@pytest.mark.parametrize("value", [*WRONG, 0, None], ids=repr)
def test_of_a_service(value):
    with pytest.raises(ConfigError, match="body_timeout_s="):
        ServiceOptions(body_timeout_s=value)


def test_of_the_command(folder, capsys):
    with pytest.raises(SystemExit):
        main(["serve", folder, "--drain-s", "inf", "--port", "0"])
    assert "drain_s=inf: give seconds" in capsys.readouterr().err
