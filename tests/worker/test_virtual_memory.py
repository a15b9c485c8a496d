"""The rules of the fake device, and what the drivers' codes become."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from fake_ascendcl import INDEX, FakeAscend
from fake_drivers import FakeCudaDriver, FakeTorchCuda
from fake_virtual_memory import FakeVirtualMemory, Misuse, view

from ringcore.errors import CapacityError
from ringcore.worker.memory.ascend_memory import AscendVirtualMemory
from ringcore.worker.memory.cuda_memory import CudaVirtualMemory

PAGE = FakeVirtualMemory.granularity


def mapped(device: FakeVirtualMemory) -> tuple[int, int]:
    """(address, handle) of a page in a range of four."""
    address, handle = device.reserve(4 * PAGE), device.create(PAGE)
    device.map(address, PAGE, handle)
    return address, handle


MISUSES: dict[str, Callable[[FakeVirtualMemory, int, int], object]] = {
    "map: the memory is mapped elsewhere": lambda device, at, handle: device.map(at + PAGE, PAGE, handle),
    "map: addresses that are mapped": lambda device, at, handle: device.map(at, PAGE, device.create(PAGE)),
    "map: not all of the memory": lambda device, at, handle: device.map(at + PAGE, PAGE, device.create(2 * PAGE)),
    "map: addresses that are not": lambda device, at, handle: device.map(at + 4 * PAGE, PAGE, device.create(PAGE)),
    "map: no such memory": lambda device, at, handle: device.map(at + PAGE, PAGE, 99),
    "map: .* no multiples": lambda device, at, handle: device.map(at + PAGE, 100, handle),
    "set_access: addresses that": lambda device, at, handle: device.set_access(at + PAGE, PAGE),
    "unmap: not what one map": lambda device, at, handle: device.unmap(at + PAGE, PAGE),
    "release: the memory is mapped": lambda device, at, handle: device.release(handle),
    "release: no such memory": lambda device, at, handle: device.release(99),
    "free: something is mapped": lambda device, at, handle: device.free(at, 4 * PAGE),
    "free: not what one reserve": lambda device, at, handle: device.free(at, PAGE),
    "no memory behind it": lambda device, at, handle: device.check_access(view(at, PAGE, None)),  # not accessible yet
    "no memory behind": lambda device, at, handle: (
        device.set_access(at, PAGE),
        device.check_access(view(at, 2 * PAGE, None)),
    ),
}


@pytest.mark.parametrize("message", MISUSES)
def test_the_fake_refuses(message: str) -> None:
    device = FakeVirtualMemory()
    address, handle = mapped(device)
    with pytest.raises(Misuse, match=message):
        MISUSES[message](device, address, handle)


def test_the_fake_sees_what_is_left_and_what_is_in_use() -> None:
    device = FakeVirtualMemory(2 * PAGE)
    address, handle = mapped(device)
    device.set_access(address, PAGE)
    tensor = view(address, PAGE, None)
    assert int(tensor[5]) == 0xA5
    device.launch(tensor)
    with pytest.raises(Misuse, match="waited"):
        device.unmap(address, PAGE)
    with pytest.raises(CapacityError):
        device.create(2 * PAGE)
    with pytest.raises(AssertionError):
        device.check_nothing_left()
    device.synchronize()
    device.unmap(address, PAGE)
    device.release(handle)
    device.free(address, 4 * PAGE)
    device.check_nothing_left()


class TestCuda:
    def test_out_of_memory_has_the_numbers(self) -> None:
        device = FakeVirtualMemory(3 * PAGE)
        memory = CudaVirtualMemory(0, FakeCudaDriver(device), FakeTorchCuda(device))
        with pytest.raises(CapacityError, match=r"cuMemCreate on cuda:0: out of memory: .* asked") as error:
            memory.create(4 * PAGE)
        assert error.value.details == {"needed_bytes": 4 * PAGE, "available_bytes": 3 * PAGE}

    def test_what_torch_has_cached_is_given_up_first(self) -> None:
        device = FakeVirtualMemory(8 * PAGE)
        cuda = FakeTorchCuda(device, cached_bytes=6 * PAGE)
        memory = CudaVirtualMemory(0, FakeCudaDriver(device), cuda)
        memory.create(2 * PAGE)
        assert cuda.cached_bytes == 6 * PAGE, "kept while there is room"
        memory.create(5 * PAGE)
        assert (cuda.cached_bytes, device.free_bytes) == (0, PAGE)

    def test_any_other_code_is_the_drivers_words(self) -> None:
        device = FakeVirtualMemory()
        memory = CudaVirtualMemory(2, FakeCudaDriver(device, 2), FakeTorchCuda(device))
        device.fail_after("release", 0)
        with pytest.raises(RuntimeError, match=r"cuMemRelease on cuda:2: invalid value \(error 1\)"):
            memory.release(memory.create(PAGE))

    def test_reasons_against_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = FakeVirtualMemory()
        assert CudaVirtualMemory.refusal(1, FakeCudaDriver(device, 1)) is None
        reason = CudaVirtualMemory.refusal(1, FakeCudaDriver(device, 1, supported=0))
        assert reason == "GPU 1 has no virtual memory management"
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert CudaVirtualMemory.refusal(0) == "the package cuda-bindings is not installed"
        monkeypatch.setattr("importlib.util.find_spec", lambda name: "there")
        reason = CudaVirtualMemory.refusal(0)
        assert reason is not None
        assert reason.startswith("cuda.bindings.driver cannot be imported: ")


class TestAscend:
    def test_codes(self) -> None:
        device = FakeAscend(3 * PAGE)
        memory = device.memory
        assert memory.granularity == PAGE
        with pytest.raises(CapacityError, match=r"aclrtMallocPhysical on Ascend device 3: .* asked, .* free") as error:
            memory.create(4 * PAGE)
        assert error.value.details == {"needed_bytes": 4 * PAGE, "available_bytes": 3 * PAGE}
        device.fail_after("reserve", 0)
        with pytest.raises(RuntimeError, match="aclrtReserveMemAddress on Ascend device 3: error 507899"):
            memory.reserve(PAGE)

    def test_the_library_refuses_what_the_documentation_does(self) -> None:
        device = FakeAscend(8 * PAGE)
        memory = device.memory
        with pytest.raises(RuntimeError, match=r"aclrtMemGetAllocationGranularity .* error 107000"):
            AscendVirtualMemory(INDEX + 1, device.library)
        address, handle = memory.reserve(4 * PAGE), memory.create(PAGE)
        for call in (
            lambda: memory.create(PAGE + 1),
            lambda: memory.map(address + 4 * PAGE, PAGE, handle),
            lambda: memory.map(address, 2 * PAGE, handle),
            lambda: memory.unmap(address, PAGE),
            lambda: memory.free(address + PAGE, PAGE),
        ):
            with pytest.raises(RuntimeError, match="error 107000"):
                call()
        memory.map(address, PAGE, handle)
        tensor = view(address, PAGE, None)
        assert int(tensor[-1]) == 0xA5
        device.launch(tensor)
        for call in (
            lambda: memory.unmap(address, PAGE),  # the device was not waited for
            lambda: memory.release(handle),
            lambda: memory.free(address, 4 * PAGE),
            lambda: memory.map(address + PAGE, PAGE, handle),
        ):
            with pytest.raises(RuntimeError, match="error 107000"):
                call()
        memory.synchronize()
        memory.unmap(address, PAGE)
        memory.release(handle)
        memory.free(address, 4 * PAGE)
        device.check_nothing_left()
        assert device.free_bytes == 8 * PAGE

    def test_without_the_library(self) -> None:
        with pytest.raises(OSError, match="libascendcl"):
            AscendVirtualMemory(0)
