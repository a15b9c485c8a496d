"""An executor of one's own, of nothing but what the table of seams in ARCHITECTURE.md names."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from fake_engine import FakeUniproc, FakeWorker, make_model_folder

import ringcore
from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.errors import EngineDeadError
from ringcore.executor.base import Executor
from ringcore.executor.futures import StepInProcess
from ringcore.executor.in_process import call_workers, report_of, worker_health
from ringcore.executor.rpc_call import EncodedCall, RpcFuture, check_reply_rank
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.worker.rpc import rpc_methods

PROMPTS = ([1, 2, 3], [4, 5, 6, 7, 8], [9])


class Step(StepInProcess):
    """A step that is computed when it is asked for."""

    def __init__(self, compute) -> None:
        super().__init__(0)
        self._compute = compute

    def _poll(self) -> None:
        self.settle(self._compute())

    def _wait(self, timeout: float | None) -> None:
        self._poll()


class LazyExecutor(Executor):
    """One worker in this process."""

    def start(self) -> dict[str, float]:
        self._workers = [FakeWorker(self.config, 0)]
        self._is_shut = False
        self.methods = rpc_methods(self._workers[0])
        for method in ("init_device", "load_model"):
            self.collective_rpc(method)
        return {"start_workers": 0.0}

    def restart(self) -> dict[str, float]:
        return self.start()

    def forward(self, call: EncodedCall) -> RpcFuture:
        self.check()
        check_reply_rank(call.unique_reply_rank, self.config.parallel.layout.world_size)
        return call_workers(self._workers, call, time.monotonic())

    def execute_model(self, scheduler_output) -> RpcFuture:
        self.check()
        return Step(lambda: self._workers[0].execute_model(scheduler_output))

    def check(self) -> None:
        if self._is_shut:
            raise EngineDeadError("the worker was shut down", process="worker 0")

    def wait_fds(self) -> list[int]:
        return []

    def pids(self) -> dict[str, int]:
        return {}

    def health(self):
        return [worker_health(0, None, 0.0, 0)]

    def oldest_step_s(self) -> float | None:
        return None

    def diagnose(self) -> str:
        return report_of(self.health(), "lazy")

    def shutdown(self) -> None:
        self._is_shut = True


def tokens(config: EngineConfig) -> list[list[int]]:
    got: dict[str, list[int]] = {str(i): [] for i in range(len(PROMPTS))}
    with EngineCore(config) as core:
        for i, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=5, ignore_eos=True)
            core.add_request(EngineCoreRequest(str(i), prompt, params, arrival_s=0.0))
        while core.has_unfinished:
            for output in core.step().outputs:
                got[output.request_id] += output.new_token_ids
        assert core.collective_rpc("echo", ("x",)) == ["0:x"]
        assert core.health().ranks[0].rank == 0
    with pytest.raises(EngineDeadError):
        core.collective_rpc("echo", ("x",))
    return list(got.values())


def test_it_runs_an_engine(tmp_path):
    folder = make_model_folder(tmp_path)
    own = EngineConfig.from_options(
        model=folder, load_format="dummy", device="cpu", executor=f"{__name__}:LazyExecutor"
    )
    expected = EngineConfig.from_options(model=folder, load_format="dummy", device="cpu", executor=FakeUniproc)
    found = tokens(own)
    assert all(len(one) == 5 for one in found)
    assert found == tokens(expected)


def test_the_table_names_every_module_that_it_takes():
    page = Path(ringcore.__file__).parent.parent / "ARCHITECTURE.md"
    (row,) = (line for line in page.read_text().splitlines() if line.startswith("| an executor |"))
    used = set(re.findall(r"^from ringcore\.(executor\.\w+)", Path(__file__).read_text(), re.MULTILINE))
    assert used <= {name.replace("/", ".") for name in re.findall(r"`(executor/\w+)\.py`", row)}
