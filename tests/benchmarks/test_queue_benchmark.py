"""The benchmark of the message queue: its loops, its arithmetic, and one short run of the real thing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks import message_queue
from benchmarks.__main__ import main
from benchmarks.driver import BenchmarkError
from benchmarks.harness import EngineSpec, Plan, engine_specs
from benchmarks.message_queue import (
    EXECUTOR,
    OURS,
    MessageQueue,
    OtherWork,
    Round,
    limits_from,
    measurements,
    queue_specs,
    quietest,
)
from benchmarks.peers.queue_loops import SIZES, Caller, Row, cpu_s, look, percentiles, pinned_core, size_name
from benchmarks.peers.queue_vllm import load_queue_module
from benchmarks.report import render
from benchmarks.result import Result

MakePlan = Callable[..., Plan]
SETTINGS = {"readers": 2, "transport": "memfd", "call_ring_bytes": 64 << 20, "pin": False, "quick": True}


class FakeCaller(Caller):
    """Two readers in this very process. `damage` is what happens to a payload on its way."""

    packages: ClassVar[tuple[str, ...]] = ("numpy",)

    def __init__(self, damage: Callable[[Any], Any] = lambda payload: payload) -> None:
        super().__init__()
        self._damage = damage
        self.sizes: list[int] = []

    def start(self) -> None: ...

    def ask(self, op: int, argument: Any) -> list[Any]:
        if isinstance(argument, float):
            time.sleep(argument)
            return [argument] * 2
        self.sizes.append(len(argument))
        return [look(argument), look(self._damage(argument))]

    def more(self) -> list[Row]:
        return [("more", "messages/s", 1.0)]

    def pids(self) -> list[int]:
        return [os.getpid()] * 2

    def close(self) -> None: ...


def names(rows: list[Row]) -> list[str]:
    return [name for name, _, _ in rows]


def test_a_block_has_a_row_of_everything() -> None:
    caller = FakeCaller()
    facts = caller.load("", SETTINGS)
    assert "numpy" in facts["packages"]
    caller.sizes.clear()
    rows = caller.block(stolen=False)
    assert names(rows)[:4] == ["64 B, p50", "64 B, p99", "4 KiB, p50", "4 KiB, p99"]
    expected = {"paced, over the work", "after 1.5 s of silence", "more"}
    expected |= {f"{what}, CPU of {whom}" for what in ("paced", "idle for 5 s") for whom in ("the writer", "a reader")}
    assert expected < set(names(rows))
    assert all(value > 0 for _, _, value in rows)
    assert all(caller.sizes.count(size) >= 5 + 2 for size in SIZES)
    assert caller.sizes.count(64) > caller.sizes.count(20 << 20)


def test_a_block_with_a_stolen_core_says_so_and_does_less() -> None:
    caller = FakeCaller()
    caller.load("", SETTINGS)
    caller.sizes.clear()
    rows = caller.block(stolen=True)
    stolen_count = len(caller.sizes)
    caller.sizes.clear()
    caller.block(stolen=False)
    assert stolen_count < len(caller.sizes)
    assert all(name.startswith("a core stolen, ") for name in names(rows))
    assert not any("CPU" in name for name in names(rows))


@pytest.mark.parametrize(
    "damage",
    [
        lambda payload: payload[:-1],
        lambda payload: bytes(8) + bytes(payload)[8:],
        lambda payload: bytes(payload)[:-1] + bytes([payload[-1] ^ 1]),
    ],
    ids=["cut", "another", "last byte"],
)
def test_a_payload_that_did_not_arrive_as_sent_ends_the_run(damage: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError, match="64 bytes was sent; the readers saw"):
        FakeCaller(damage).load("", SETTINGS)


def test_what_a_reader_looks_at() -> None:
    assert look(b"\x02" + bytes(99) + b"\x09") == [2, 101, 9]
    assert look(np.full(5000, 1, np.uint8)) == [0x0101010101010101, 5000, 1]
    assert look(0.5) == 0.5
    assert look(None) is None


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert percentiles("x", "s", list(range(1, 501))) == [("x, p50", "s", 250.5), ("x, p99", "s", 495)]
    assert percentiles("x", "s", [3.0, 1.0])[1] == ("x, p99", "s", 3.0)


def test_names_and_cores() -> None:
    assert [size_name(size) for size in SIZES] == ["64 B", "4 KiB", "256 KiB", "4 MiB", "20 MiB"]
    assert [pinned_core(i, [0, 1]) for i in range(3)] == [1, 1, 1]
    assert [pinned_core(i, [2, 4, 5]) for i in range(3)] == [4, 5, 4]
    assert pinned_core(1, [7]) == 7


def test_other_work_is_what_the_named_processes_do_not_do() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            while cpu_s(busy.pid) < 0.05:
                time.sleep(0.01)
            blamed, excused = OtherWork([os.getpid()]), OtherWork([os.getpid(), busy.pid])
            before_s, began_s = cpu_s(busy.pid), time.monotonic()
            time.sleep(0.5)
            difference = blamed.cores() - excused.cores()
            used = (cpu_s(busy.pid) - before_s) / (time.monotonic() - began_s)
        finally:
            busy.kill()
    assert used > 0.02
    assert 0.5 * used < difference < 2 * used + 0.1


def test_the_quietest_rounds_count_in_their_order() -> None:
    rounds = [Round(other_cores=cores) for cores in (0.5, 0.1, 0.9, 0.0, 0.3, 0.14)]
    assert quietest(rounds, 2) == [rounds[1], rounds[3]]  # both quiet: the first ones
    assert quietest(rounds, 4) == [rounds[1], rounds[3], rounds[4], rounds[5]]


def test_rows_become_measurements() -> None:
    rounds = [
        Round(
            {"vllm": [["a", "µs", 8.0 * i]], OURS: [["a", "µs", i], ["b", "messages/s", 1]], EXECUTOR: [["a", "µs", 9]]}
        )
        for i in (1, 2)
    ]
    limit = limits_from({"wake": 1.0, "late": 1.0, **{size_name(size): 2.0 for size in SIZES}})["4 MiB, p50"]
    found = measurements([OURS, "vllm", EXECUTOR], rounds, {"a": limit})
    assert [(m.name, m.samples) for m in found] == [
        ("a", {OURS: [1, 2], "vllm": [8, 16]}),
        ("b", {OURS: [1, 1]}),
        ("collective_rpc, a", {OURS: [9, 9]}),
    ]
    assert [m.higher_is_better for m in found] == [False, True, False]
    assert [m.limit for m in found] == [limit, None, None]


def test_limits_take_the_best_of_what_was_measured() -> None:
    sizes = {size_name(size): size / 1e4 for size in SIZES}
    slower = {name: 2 * us for name, us in sizes.items()}
    limits = limits_from({"wake": 30.0, "late": 100.0, **slower}, {"wake": 40.0, "late": 60.0, **sizes})
    assert "64 B, p50" not in limits
    assert "4 KiB, p50" not in limits
    assert limits["4 MiB, p50"].value == pytest.approx(419.4304)
    assert "10.0 GB/s" in limits["4 MiB, p50"].statement
    assert limits["after 1.5 s of silence"].value == 30.0
    assert limits["paced, over the work"].value == 120.0


def test_the_queue_of_each_engine_takes_part_once() -> None:
    specs = [
        EngineSpec("ringcore", ("py", "-m", "x"), ""),
        EngineSpec("vllm eager", ("vpy", "-m", "x"), "", settings={"mode": "eager"}, env={"A": "b"}),
        EngineSpec("vllm compiled", ("vpy", "-m", "x"), "", env={"A": "b"}),
    ]
    ours, vllm, executor = queue_specs(specs, SETTINGS)
    assert [spec.name for spec in (ours, vllm, executor)] == ["ringcore", "vllm", EXECUTOR]
    assert vllm.command == ("vpy", "-m", "benchmarks.peers.queue_vllm")
    assert executor.command == ("py", "-m", "benchmarks.peers.queue_executor")
    assert all(spec.settings == SETTINGS for spec in (ours, vllm, executor))
    assert dict(vllm.env) == {"A": "b"}
    with pytest.raises(BenchmarkError, match="--peer transformers: it has no message queue"):
        queue_specs([*specs, EngineSpec("transformers", ("py",), "")], SETTINGS)


@pytest.mark.parametrize("readers", ["0", "1,x", "", "-1"])
def test_numbers_of_readers_are_checked(readers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["message_queue", "--model", "/no/such/folder", f"--readers={readers}"]) == 2
    assert f"--readers {readers}: give numbers" in capsys.readouterr().err


QUEUE_MODULE = """
import vllm.envs as envs
from vllm.distributed.utils import StatelessProcessGroup, sched_yield
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import check_cgroup_memory_available
from vllm.utils.network_utils import get_open_zmq_inproc_path, get_open_zmq_ipc_path
init_logger(__name__).debug("loaded %s", envs.VLLM_USE_SPINLOOP_EXT)
class MessageQueue: path = get_open_zmq_ipc_path()
"""


def test_a_queue_is_loaded_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/sockets")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(sys.modules)
    try:
        folder = tmp_path / "vllm" / "distributed" / "device_communicators"
        folder.mkdir(parents=True)
        (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('no such device')")
        with pytest.raises(ImportError, match="PYTHONPATH=DIR"):
            load_queue_module()
        (folder / "shm_broadcast.py").write_text(QUEUE_MODULE)
        assert load_queue_module().MessageQueue.path.startswith("ipc:///sockets/")
        assert "RuntimeError: no such device" in capsys.readouterr().err
    finally:
        for name in sys.modules.keys() - before.keys():
            if name.partition(".")[0] == "vllm":
                del sys.modules[name]


@pytest.mark.long_form
def test_a_short_run(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_queue, "SETTLE_S", 0.0)
    monkeypatch.setattr(message_queue, "NUM_WAKES", 3)
    options = {"readers": "2", "transport": "memfd,far", "call_ring_bytes": 1 << 20, "pin": False, "quick": True}
    plan = make_plan(*engine_specs([], "eager"), rounds=1, **options)
    findings = MessageQueue().run(plan)
    rows = {measurement.name: measurement for measurement in findings.measurements}
    assert all(name.startswith(("2 readers, ", "2 far readers, ")) for name in rows)
    assert {"2 far readers, 64 B, p50", "2 far readers, 20 MiB, p99"} < rows.keys()
    assert not any(name.startswith("2 far readers, collective_rpc") for name in rows)
    assert all(len(m.samples[OURS]) == 1 and min(m.samples[OURS]) > 0 for m in rows.values())
    assert rows["2 readers, 1,000 B one way"].higher_is_better
    assert rows["2 readers, 20 MiB, p50"].limit is not None
    assert max(rows["2 far readers, death of a reader to the writer's error"].samples[OURS]) < 2000
    assert max(rows["2 readers, death of a reader to the writer's error"].samples[OURS]) < 1000
    assert {"2 readers, a core stolen, 64 B, p99", "2 readers, collective_rpc, 20 MiB, p50"} < rows.keys()
    assert "2 readers, collective_rpc, read-only call during a long one, p99" in rows
    assert list(findings.engines) == [OURS]
    machine = {"cpu": "c", "cores": 2, "memory_bytes": 1 << 30, "python": "3"}
    result = Result(
        benchmark="message_queue",
        command="x",
        date="2026-01-01",
        commit="c",
        machine=machine,
        rounds=2,
        findings=findings,
    )
    assert "| 2 readers, 64 B, p50, µs |" in render(result)
