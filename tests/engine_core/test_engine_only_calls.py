"""What only the engine calls on its workers is refused to every call from outside, and the engine goes on serving."""

from __future__ import annotations

import asyncio

import pytest
from admin_peers import ANY_PORT, RawPeer, make_keys
from fake_engine import FakeMultiproc, FakeUniproc, expected, make_model_folder
from typer.testing import CliRunner

from ringcore import LLM, AdminClient, AsyncEngine, EngineConfig, EngineCore, SamplingParams
from ringcore.cli.app import make_app
from ringcore.engine_core.admin.operator_calls import OPERATOR_CALLS
from ringcore.engine_core.admin.public_methods import ENGINE_CALLS
from ringcore.errors import InvalidRequestError, PermissionDeniedError
from ringcore.executor.rpc_call import EncodedCall
from ringcore.executor.value_codec import encode_request
from ringcore.protocol.codec import encoder
from ringcore.protocol.messages import RpcCall
from ringcore.protocol.requests import EngineCoreRequest

# All names, so that none becomes public by mistake. The fake worker does not have the last ones.
ENGINE_ONLY = [
    *("init_device", "load_model", "get_kv_cache_spec", "determine_available_memory", "initialize_from_config"),
    *("execute_model", "reset_rows", "prepare_memory", "commit_memory", "roll_back_memory", "compile_grammar"),
    *("shutdown", "capture_graph", "open_kv_store", "finished_kv_loads"),
]
REFUSED = r"only the engine itself calls it on its workers|no worker method '(capture_graph|\w+_kv_\w+)'"
OPTIONS = {"load_format": "dummy", "max_model_len": 64, "block_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("admin"))


@pytest.fixture(scope="module")
def llm(folder, keys):
    admin = {"admin_endpoint": ANY_PORT, "admin_keys": keys}
    options = OPTIONS | admin | {"executor": FakeMultiproc, "tensor_parallel_size": 2, "enable_sleep_mode": True}
    with LLM(folder, **options) as engine:
        yield engine


@pytest.fixture
def admin(llm, keys):
    with AdminClient(llm.ready.admin_endpoint, keys) as client:
        yield client


def serves(llm) -> bool:
    (output,) = llm.generate([[97, 98]], SamplingParams(max_tokens=4), use_tqdm=False)
    return output.outputs[0].token_ids == expected([97, 98], 4)


@pytest.mark.parametrize("method", ENGINE_ONLY)
def test_no_client_calls_what_is_the_engines(llm, admin, keys, method):
    for client in (llm, llm._client, admin):
        with pytest.raises(InvalidRequestError, match=REFUSED) as caught:
            client.collective_rpc(method)
        assert caught.value.details == {"field": "method", "value": method}
        assert serves(llm)
    result = CliRunner().invoke(make_app(["rpc"]), ["rpc", llm.ready.admin_endpoint, method, "--keys", keys])
    assert isinstance(result.exception, InvalidRequestError)
    assert serves(llm)


@pytest.mark.parametrize("executor", [FakeUniproc, FakeMultiproc, "ringcore.testing:FakeExecutor"])
def test_nor_does_a_caller_of_an_engine_core(folder, executor):
    config = EngineConfig.from_options(model=folder, executor=executor, **OPTIONS)
    with EngineCore(config) as core:
        for method in ENGINE_ONLY:
            with pytest.raises(InvalidRequestError, match=f"{REFUSED}|no worker method 'compile_grammar'"):
                core.collective_rpc(method)
        core.add_request(EngineCoreRequest("a", [5, 6], SamplingParams(max_tokens=4), arrival_s=0.0))
        outputs = [output for _ in range(10) for output in core.step().outputs]
        assert sum(len(output.new_token_ids) for output in outputs) == 4


def test_nor_does_an_async_engine(folder):
    async def main() -> None:
        async with AsyncEngine(folder, **OPTIONS, executor=FakeMultiproc) as engine:
            for method in ENGINE_ONLY:
                with pytest.raises(InvalidRequestError, match=REFUSED):
                    await engine.collective_rpc(method)
            tokens = [output async for output in engine.generate([97, 98], SamplingParams(max_tokens=4))]
            assert tokens[-1].outputs[0].token_ids == expected([97, 98], 4)
            assert {"echo", "stats", "pause"} <= {method.name for method in await engine.methods()}

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("asked", ["shutdown", "load_model", "compile_grammar"])
@pytest.mark.parametrize("claimed", ["stats", "echo", None])
def test_a_forged_frame_of_the_engines_client(llm, claimed, asked):
    """It names a method that may be called and has the arguments of another; None: it names that one."""
    forged = RpcCall(next(llm._client._call_ids), "workers", claimed or asked, timeout_s=60.0)
    result, _ = llm._client._exchange(forged, encode_request(asked, [], None), None)
    assert result.error.type == "InvalidRequestError"
    assert serves(llm)


def test_a_forged_frame_of_an_admin_client(llm, keys):
    arguments = encode_request("shutdown", [], None)
    own = {"type": "rpc", "call_id": 2, "target": "workers", "method": "shutdown", "timeout_s": 60.0, "by_engine": True}
    with RawPeer(llm.ready.admin_endpoint, keys) as peer:
        peer.send(encoder().encode(RpcCall(1, "workers", "stats", timeout_s=60.0)), *arguments)
        peer.send(encoder().encode(own), *arguments)
        peer.send(encoder().encode(RpcCall(3, "workers", "shutdown", timeout_s=60.0)), *arguments)
        result, _ = peer.receive()  # the two others are no calls, and were dropped
        assert (result.call_id, result.error.type) == (3, "InvalidRequestError")
    assert serves(llm)


def test_a_call_from_outside_is_not_the_engines_whatever_it_says(folder):
    config = EngineConfig.from_options(model=folder, executor=FakeUniproc, **OPTIONS)
    with EngineCore(config) as core:
        for claimed in ("shutdown", "stats"):
            call = EncodedCall(claimed, encode_request("shutdown", [], None), by_engine=True)
            with pytest.raises(InvalidRequestError, match=r"only the engine itself|asks for 'shutdown'"):
                core.forward_rpc(call).result()


# ---------------------------------------------------------------------------------------------------------------
# What may be called.


def test_all_that_is_listed_can_be_called_and_nothing_else(llm, admin):
    methods = admin.methods()
    assert methods == llm.methods()
    listed = {(method.target, method.name) for method in methods}
    assert {("engine", name) for name in ("pause", "resume", "stats", "health", "is_sleeping", "methods", "sleep")} <= (
        listed
    )
    assert {("workers", name) for name in ("stats", "health", "memory_states", "echo", "die")} <= listed
    assert not {name for _, name in listed} & set(ENGINE_ONLY)
    with pytest.raises(InvalidRequestError) as caught:
        admin.collective_rpc("nothing")
    known = set(caught.value.message.partition("known: ")[2].split(", "))
    operations = {"sleep", "wake_up", "start_weight_update", "update_weights", "finish_weight_update", "reload_weights"}
    assert known == operations | {name for target, name in listed if target == "workers"}


def test_an_admin_client_calls_the_engine_itself(llm, admin):
    for name in [*ENGINE_CALLS, *(name for name in OPERATOR_CALLS if name != "abort")]:
        admin.call_engine(name, [1.0] if name == "start_trace" else [])
    assert admin.call_engine("abort", ["nobody"]) == []
    assert admin.call_engine("pause", ["all"]) is None
    assert admin.call_engine("resume") is None
    assert admin.call_engine("sleep", kwargs={"level": 0})["states"] == {"weights": "resident", "kv_cache": "resident"}
    assert admin.call_engine("wake_up")["seconds"] >= 0
    with pytest.raises(InvalidRequestError, match="mode='some': give 'new' or 'all'"):
        admin.call_engine("pause", ["some"])
    assert serves(llm)


def test_a_key_that_may_only_read_stops_nothing(folder, tmp_path):
    keys = make_keys(tmp_path, "read")
    options = OPTIONS | {"admin_endpoint": ANY_PORT, "admin_keys": keys, "executor": FakeMultiproc}
    with LLM(folder, **options) as llm, AdminClient(llm.ready.admin_endpoint, keys) as admin:
        for call in (
            lambda: admin.collective_rpc("die"),
            lambda: admin.collective_rpc("sleep", [0]),
            lambda: admin.call_engine("sleep", [0]),
            lambda: admin.call_engine("pause"),
            lambda: admin.call_engine("reset_prefix_cache"),
        ):
            with pytest.raises(PermissionDeniedError, match=r"clients/client\.key, and restart the engine"):
                call()
            assert serves(llm)
        assert admin.collective_rpc("stats")[0]["rank"] == 0
        assert admin.call_engine("is_sleeping") is False
        assert admin.health().state == "ready"
