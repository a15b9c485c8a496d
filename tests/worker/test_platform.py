from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from fake_drivers import FakeCudaDriver, FakeTorchCuda
from fake_virtual_memory import FakeVirtualMemory, view

from ringcore.errors import CapacityError, ConfigError
from ringcore.worker.platforms import PLATFORMS, choose_platform
from ringcore.worker.platforms import cuda as cuda_module
from ringcore.worker.platforms.cpu import CpuPlatform
from ringcore.worker.platforms.cuda import CudaPlatform
from ringcore.worker.platforms.platform import Platform, ProcessMemory

MIB = 2**20


@pytest.mark.parametrize("enable_sleep_mode", [False, True])
@pytest.mark.parametrize("name", PLATFORMS)
def test_every_platform_keeps_the_contract(name: str, enable_sleep_mode: bool) -> None:
    if not PLATFORMS[name].is_present():
        pytest.skip(f"this host has no {name}")
    platform = choose_platform(name, enable_sleep_mode=enable_sleep_mode)
    assert 0 < platform.free_memory_bytes() <= platform.total_memory_bytes()
    assert 0 < platform.memory_budget_bytes(platform.shared_memory_bytes(1) // 2) <= platform.free_memory_bytes()
    assert 0 < platform.default_memory_share <= 1
    for tag in ("weights", "kv_cache"):
        memory = [platform.allocate(num_bytes, tag) for num_bytes in (60, 0, 1000)]
        assert [len(tensor) for tensor in memory] == [60, 0, 1000]
        for tensor in memory:
            assert tensor.device.type == platform.device.type
            assert tensor.dtype == torch.uint8
            assert tensor.data_ptr() % 256 == 0
            assert tag == "weights" or not tensor.any()
        memory[2].view(torch.float16).view(10, 50).fill_(1)
        assert memory[2].view(torch.float16).sum() == 500
    if platform.measures_steps:
        assert platform.process_memory() is not None
        assert platform.peak_bytes(lambda: torch.ones(1 << 20, device=platform.device)) >= 1 << 20
    else:
        with pytest.raises(RuntimeError, match="not measured"):
            platform.peak_bytes(lambda: None)
    if enable_sleep_mode:
        check_arenas(platform, memory[2])
    assert platform.release_cached() >= 0
    platform.synchronize()
    del memory, tensor
    platform.close()
    platform.close()


def check_arenas(platform: Platform, pages: torch.Tensor) -> None:
    """What is mapped again can be cleared, and filled from the host."""
    assert platform.arenas.keys() == {"weights", "kv_cache"}
    arena = platform.arenas["kv_cache"]
    arena.unmap()
    arena.map()
    platform.clear_new(arena.contents())
    platform.synchronize()
    assert not pages.any()
    link, host = platform.host_link(), torch.arange(100, dtype=torch.uint8)
    link.register(host)
    link.wait(link.copy(host, pages[:100]))
    assert pages[:100].tolist() == list(range(100))
    back = link.copy(pages[50:150], host)
    link.finish()
    link.wait(back)
    assert host.tolist() == [*range(50, 100), *[0] * 50]
    link.unregister(host)


def test_a_cpu_sleeps_in_arenas_of_its_own() -> None:
    assert CpuPlatform().arenas == {}
    platform = choose_platform("cpu", device_memory="arena", enable_sleep_mode=True)
    process = psutil.Process()
    before = process.memory_info().rss
    pages = platform.allocate(512 * MIB, "kv_cache")
    pages[::MIB] = 1
    assert process.memory_info().rss - before < 64 * MIB, "pages take memory only as they are written"
    platform.arenas["kv_cache"].unmap()
    platform.arenas["kv_cache"].map()
    platform.clear_new(pages)
    assert process.memory_info().rss - before < 64 * MIB
    assert not pages[::MIB].any()
    with pytest.raises(CapacityError, match=r"host memory: .* asked"):
        platform.allocate(platform.total_memory_bytes(), "weights")
    platform.close()


def test_pages_take_memory_only_as_they_are_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    pages = CpuPlatform().allocate(512 * MIB, "kv_cache").view(torch.bfloat16).view(4, 64, MIB)
    pages[:, :, 7] = 1  # 256 places, 2 MiB apart
    assert process.memory_info().rss - before < 64 * MIB
    assert pages.sum() == 4 * 64
    assert pages.data_ptr() % 64 == 0


def test_auto_is_the_first_and_an_unknown_one_is_refused() -> None:
    assert isinstance(choose_platform("auto"), CudaPlatform if CudaPlatform.is_present() else CpuPlatform)
    with pytest.raises(ConfigError, match="give auto or one of cuda, cpu"):
        choose_platform("abacus")


class FakeCuda(FakeTorchCuda):
    """torch.cuda of a host with GPUs of 100 bytes: others have 20, this process 30, of which it does not use 10."""

    def __init__(self, count: int = 2, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__(FakeVirtualMemory())
        self.count, self.capability = count, capability
        self.current: torch.device | None = None
        self.reserved, self.peak = 30, 30

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def set_device(self, device: torch.device) -> None:
        self.current = device

    def get_device_capability(self, device: torch.device) -> tuple[int, int]:
        return self.capability

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid="a-b")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 50, 100

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def memory_allocated(self, device: torch.device) -> int:
        return 20

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.reserved

    def max_memory_reserved(self, device: torch.device) -> int:
        return self.peak


class TestCuda:
    def test_a_gpu_a_rank(self) -> None:
        cuda = FakeCuda()
        assert CudaPlatform(1, cuda, "plain").device == cuda.current == torch.device("cuda", 1)
        with pytest.raises(ConfigError, match="rank 2 needs GPU 2, and the process sees 2"):
            CudaPlatform(2, cuda)
        with pytest.raises(ConfigError, match="the process sees 0"):
            CudaPlatform(0, FakeCuda(count=0))

    @pytest.mark.parametrize("own", [30, 45])
    def test_a_neighbour_takes_nothing_of_the_share(self, monkeypatch: pytest.MonkeyPatch, own: int) -> None:
        platform = CudaPlatform(0, FakeCuda(), "plain")
        assert platform.free_memory_bytes() == 60
        asked: list[tuple[str, int]] = []

        def by_nvml(uuid: str, pid: int) -> int:
            asked.append((uuid, pid))
            return own

        monkeypatch.setattr(cuda_module, "process_bytes", by_nvml)
        assert platform.memory_budget_bytes(70) == 70 - (own - 10)
        assert platform.memory_budget_bytes(100) == 60, "no more than is free"
        assert asked[0] == ("a-b", os.getpid())
        assert platform.process_memory() == ProcessMemory(own, 30, 0)
        assert platform.process_memory().non_torch_bytes == own - 30

    @pytest.mark.parametrize("told", [None, 29])
    def test_what_nobody_can_tell_is_all_that_is_in_use(
        self, monkeypatch: pytest.MonkeyPatch, told: int | None
    ) -> None:
        """29 is less than torch alone has here: a process of another namespace has this number."""
        platform = CudaPlatform(0, FakeCuda(), "plain")
        monkeypatch.setattr(cuda_module, "process_bytes", lambda uuid, pid: told)
        assert platform.process_memory() == ProcessMemory(50, 30, 0)
        assert platform.memory_budget_bytes(70) == 70 - 40
        assert platform.memory_budget_bytes(10) == -30

    def test_the_peak_is_what_torch_reserves_beside_what_it_had(self) -> None:
        cuda = FakeCuda()
        platform = CudaPlatform(0, cuda, "plain")
        cuda.peak = 99

        def run() -> None:
            cuda.peak = 47

        assert platform.peak_bytes(run) == 17

    def test_memory_comes_from_an_arena(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda, device = FakeCuda(), FakeVirtualMemory(256 * MIB)
        cuda.memory = device
        cuda.mem_get_info = lambda device: (1 << 40, 1 << 40)  # type: ignore[method-assign]
        monkeypatch.setattr(cuda_module, "tensor_at", lambda address, n, owner, device: view(address, n, owner))
        monkeypatch.setattr(cuda_module, "process_bytes", lambda uuid, pid: 200 * MIB)
        platform = CudaPlatform(0, cuda, "arena", FakeCudaDriver(device))
        assert device.reserved == {}, "nothing is taken before it is asked for"
        weights, pages = platform.allocate(1000, "weights"), platform.allocate(3 * MIB, "kv_cache")
        device.check_access(weights)
        assert not pages.any(), "pages are zero-filled"
        assert platform.process_memory() == ProcessMemory(200 * MIB, 30, 128 * MIB)
        platform.close()
        device.check_nothing_left()

    def test_the_option_decides(self, caplog: pytest.LogCaptureFixture) -> None:
        device = FakeVirtualMemory()
        without = FakeCudaDriver(device, supported=0)
        with pytest.raises(ConfigError, match="device_memory='arena': GPU 0 has no virtual memory") as error:
            CudaPlatform(0, FakeCuda(), "arena", without)
        assert error.value.details == {"option": "device_memory", "value": "arena"}
        with caplog.at_level("INFO"):
            CudaPlatform(0, FakeCuda(), "auto", without)
            CudaPlatform(0, FakeCuda(), "plain", FakeCudaDriver(device))
        assert [record.getMessage().rpartition("arenas, ")[2] for record in caplog.records] == [
            "since GPU 0 has no virtual memory management",
            "as device_memory='plain' asks",
        ]
        with pytest.raises(ConfigError, match="a CPU has no arenas without enable_sleep_mode"):
            choose_platform("cpu", device_memory="arena")

    def test_sleep_mode_needs_arenas(self) -> None:
        device = FakeVirtualMemory()
        without = FakeCudaDriver(device, supported=0)
        assert CudaPlatform(0, FakeCuda(), "auto", without).arenas == {}
        with pytest.raises(ConfigError, match=r"GPU 0 has no virtual memory .*pip install") as error:
            CudaPlatform(0, FakeCuda(), "auto", without, enable_sleep_mode=True)
        assert error.value.details == {"option": "enable_sleep_mode", "value": True}
        with pytest.raises(ConfigError, match="device_memory=plain has none"):
            CudaPlatform(0, FakeCuda(), "plain", FakeCudaDriver(device), enable_sleep_mode=True)

    def test_what_torch_has_cached_goes_back(self) -> None:
        cuda = FakeCuda()
        cuda.empty_cache = lambda: setattr(cuda, "reserved", 20)  # type: ignore[method-assign]
        platform = CudaPlatform(0, cuda, "plain")
        assert [platform.release_cached(), platform.release_cached()] == [10, 0]

    @pytest.mark.parametrize(
        ("asked", "checkpoint", "capability", "expected"),
        [
            ("auto", "bfloat16", (9, 0), "bfloat16"),
            ("auto", "bfloat16", (7, 5), "float16"),
            ("auto", "float32", (7, 5), "float32"),
            ("float32", "bfloat16", (9, 0), "float32"),
        ],
    )
    def test_dtype(self, asked: str, checkpoint: str, capability: tuple[int, int], expected: str) -> None:
        assert CudaPlatform(0, FakeCuda(capability=capability), "plain").resolve_dtype(asked, checkpoint) == expected


@pytest.mark.parametrize(
    ("flags", "checkpoint", "expected"),
    [
        ("fpu avx2 amx_bf16", "bfloat16", "bfloat16"),
        ("fpu avx512_bf16", "bfloat16", "bfloat16"),
        ("fpu avx2 avx512f", "bfloat16", "float32"),
        ("fpu amx_bf16 avx512_fp16", "float16", "float32"),
        ("fpu amx_bf16", "float32", "float32"),
    ],
)
def test_auto_takes_half_formats_only_where_they_are_fast(
    tmp_path: Path, flags: str, checkpoint: str, expected: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: x\nflags\t\t: {flags}\nprocessor\t: 1\n")
    platform = CpuPlatform(proc=tmp_path, is_bfloat16_faster=lambda: True)
    assert platform.resolve_dtype("auto", checkpoint) == expected
    assert platform.resolve_dtype("float16", checkpoint) == "float16"
    slower = CpuPlatform(proc=tmp_path, is_bfloat16_faster=lambda: False)
    assert slower.resolve_dtype("auto", checkpoint) == "float32"
    assert slower.resolve_dtype("bfloat16", checkpoint) == "bfloat16"


def test_without_cpuinfo_auto_is_float32(tmp_path: Path) -> None:
    assert CpuPlatform(proc=tmp_path).resolve_dtype("auto", "bfloat16") == "float32"


def write_group(folder: Path, limit: str, used: int, cache: int, names: tuple[str, str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def make_platform(tmp_path: Path, cgroup: str) -> CpuPlatform:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    return CpuPlatform(tmp_path / "proc", tmp_path / "cgroups")


def test_a_control_groups_limit_counts_and_its_file_cache_does_not(tmp_path: Path) -> None:
    platform = make_platform(tmp_path, "0::/a/b\n")
    write_group(tmp_path / "cgroups/a/b", str(100 * MIB), 60 * MIB, 10 * MIB, V2)
    assert platform.total_memory_bytes() == 100 * MIB
    assert platform.free_memory_bytes() == 50 * MIB


def test_the_tightest_of_nested_groups_decides(tmp_path: Path) -> None:
    platform = make_platform(tmp_path, "0::/a/b\n")
    write_group(tmp_path / "cgroups/a/b", "max", 10 * MIB, 0, V2)
    write_group(tmp_path / "cgroups/a", str(80 * MIB), 70 * MIB, 5 * MIB, V2)
    assert (platform.total_memory_bytes(), platform.free_memory_bytes()) == (80 * MIB, 15 * MIB)


def test_version_1_groups(tmp_path: Path) -> None:
    platform = make_platform(tmp_path, "12:cpu,cpuacct:/x\n5:memory:/y\n")
    write_group(tmp_path / "cgroups/memory/y", str(64 * MIB), 70 * MIB, 1 * MIB, V1)
    assert (platform.total_memory_bytes(), platform.free_memory_bytes()) == (64 * MIB, 0)


def test_without_groups_it_is_the_hosts_memory(tmp_path: Path) -> None:
    assert make_platform(tmp_path, "0::/\n").total_memory_bytes() == psutil.virtual_memory().total
    assert CpuPlatform(tmp_path, tmp_path).total_memory_bytes() == psutil.virtual_memory().total
