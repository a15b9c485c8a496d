from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ringcore.worker.memory.nvml import GpuMonitor, process_bytes


class FakeNvml:
    """pynvml of a host with one GPU; `devices`: its handles by uuid; `processes`: (pid, bytes) on any of them."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotFound(NVMLError):
        pass

    def __init__(self, devices: tuple[str, ...], processes: list[tuple[int, int | None]], failing: str = "") -> None:
        self.devices, self.processes, self.failing, self.depth = devices, processes, failing, 0

    def _called(self, name: str) -> None:
        if name == self.failing:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:
        self._called("nvmlInit")
        self.depth += 1

    def nvmlShutdown(self) -> None:
        self.depth -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._called("nvmlDeviceGetHandleByUUID")
        if uuid not in self.devices:
            raise self.NVMLError_NotFound(uuid)
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        assert handle in self.devices
        self._called("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._called("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._called("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(used=30, free=50, total=80)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._called("nvmlDeviceGetPowerUsage")
        return 412_500


class TestNvml:
    @pytest.fixture
    def told(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        def tell(nvml: FakeNvml, uuid: str = "a-b") -> int | None:
            monkeypatch.setitem(sys.modules, "pynvml", nvml)
            found = process_bytes(uuid, 7)
            assert nvml.depth == 0, "left open"
            return found

        return tell

    @pytest.mark.parametrize(
        ("processes", "expected"),
        [
            ([(7, 30)], 30),
            ([(6, 11), (7, 30), (8, 12)], 30),
            ([(7, 30), (7, 5)], 35),  # of two instances on one card
            ([(7, None)], None),
            ([(7, 30), (7, None)], None),
            ([(4242, 30)], None),  # the host's number of this process
            ([], None),
        ],
    )
    def test_this_process_among_others(
        self, told: Any, processes: list[tuple[int, int | None]], expected: int | None
    ) -> None:
        assert told(FakeNvml(("GPU-a-b",), processes)) == expected

    @pytest.mark.parametrize("uuid", ["a-b", "GPU-a-b", "MIG-a-b"])
    @pytest.mark.parametrize("kind", ["GPU-", "MIG-"])
    def test_a_card_or_an_instance_of_one(self, told: Any, kind: str, uuid: str) -> None:
        assert told(FakeNvml((f"{kind}a-b",), [(7, 30)]), uuid) == 30

    @pytest.mark.parametrize(
        "failing", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetComputeRunningProcesses"]
    )
    def test_errors_are_not_known(self, told: Any, failing: str) -> None:
        assert told(FakeNvml(("GPU-a-b",), [(7, 30)], failing)) is None

    def test_a_card_it_does_not_know(self, told: Any) -> None:
        assert told(FakeNvml(("GPU-c-d",), [(7, 30)])) is None

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert process_bytes("a-b", 7) is None


MEMORY = {"gpu_used_bytes": 30, "gpu_total_bytes": 80}
POWER = {"gpu_power_w": 412.5}
PERCENT = {"gpu_percent": 87.0}


class TestGpuMonitor:
    """Its figures are those of NVML; what NVML does not know is left out, and without it there are none."""

    @pytest.mark.parametrize(
        ("failing", "expected"),
        [
            ("", PERCENT | MEMORY | POWER),
            ("nvmlDeviceGetUtilizationRates", MEMORY | POWER),
            ("nvmlDeviceGetPowerUsage", PERCENT | MEMORY),
            ("nvmlInit", {}),
            ("nvmlDeviceGetHandleByUUID", {}),
        ],
    )
    def test_figures(self, monkeypatch: pytest.MonkeyPatch, failing: str, expected: dict[str, float]) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(("GPU-a-b",), [], failing))
        monitor = GpuMonitor(lambda: "a-b")
        assert [monitor.usage(), monitor.usage()] == [expected, expected]

    def test_nvml_is_loaded_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvml = FakeNvml(("GPU-a-b",), [])
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monitor = GpuMonitor(lambda: "a-b")
        for _ in range(3):
            monitor.usage()
        assert nvml.depth == 1

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert GpuMonitor(lambda: "a-b").usage() == {}
