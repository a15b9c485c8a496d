"""What every executor promises. A new one is done when it is in `EXECUTORS` and green."""

from __future__ import annotations

import os
import time

import fake_worker
import numpy as np
import pytest
from fake_worker import FACTORY, Point, Shape, fake_config, step
from process_checks import BOUND_S

from ringcore.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    RpcTimeoutError,
    WorkerError,
)
from ringcore.executor import executor_class, futures
from ringcore.executor.base import Executor
from ringcore.executor.rpc_call import EncodedCall, WorkerCall
from ringcore.executor.value_codec import decode_value, encode_request, encode_value
from ringcore.protocol.codec import decoder
from ringcore.protocol.steps import ModelRunnerOutput

EXECUTORS = ["multiproc", "uniproc", "ringcore.testing:FakeExecutor"]


def build(name: str, trouble: str = "") -> Executor:
    return executor_class(name)(fake_config(trouble=trouble), worker_factory=FACTORY)


@pytest.fixture(scope="module", params=EXECUTORS)
def executor(request):
    executor = build(request.param)
    executor.start()
    yield executor
    executor.shutdown()


def test_values_come_back_one_a_rank(executor):
    assert executor.collective_rpc("echo", [{"a": [1, 2.5, None, "é", b"\x00"]}]) == [
        {"a": [1, 2.5, None, "é", b"\x00"]}
    ]
    assert executor.collective_rpc("add", (1,), {"y": 2}) == [3]


def test_values_become_builtins_and_arrays(executor):
    (values,) = executor.collective_rpc("odd_values")
    assert values.pop("array").tolist() == [[0, 1], [2, 3]]
    assert values == {
        "scalar": 0.5,
        "dtype": "int32",
        "tuple": [1, [2, 3]],
        "set": [5],
        "dataclass": {"x": 1, "y": 2.0},
        "struct": {"name": "s", "points": [{"x": 3, "y": 4.0}]},
        3: None,
    }


def test_values_are_the_callers_own(executor):
    """The worker goes on to change what it returned, and the caller may change what it got."""
    futures = [executor.submit_rpc("changing_array") for _ in range(3)]
    first, second, third = (future.result()[0] for future in futures)
    first[:] = 0
    assert (second - futures[0].result()[0]).tolist() == [1.0] * 4096
    assert (third - second).tolist() == [1.0] * 4096


def test_arguments_may_change_as_soon_as_they_are_sent(executor):
    array = np.ones(4096)
    future = executor.submit_rpc("echo", [array])
    array[:] = 2
    assert future.result()[0].tolist() == [1.0] * 4096


def test_one_rank_may_reply_for_all(executor):
    assert executor.collective_rpc("add", [1], {"y": 2}, unique_reply_rank=0) == 3
    for rank in (1, -1, True, "0"):
        with pytest.raises(InvalidRequestError, match=r"unique_reply_rank=.*: give None, or a rank from 0 to 0"):
            executor.submit_rpc("add", [1], unique_reply_rank=rank)


def test_a_call_may_be_forwarded_undecoded(executor):
    array = np.arange(10_000)
    future = executor.forward(EncodedCall("echo", encode_value(["echo", [array], {}])))
    (parts,) = future.encoded_result()
    assert all(type(part) is bytes for part in parts)
    assert decode_value(parts).tolist() == array.tolist() == future.result()[0].tolist()
    with pytest.raises(WorkerError, match="KeyError"):
        executor.submit_rpc("fail", ["x"]).encoded_result()
    step_parts = executor.execute_model(step(5)).encoded_result()[0]
    assert decoder(ModelRunnerOutput).decode(step_parts[0]).step == 5


def test_a_function_is_called_with_the_worker(executor):
    base = 10

    def rank_and_more(worker, x, *, y):
        return [worker.rank, base + x + y]

    assert executor.collective_rpc(rank_and_more, [1], {"y": 2}) == [[0, 13]]
    with pytest.raises(WorkerError, match=r"ZeroDivisionError in '.*<lambda>' on rank 0"):
        executor.collective_rpc(lambda worker: 1 / 0)
    assert executor.collective_rpc("echo", ["next"]) == ["next"]


