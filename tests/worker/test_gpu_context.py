"""The driver's calls by which a context begins, made of a library of our own."""

from __future__ import annotations

import ctypes

import pytest

from ringcore.worker.start_up import gpu_context
from ringcore.worker.start_up.gpu_context import begin_gpu_context, has_gpu_driver


class Driver:
    """Two GPUs."""

    def __init__(self, works: bool = True) -> None:
        self.works, self.calls = works, []

    def cuInit(self, flags):
        self.calls.append(("init", flags))
        return 0 if self.works else 100

    def cuDeviceGet(self, device, index):
        self.calls.append(("get", index))
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = 10 + index
        return 0 if index < 2 else 101

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.calls.append(("retain", device.value))
        return 0


@pytest.mark.parametrize(
    ("driver", "index", "calls"),
    [
        (Driver(), 1, [("init", 0), ("get", 1), ("retain", 11)]),
        (Driver(), 2, [("init", 0), ("get", 2)]),
        (Driver(works=False), 0, [("init", 0)]),
    ],
)
def test_the_context_of_the_ranks_own_gpu_is_made(monkeypatch, driver, index, calls):
    monkeypatch.setattr(gpu_context.ctypes, "CDLL", lambda name: driver)
    begin_gpu_context(index).join(10)
    assert driver.calls == calls


def test_a_host_without_a_driver_is_left_alone():
    thread = begin_gpu_context(0, "libno_such_driver.so.9")
    thread.join(10)
    assert not thread.is_alive()


def test_a_driver_is_a_library():
    assert has_gpu_driver("libc.so.6")
    assert not has_gpu_driver("libno_such_driver.so.9")
