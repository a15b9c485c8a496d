from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from ringcore.errors import ConfigError
from ringcore.worker.platforms import PLATFORMS, choose_platform
from ringcore.worker.platforms import cuda as cuda_module
from ringcore.worker.platforms.cpu import CpuPlatform
from ringcore.worker.platforms.cuda import CudaPlatform

MIB = 2**20


@pytest.mark.parametrize("name", PLATFORMS)
def test_every_platform_keeps_the_contract(name: str) -> None:
    if not PLATFORMS[name].is_present():
        pytest.skip(f"this host has no {name}")
    platform = choose_platform(name)
    assert 0 < platform.free_memory_bytes() <= platform.total_memory_bytes()
    assert 0 < platform.memory_budget_bytes(0.5, 1) <= platform.free_memory_bytes()
    assert 0 < platform.default_memory_share <= 1
    pages = platform.allocate_pages((2, 3, 5), torch.float16)
    assert pages.device.type == platform.device.type
    assert pages.dtype == torch.float16
    assert pages.shape == (2, 3, 5)
    assert not pages.any()
    platform.synchronize()


def test_pages_take_memory_only_as_they_are_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    pages = CpuPlatform().allocate_pages((4, 64, MIB), torch.bfloat16)  # 512 MiB
    pages[:, :, 7] = 1  # 256 places, 2 MiB apart
    assert process.memory_info().rss - before < 64 * MIB
    assert pages.sum() == 4 * 64
    assert pages.data_ptr() % 64 == 0


def test_auto_is_the_first_and_an_unknown_one_is_refused() -> None:
    assert isinstance(choose_platform("auto"), CudaPlatform if CudaPlatform.is_present() else CpuPlatform)
    with pytest.raises(ConfigError, match="give auto or one of cuda, cpu"):
        choose_platform("abacus")


class FakeCuda:
    """torch.cuda of a host with GPUs of 100 bytes: others have 20, this process 30, of which it does not use 10."""

    def __init__(self, count: int = 2, capability: tuple[int, int] = (9, 0)) -> None:
        self.count, self.capability, self.current = count, capability, None

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def set_device(self, device: torch.device) -> None:
        self.current = device

    def get_device_capability(self, device: torch.device) -> tuple[int, int]:
        return self.capability

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 50, 100

    def memory_reserved(self, device: torch.device) -> int:
        return 30

    def memory_allocated(self, device: torch.device) -> int:
        return 20


class TestCuda:
    def test_a_gpu_a_rank(self) -> None:
        cuda = FakeCuda()
        assert CudaPlatform(1, cuda).device == cuda.current == torch.device("cuda", 1)
        with pytest.raises(ConfigError, match="rank 2 needs GPU 2, and the process sees 2"):
            CudaPlatform(2, cuda)
        with pytest.raises(ConfigError, match="the process sees 0"):
            CudaPlatform(0, FakeCuda(count=0))

    def test_a_neighbour_takes_nothing_of_the_share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        platform = CudaPlatform(0, FakeCuda())
        assert platform.free_memory_bytes() == 60
        monkeypatch.setattr(cuda_module, "_bytes_by_nvml", lambda index: 30)
        assert platform.memory_budget_bytes(0.7, 1) == 70 - 20
        assert platform.memory_budget_bytes(0.9, 1) == 60, "no more than is free"
        monkeypatch.setattr(cuda_module, "_bytes_by_nvml", lambda index: None)
        assert platform.memory_budget_bytes(0.7, 1) == 70 - 40, "nobody can tell whose it is"
        assert platform.memory_budget_bytes(0.1, 1) == 0

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
        assert CudaPlatform(0, FakeCuda(capability=capability)).resolve_dtype(asked, checkpoint) == expected


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
    platform = CpuPlatform(proc=tmp_path)
    assert platform.resolve_dtype("auto", checkpoint) == expected
    assert platform.resolve_dtype("float16", checkpoint) == "float16"


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