@pytest.mark.parametrize(("claimed", "is_callable"), [("peek", False), ("count", True)])
def test_a_call_that_is_not_what_it_claims_is_refused(executor, claimed, is_callable):
    """A name that would be executed beside a step, or as a function, must be the one that is executed."""
    call = EncodedCall(claimed, encode_request("count", [1], {}), is_callable)
    before = executor.collective_rpc("count", [0])
    with pytest.raises(InvalidRequestError):
        executor.forward(call).result()
    assert executor.collective_rpc("count", [0]) == before


def test_a_function_is_run_only_where_the_call_says_so(executor):
    parts = encode_request(lambda worker: worker.count(), [], {})
    with pytest.raises(InvalidRequestError):
        executor.forward(EncodedCall("count", parts)).result()


@pytest.mark.parametrize("method", ["tune", "peek_inside", "init_device", "load_model"])
def test_what_is_the_engines_no_call_from_outside_reaches(executor, method):
    """Neither by its name nor under that of another, and only the engine's own calls do."""
    before = executor.collective_rpc("tune")
    for claimed in (method, "echo", "peek"):
        call = EncodedCall(claimed, encode_request(method, [], {}))
        with pytest.raises(InvalidRequestError, match="only the engine itself" if claimed == method else "asks for"):
            executor.forward(call).result()
    assert executor.collective_rpc("peek_inside") == executor.collective_rpc("tune") == before
    assert executor.forward(WorkerCall("tune").encoded(by_engine=True)).result() == before


def test_it_tells_what_the_workers_declare(executor):
    methods = executor.methods
    assert (methods["tune"].scope, methods["tune"].signature) == ("engine", "(by: int = 0) -> int")
    assert methods["tune"].summary == "Changes what only the engine may."
    assert {name: (methods[name].scope, methods[name].read_only) for name in ("peek", "echo", "peek_inside")} == {
        "peek": ("read", True),
        "echo": ("call", False),
        "peek_inside": ("engine", True),
    }
    assert not methods.keys() & {"private", "shutdown", "_run"}


def test_a_value_that_cannot_be_decoded_is_that_calls_error(executor, monkeypatch):
    future = executor.submit_rpc("echo", [1])
    monkeypatch.setattr(futures, "decode_value", lambda parts: decode_value([b"\xc1"]))
    with pytest.raises(WorkerError, match="DecodeError in 'echo' on rank 0"):
        future.result()
    assert future.encoded_result()
    monkeypatch.undo()
    assert future.result() == [1]


def test_read_only_methods(executor):
    executor.collective_rpc("count", [0])
    assert executor.collective_rpc("peek")[0]["rank"] == 0
    assert executor.collective_rpc("large_peek", [3 << 20]) == [bytes(3 << 20)]
    for kind, text in (("value", "object"), ("x", "KeyError")):
        with pytest.raises(WorkerError, match=text):
            executor.collective_rpc("fail_to_peek", [kind])
    with pytest.raises(InvalidRequestError, match="missing a required argument"):
        executor.collective_rpc("large_peek")
    assert executor.collective_rpc("peek", unique_reply_rank=0)["rank"] == 0


def test_health_counts_calls(executor):
    executor.collective_rpc("echo")
    before = _idle(executor)
    executor.execute_model(step(1)).result()
    executor.collective_rpc("echo")
    after = _idle(executor)
    assert (after.rank, after.method, after.busy_s) == (0, None, 0.0)
    assert after.num_calls == before.num_calls + 2
    assert 0 <= after.heartbeat_age_s < 30
    assert after.process_state in ("running", "sleeping")
    assert executor.oldest_step_s() is None
    assert "rank 0" in executor.diagnose()
    executor.check()


def _idle(executor):
    """The rank's health once it is seen to be idle: its last reply is there a moment before."""
    deadline = time.monotonic() + BOUND_S
    while (health := executor.health()[0]).method is not None:
        assert time.monotonic() < deadline
    return health


