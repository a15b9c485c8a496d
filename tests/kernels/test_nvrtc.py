"""Compilation of CUDA C++ by NVRTC, of which the interface is faked."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ringcore.kernels.launch.nvrtc import NvrtcError, compile_cuda, nvrtc_version


class Result(enum.IntEnum):
    NVRTC_SUCCESS = 0
    NVRTC_ERROR_COMPILATION = 6


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library which compiles to its options; a source with "error" it refuses."""
    fake: Any = SimpleNamespace(compiled=[], destroyed=0, version=(13, 0))

    def create(source: bytes, name: bytes, num_headers: int, headers: list[bytes], names: list[bytes]) -> Any:
        return Result.NVRTC_SUCCESS, SimpleNamespace(source=source, options=b"")

    def compile_program(program: Any, count: int, options: list[bytes]) -> Any:
        assert count == len(options)
        program.options = b" ".join(options)
        fake.compiled.append(program.options)
        return (Result.NVRTC_ERROR_COMPILATION if b"error" in program.source else Result.NVRTC_SUCCESS,)

    def fill(text: str) -> Any:
        def filled(program: Any, buffer: bytes) -> Any:
            # As the bindings do: into the caller's bytes.
            import ctypes

            content = program.options if text == "cubin" else b"kernel.cu(1): expected a ;"
            ctypes.memmove(buffer, content, len(content))
            return (Result.NVRTC_SUCCESS,)

        return filled

    def destroy(program: Any) -> Any:
        fake.destroyed += 1
        return (Result.NVRTC_SUCCESS,)

    fake.nvrtcVersion = lambda: (Result.NVRTC_SUCCESS, *fake.version)
    fake.nvrtcCreateProgram, fake.nvrtcCompileProgram = create, compile_program
    fake.nvrtcGetProgramLogSize = lambda program: (Result.NVRTC_SUCCESS, 26)
    fake.nvrtcGetCUBINSize = lambda program: (Result.NVRTC_SUCCESS, len(program.options))
    fake.nvrtcGetProgramLog, fake.nvrtcGetCUBIN = fill("log"), fill("cubin")
    fake.nvrtcDestroyProgram = destroy
    bindings: Any = ModuleType("cuda.bindings")
    bindings.nvrtc = fake
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    nvrtc_version.cache_clear()
    yield fake
    nvrtc_version.cache_clear()


def test_a_cubin_is_compiled_once_and_kept(nvrtc: Any, tmp_path: Path) -> None:
    folder = tmp_path / "cubins"
    cubin = compile_cuda("source", "sm_90a", ["A=1"], folder)
    assert cubin == b"--gpu-architecture=sm_90a --std=c++17 -DA=1"
    assert compile_cuda("source", "sm_90a", ["A=1"], folder) == cubin
    assert len(nvrtc.compiled) == nvrtc.destroyed == 1
    for other in (("source", "sm_90a", ["A=2"]), ("other", "sm_90a", ["A=1"]), ("source", "sm_100a", ["A=1"])):
        compile_cuda(*other, folder)
    nvrtc.version = 13, 1
    nvrtc_version.cache_clear()
    compile_cuda("source", "sm_90a", ["A=1"], folder)
    assert len(nvrtc.compiled) == len(list(folder.iterdir())) == 5
    assert folder.stat().st_mode & 0o077 == 0


def test_a_cubin_that_cannot_be_kept_is_used(nvrtc: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert compile_cuda("source", "sm_90a", [], tmp_path / "file" / "folder").startswith(b"--gpu")


def test_the_log_of_a_failure_is_in_the_error(nvrtc: Any, tmp_path: Path) -> None:
    with pytest.raises(NvrtcError, match=r"nvrtcCompileProgram: NVRTC_ERROR_COMPILATION: kernel.cu\(1\): expected a ;"):
        compile_cuda("error", "sm_90a", [], tmp_path)
    assert nvrtc.destroyed == 1
    assert not list(tmp_path.iterdir())


def test_without_the_library(nvrtc: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def not_found() -> Any:
        raise RuntimeError("libnvrtc.so.13 is not found")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", not_found)
    nvrtc_version.cache_clear()
    assert nvrtc_version() is None
    with pytest.raises(NvrtcError, match="NVRTC is not installed"):
        compile_cuda("source", "sm_90a", [], tmp_path)
