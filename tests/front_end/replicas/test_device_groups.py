"""The devices and ports of engines that share a host."""

from __future__ import annotations

import pytest

from ringcore.errors import ConfigError
from ringcore.front_end.replicas.device_groups import options_of_engines


class HostWith:
    def __init__(self, has_gpu: bool) -> None:
        self._has_gpu = has_gpu

    def has_gpu(self) -> bool:
        return self._has_gpu


def test_engines_on_gpus_have_their_own():
    engines = options_of_engines({"tensor_parallel_size": 2}, 3, HostWith(True))
    assert [one["device_ids"] for one in engines] == [[0, 1], [2, 3], [4, 5]]
    assert {one["device"] for one in engines} == {"cuda"}  # so that none falls back to the CPU
    engines = options_of_engines({"device_ids": [7, 3], "device": "cuda"}, 2, HostWith(True))
    assert [one["device_ids"] for one in engines] == [[7], [3]]
    with pytest.raises(ConfigError, match="2 engines of 1 ranks need 2 GPUs"):
        options_of_engines({"device_ids": [1]}, 2, HostWith(True))


@pytest.mark.parametrize(("device", "has_gpu"), [("cpu", True), ("auto", False)])
def test_engines_on_a_cpu_divide_its_memory(device, has_gpu):
    engines = options_of_engines({"device": device}, 3, HostWith(has_gpu))
    assert [one["gpu_memory_utilization"] for one in engines] == [0.25] * 3
    assert all("device_ids" not in one for one in engines)
    asked = options_of_engines({"device": device, "gpu_memory_utilization": 0.1}, 3, HostWith(has_gpu))
    assert [one["gpu_memory_utilization"] for one in asked] == [0.1] * 3


def test_one_engine_has_what_was_asked_for():
    assert options_of_engines({"model": "m", "max_worker_restarts": 0}, 1) == [{"model": "m", "max_worker_restarts": 0}]


def test_every_engine_has_an_admin_port_of_its_own():
    host = HostWith(False)
    engines = options_of_engines({"admin_endpoint": "tcp://127.0.0.1:5600"}, 3, host)
    assert [one["admin_endpoint"] for one in engines] == [f"tcp://127.0.0.1:{port}" for port in (5600, 5601, 5602)]
    picked = options_of_engines({"admin_endpoint": "tcp://127.0.0.1:0"}, 2, host)
    assert [one["admin_endpoint"] for one in picked] == ["tcp://127.0.0.1:0"] * 2
    assert all("admin_endpoint" not in one for one in options_of_engines({}, 2, host))