def test_arguments_become_what_the_annotations_say(executor):
    shape = Shape("s", [Point(3, 4.0)])
    assert executor.collective_rpc("struct_back", [shape]) == [{"name": "s", "points": [{"x": 3, "y": 4.0}]}]
    assert executor.collective_rpc("array_kind", [np.arange(3)]) == ["int64[3]"]


def test_calls_are_performed_in_order(executor):
    start = executor.collective_rpc("count", [0])[0]
    futures = [executor.submit_rpc("count") for _ in range(200)]
    assert [future.result() for future in futures] == [[start + i] for i in range(1, 201)]


def test_futures_may_be_asked_in_any_order_and_again(executor):
    futures = [executor.submit_rpc("echo", [i]) for i in range(20)]
    for i in reversed(range(20)):
        assert futures[i].result(timeout=30) == [i]
        assert futures[i].done()
        assert futures[i].result() == [i]


def test_a_step_returns_the_output_ranks_arrays(executor):
    futures = [executor.execute_model(step(i)) for i in range(5)]
    outputs = [future.result(30) for future in futures]
    assert [output.step for output in outputs] == list(range(5))
    assert all(output.rows.tolist() == [0, 7] and output.token_ids.tolist() == [0, 70] for output in outputs)


@pytest.mark.parametrize("trouble", [fake_worker.RAISES, fake_worker.RETURNS_NOTHING])
def test_an_error_in_a_step_is_that_steps_error(executor, trouble):
    with pytest.raises(WorkerError) as caught:
        executor.execute_model(step(3, trouble)).result(30)
    assert caught.value.details["rank"] == 0
    assert caught.value.details["method"] == "execute_model"
    assert executor.execute_model(step(4)).result(30).step == 4


def test_a_raising_method_says_where_and_what(executor):
    with pytest.raises(WorkerError, match="KeyError in 'fail' on rank 0: 'nonsense'") as caught:
        executor.collective_rpc("fail", ["nonsense"])
    details = caught.value.details
    assert (details["rank"], details["error_type"], details["error_message"]) == (0, "KeyError", "'nonsense'")
    assert details["method"] == "fail"
    assert "raise KeyError(kind)" in details["traceback"]
    assert executor.collective_rpc("echo", [1]) == [1]


def test_an_error_of_ours_arrives_as_itself(executor):
    with pytest.raises(CapacityError) as caught:
        executor.collective_rpc("fail", ["ours"])
    assert caught.value.message == "too little"
    assert caught.value.__notes__ == ["raised by 'fail' in worker 0"]
    details = {"needed_bytes": 10, "available_bytes": 3}
    failure = {"rank": 0, "type": "CapacityError", "message": "too little", "details": details}
    assert caught.value.details == details | {"failures": [failure]}
    assert type(caught.value.failures[0]) is CapacityError


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("unsendable details", CapacityError, "odd"),
        ("subclass", WorkerError, "UnknownToOthers in 'fail' on rank 0: only here"),
        ("surrogate", WorkerError, r"lone \\ud800 surrogate"),
        ("broken text", WorkerError, "its text raised RuntimeError"),
        ("deep", WorkerError, "RecursionError"),
    ],
)
def test_an_awkward_error_spoils_nothing_else(executor, kind, error, text):
    with pytest.raises(error, match=text) as caught:
        executor.collective_rpc("fail", [kind])
    assert len(caught.value.details.get("traceback", "")) <= 16 << 10
    assert executor.collective_rpc("echo", ["next"]) == ["next"]


@pytest.mark.parametrize("kind", ["object", "huge int", "cycle", "function"])
def test_a_value_that_cannot_be_sent_is_that_calls_error(executor, kind):
    with pytest.raises(WorkerError):
        executor.collective_rpc("unencodable", [kind])
    assert executor.collective_rpc("echo", ["next"]) == ["next"]


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "text"),
    [
        ("ad", [1], {}, "did you mean 'add'"),
        ("shutdown", [], {}, "no worker method 'shutdown'"),
        ("__init__", [], {}, "no worker method '__init__'"),
        ("private", [], {}, "no worker method 'private'"),
        ("add", [], {}, "missing a required argument: 'x'"),
        ("add", [1, 2], {}, "too many positional arguments"),
        ("add", ["1"], {}, r"add\(x\)='1': Expected `int`, got `str`"),
        ("add", [1], {"z": 2}, "unexpected keyword argument 'z'"),
        ("echo", [object()], {}, "cannot be sent"),
        (7, [], {}, "method=7: give the name of a worker method"),
    ],
)
def test_a_wrong_call_is_refused(executor, method, args, kwargs, text):
    with pytest.raises(InvalidRequestError, match=text):
        executor.collective_rpc(method, args, kwargs)
    assert executor.collective_rpc("echo", ["next"]) == ["next"]


