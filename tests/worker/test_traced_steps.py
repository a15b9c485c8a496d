"""The spans of a real worker's steps on a CPU, and torch's operators on their clock."""

from __future__ import annotations

import msgspec
import pytest
import torch
from check_timeline import check_timeline
from device_runner import rows_on_device
from fake_engine import make_model_folder
from step_driver import admit, make_config, run, start

from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.tracing import ProcessTrace, now_ns
from ringcore.tracing.timeline import timeline
from ringcore.worker.device_profile import DeviceProfile
from ringcore.worker.worker import Worker


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    options = {"load_format": "dummy", "executor": "uniproc", "device": "cpu", "num_blocks_override": 64}
    with EngineCore(EngineConfig.from_options(model=folder, max_model_len=64, **options)) as made:
        yield made


def traced(core, operators):
    core.collective_rpc("start_trace", (30.0, operators))
    core.start_trace(30.0)
    core.add_request(EngineCoreRequest("a", [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True), now_ns() / 1e9))
    while core.has_unfinished:
        core.step()
    encoded = [core.stop_trace(), *core.collective_rpc("stop_trace")]
    engine, worker = (msgspec.msgpack.decode(one, type=ProcessTrace) for one in encoded)
    check_timeline(timeline([engine, worker], [], "1"))
    return engine, worker


def spans(trace, name):
    found = [one for one in trace.spans() if one.kind.name == name]
    return sorted(found, key=lambda one: one.began_ns)


def within(one, outers):
    return any(outer.began_ns <= one.began_ns <= one.ended_ns <= outer.ended_ns for outer in outers)


def test_the_parts_of_each_step(core):
    engine, worker = traced(core, operators=False)
    assert [one.args[0] for one in spans(engine, "schedule")] == [one.args[0] for one in spans(worker, "apply")]
    assert [list(one.args) for one in spans(worker, "forward")] == [[3], [1], [1], [1]]
    assert [list(one.args) for one in spans(worker, "sample")] == [[1]] * 4
    for name in ("apply", "prepare inputs", "forward", "sample"):
        assert len(spans(worker, name)) == 4
        assert all(within(one, spans(engine, "broadcast")) for one in spans(worker, name))
    assert {one.kind.name for one in worker.spans()} == {"apply", "prepare inputs", "forward", "sample"}


def test_operators_are_on_the_clock_of_the_spans(core):
    _, worker = traced(core, operators=True)
    forwards, embeddings = spans(worker, "forward"), spans(worker, "aten::embedding")
    assert len(forwards) == len(embeddings) == 4
    assert all(within(one, [forward]) for one, forward in zip(embeddings, forwards, strict=True))


def test_a_trace_that_nobody_stops_ends_with_its_profiler(core):
    core.collective_rpc("start_trace", (0.01, True))
    began = now_ns()
    while now_ns() < began + 10**7:
        continue
    core.add_request(EngineCoreRequest("b", [5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True), 0.0))
    while core.has_unfinished:
        core.step()
    assert not torch.autograd._profiler_enabled()
    (encoded,) = core.collective_rpc("stop_trace")
    assert list(msgspec.msgpack.decode(encoded, type=ProcessTrace).spans()) == []


def test_a_correction_of_the_wall_clock_moves_nothing_far():
    """The wall clock gains 1 ms on the monotonic one over a second: halfway it is half of that."""
    profile = DeviceProfile.__new__(DeviceProfile)
    profile._first = 10**18, 10**17
    last = 10**18 + 10**9, 10**17 + 10**6
    assert profile._monotonic(10**18, last) == 9 * 10**17
    assert profile._monotonic(10**18 + 5 * 10**8, last) == 9 * 10**17 + 5 * 10**8 - 5 * 10**5


@pytest.mark.parametrize("plans_on_device", [False, True])
def test_the_parts_of_a_gpus_steps(tiny_llama, monkeypatch, plans_on_device):
    """A prompt is computed eagerly here; a decode that plans on the device is launched whole, as a graph would be."""
    rows_on_device(monkeypatch, plans_on_device=plans_on_device)
    worker = start(Worker(make_config(tiny_llama[0]), 0, None))
    try:
        worker.start_trace(60.0)
        run(worker, {0: 3}, new=[admit(0, [11, 60, 23], [1, 2])])
        run(worker, {0: 1})
        found = [(one.kind.name, list(one.args)) for one in traced_by(worker)]
    finally:
        worker.shutdown()
    prompt = [("prepare inputs", []), ("forward", [3]), ("sample", [1])]
    decode = [("replay", [1]), ("sample", [1])] if plans_on_device else [(prompt[0]), ("forward", [1]), ("sample", [1])]
    assert [one for one in found if one[0] != "apply"] == [*prompt, *decode]
    assert [name for name, _ in found].count("apply") == 2


def traced_by(worker):
    trace = msgspec.msgpack.decode(worker.stop_trace(), type=ProcessTrace)
    return sorted(trace.spans(), key=lambda one: one.began_ns)
