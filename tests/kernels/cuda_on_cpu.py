"""Kernels in CUDA C++ on a CPU, by a C++ compiler and `cuda_on_cpu.h`."""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ringcore.kernels.launch.cuda_kernel import FLOAT, INT

COMPILER = shutil.which("g++") or shutil.which("clang++")
_HEADER = Path(__file__).with_name("cuda_on_cpu.h")
_ENTRY = """
extern "C" bool run(unsigned programs, unsigned threads, unsigned seed, {parameters}) {{
    return run_programs(programs, threads, seed, [&] {{ {name}({arguments}); }});
}}
"""


class Tensor(ctypes.Structure):
    """As in the header."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("shape", ctypes.c_uint64 * 4),
        ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 4),
        ("axes", ctypes.c_uint32),
        ("number_bytes", ctypes.c_uint32),
        ("is_swizzled", ctypes.c_uint32),
    )


class TensorMap(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


def tensor_map(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    is_swizzled: bool,
) -> TensorMap:
    """In place of `cuda_kernel.tensor_map`."""
    four = [*shape, *[1] * (4 - len(shape))], [dtype.itemsize, *strides, 0][:4], [*box, *[1] * (4 - len(box))]
    tensor = Tensor(
        pointer,
        (ctypes.c_uint64 * 4)(*four[0]),
        (ctypes.c_uint64 * 4)(*four[1]),
        (ctypes.c_uint32 * 4)(*four[2]),
        len(shape),
        dtype.itemsize,
        is_swizzled,
    )
    found = TensorMap()
    ctypes.memmove(ctypes.byref(found), ctypes.byref(tensor), ctypes.sizeof(tensor))
    return found


def launcher(source: Path, threads: int, seed: Callable[[], int], headers: Sequence[Path] = ()) -> Callable[..., None]:
    """In place of `CudaKernel.launch`, of a kernel that has this source."""

    def launch(programs: int, specialization: str, arguments: Callable[[], Sequence[tuple[Any, Any]]]) -> None:
        given = arguments()
        types = tuple(_type(value, kind) for value, kind in given)
        run = _compiled((*headers, source), specialization, types)
        values = [ctypes.byref(value) if kind is None else kind(value) for value, kind in given]
        assert run(programs, threads, seed(), *values), "no thread can go on"

    return launch


def _type(value: Any, kind: Any) -> str:
    """A structure has its name here, too."""
    return f"const {type(value).__name__}*" if kind is None else {INT: "int", FLOAT: "float"}.get(kind, "Pointer")


@functools.cache
def _compiled(sources: tuple[Path, ...], specialization: str, types: tuple[str, ...]) -> Any:
    parameters = ", ".join(f"{kind} a{i}" for i, kind in enumerate(types))
    arguments = ", ".join(f"*a{i}" if "*" in kind else f"a{i}" for i, kind in enumerate(types))
    entry = _ENTRY.format(parameters=parameters, name=sources[-1].stem, arguments=arguments)
    macros = "".join(f"#define {name} {value}\n" for name, value in json.loads(specialization)["macros"].items())
    includes = "".join(f'#include "{path}"\n' for path in sources)
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "kernel.cpp"
        code.write_text(f'#include "{_header()}"\n{macros}{includes}{entry}')
        _compile("-shared", str(code), "-o", f"{folder}/kernel.so")
        run = ctypes.CDLL(f"{folder}/kernel.so").run
    run.restype = ctypes.c_bool
    return run


@functools.cache
def _header() -> Path:
    """A copy of the header, which g++ takes compiled: a third of a kernel's compilation."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    copy = Path(shutil.copy(_HEADER, folder.name))
    _compile("-x", "c++-header", str(copy), "-o", f"{copy}.gch")
    return copy


def _compile(*arguments: str) -> None:
    assert COMPILER is not None
    subprocess.run([COMPILER, "-std=c++17", "-Og", "-w", "-Wno-psabi", "-fPIC", *arguments], check=True)