def test_a_timeout_names_the_call_and_spoils_nothing(executor):
    with pytest.raises(RpcTimeoutError, match="'nap'") as caught:
        executor.collective_rpc("nap", [0.4], timeout=0.02)
    assert caught.value.details == {"method": "nap", "timeout_s": 0.02, "missing_ranks": [0]}
    assert isinstance(caught.value, TimeoutError)
    assert executor.collective_rpc("echo", ["next"]) == ["next"]


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 9 << 20, 40 << 20])
def test_arguments_and_values_of_any_size(executor, size):
    assert executor.collective_rpc("sizes", [bytes(size)]) == [size]
    assert executor.collective_rpc("zeros", [size]) == [bytes(size)]


@pytest.mark.parametrize("name", EXECUTORS)
@pytest.mark.parametrize(
    ("trouble", "error"), [("fail in init", ModelLoadError), ("raise in load", WorkerError)], ids=["ours", "foreign"]
)
def test_what_stops_a_worker_from_starting_is_raised(name, trouble, error):
    executor = build(name, trouble)
    with pytest.raises(error):
        executor.start()
    assert executor.pids() == {} or not any(map(_is_running, executor.pids().values()))
    with pytest.raises(EngineDeadError):
        executor.collective_rpc("echo")


@pytest.mark.parametrize("name", EXECUTORS)
def test_a_start_and_the_calls_before_it_and_after_the_shutdown(name):
    executor = build(name)
    with pytest.raises(EngineDeadError, match="not started"):
        executor.collective_rpc("echo")
    phases = executor.start()
    assert [name for name in phases if "." not in name] == ["start_workers", "init_device", "load_model"]
    assert all(seconds >= 0 for seconds in phases.values())
    executor.shutdown()
    executor.shutdown()
    for call in (
        lambda: executor.collective_rpc("echo"),
        lambda: executor.execute_model(step(0)),
        executor.check,
        executor.restart,
    ):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()


@pytest.mark.parametrize("name", EXECUTORS)
def test_a_restart_makes_new_workers(name):
    executor = build(name)
    executor.start()
    try:
        assert executor.collective_rpc("count", [3]) == [3]
        phases = executor.restart()
        assert [name for name in phases if "." not in name] == ["start_workers", "init_device", "load_model"]
        assert executor.collective_rpc("count", [1]) == [1]
        assert executor.execute_model(step(2)).result(30).step == 2
    finally:
        executor.shutdown()


@pytest.mark.parametrize("name", EXECUTORS)
def test_a_restart_that_fails_may_be_tried_again(name, tmp_path):
    trouble = tmp_path / "trouble"
    executor = build(name, f"fail in load while there is {trouble}")
    executor.start()
    try:
        trouble.touch()
        with pytest.raises(ModelLoadError):
            executor.restart()
        with pytest.raises(EngineDeadError, match="could not be replaced"):
            executor.collective_rpc("echo")
        trouble.unlink()
        executor.restart()
        assert executor.collective_rpc("echo", [1]) == [1]
    finally:
        executor.shutdown()


@pytest.mark.parametrize(
    "name", ["multiprocc", "no.such.module:Class", "ringcore.config:EngineConfig", "os:nothing", "", ":"]
)
def test_a_name_that_leads_to_no_executor(name):
    with pytest.raises(ConfigError) as caught:
        executor_class(name)
    assert caught.value.details["option"] == "executor"


def test_an_executor_by_its_path():
    assert executor_class("ringcore.executor.uniproc:UniProcExecutor") is executor_class("uniproc")


def _is_running(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
