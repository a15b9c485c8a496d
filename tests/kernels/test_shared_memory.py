"""The shared-memory carve-out that is set for a kernel's programs."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from ringcore.kernels.launch import shared_memory
from ringcore.kernels.launch.shared_memory import prefer_cache, prefer_carveout, take_all_shared_memory

GPU = torch.device("cuda", 0)
CARVE_OUT = "CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT"


@pytest.fixture
def driver(monkeypatch):
    """A driver that notes what is asked, for a GPU of 233,472 bytes an SM."""
    asked: list[tuple] = []
    code = [0]

    def set_attribute(function, attribute, value):
        asked.append((function, attribute, value))
        return (code[0],)

    fake = SimpleNamespace(
        asked=asked,
        code=code,
        CUfunction=lambda handle: ("function", handle),
        CUfunction_attribute=SimpleNamespace(**{CARVE_OUT: 9}),
        cuFuncSetAttribute=set_attribute,
    )
    bindings = ModuleType("cuda.bindings")
    bindings.driver = fake
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    properties = SimpleNamespace(shared_memory_per_multiprocessor=233472)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(shared_memory, "_set_carveout", shared_memory._set_carveout.__wrapped__)
    monkeypatch.setattr(shared_memory, "_set_none", shared_memory._set_none.__wrapped__)
    monkeypatch.setattr(shared_memory, "_TAKEN", set())
    return fake


def kernel(shared, n_regs=100, num_warps=4):
    return SimpleNamespace(function=77, n_regs=n_regs, metadata=SimpleNamespace(shared=shared, num_warps=num_warps))


@pytest.mark.parametrize(("shared", "percent"), [(143360, 62), (232448, 100), (0, 0), (1, 1)])
def test_as_much_as_one_program_has(driver, shared, percent):
    prefer_carveout(kernel(shared), 1, GPU)
    assert driver.asked == [(("function", 77), 9, percent)]


@pytest.mark.parametrize(
    ("shared", "n_regs", "num_warps", "programs_per_sm", "percent"),
    [
        (73728, 168, 4, 2, 65),  # three would have room
        (73728, 161, 4, 2, 65),  # which is 168 too
        (73728, 169, 4, 2, None),  # no registers for three
        (73728, 100, 8, 2, None),
        (77312, 168, 4, 2, None),  # no memory for three
        (73728, 168, 4, 3, None),
        (49152, 80, 4, 3, 65),
    ],
)
def test_no_room_for_more_programs_than_there_are(driver, shared, n_regs, num_warps, programs_per_sm, percent):
    prefer_carveout(kernel(shared, n_regs, num_warps), programs_per_sm, GPU)
    assert [asked for _, _, asked in driver.asked] == ([] if percent is None else [percent])


def test_no_kernel_no_carveout(driver):
    prefer_carveout(None, 1, GPU)
    assert not driver.asked


def test_errors_of_the_driver_are_raised(driver):
    driver.code[0] = 400
    with pytest.raises(RuntimeError, match="carve-out of 62%: 400"):
        prefer_carveout(kernel(143360), 1, GPU)


def test_without_a_driver_nothing_happens(driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    prefer_carveout(kernel(143360), 1, GPU)
    assert not driver.asked


@triton.jit
def _add_one(x, size: tl.constexpr):
    at = x + tl.arange(0, size)
    tl.store(at, tl.load(at) + 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu(device):
    bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    numbers = torch.zeros(64, device=device)
    launched = _add_one[(1,)](numbers, size=64)
    prefer_carveout(launched, 1, device)
    _add_one[(1,)](numbers, size=64)
    assert (numbers == 2).all()
    attribute = getattr(bindings.CUfunction_attribute, CARVE_OUT)
    code, percent = bindings.cuFuncGetAttribute(attribute, bindings.CUfunction(launched.function))
    assert (int(code), percent) == (0, 0)  # it has no shared memory


def test_all_of_it_where_kernels_take_all(driver):
    prefer_cache(kernel(0), GPU)
    assert not driver.asked
    take_all_shared_memory(GPU)
    prefer_carveout(kernel(143360), 1, GPU)
    prefer_carveout(kernel(73728, 100), 2, GPU)  # of which three would have room
    prefer_cache(kernel(0), GPU)
    prefer_carveout(kernel(143360), 1, torch.device("cuda", 1))
    assert [percent for _, _, percent in driver.asked] == [100, 65, 0, 62]
    prefer_cache(None, GPU)  # the interpreter, or an intercepted launch
    assert len(driver.asked) == 4
