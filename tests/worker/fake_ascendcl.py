"""The stand-in for libascendcl in fake_ascendcl.c, built and loaded, and what its device looks like."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from ctypes import POINTER, c_char, c_char_p, c_int, c_uint64
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_virtual_memory import FakeDevice

from ringcore.worker.memory.ascend_memory import AscendVirtualMemory

__all__ = ["INDEX", "FakeAscend", "load_library"]

INDEX = 3  # the only device that the library has
_MAX_ENTRIES = 512
_FUNCTIONS = {
    "reserve": "aclrtReserveMemAddress",
    "create": "aclrtMallocPhysical",
    "map": "aclrtMapMem",
    "unmap": "aclrtUnmapMem",
    "release": "aclrtFreePhysical",
    "free": "aclrtReleaseMemAddress",
    "synchronize": "aclrtSynchronizeDevice",
    "set_access": "none: what is mapped can be used",
}


@functools.cache
def load_library() -> Any:
    """Skips the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the stand-in for libascendcl with")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "libascendcl.so"
        source = Path(__file__).with_name("fake_ascendcl.c")
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(target), str(source)]
        subprocess.run(command, check=True, timeout=60)
        library = ctypes.CDLL(str(target))
    library.fake_start.argtypes = (c_uint64,)
    library.fake_fail.argtypes = (c_char_p, c_int)
    library.fake_entries.argtypes = (c_char, POINTER(c_uint64))
    library.fake_free_bytes.restype = c_uint64
    return library


class FakeAscend(FakeDevice):
    """Its state is the library's, of which a process has one: one device at a time."""

    def __init__(self, physical_bytes: int) -> None:
        self.library = load_library()
        self.library.fake_start(physical_bytes)
        self.memory = AscendVirtualMemory(INDEX, self.library)
        self.check_nothing_left()

    def _entries(self, which: bytes) -> list[tuple[int, int, int]]:
        """(address or file, bytes, handle)"""
        out = (c_uint64 * (3 * _MAX_ENTRIES))()
        count = self.library.fake_entries(which, out)
        return [(out[i], out[i + 1], out[i + 2]) for i in range(0, 3 * count, 3)]

    @property
    def free_bytes(self) -> int:  # type: ignore[override]
        return int(self.library.fake_free_bytes())

    @property
    def reserved(self) -> Mapping[int, int]:  # type: ignore[override]
        return {address: size for address, size, _ in self._entries(b"r")}

    @property
    def mapped(self) -> Mapping[int, tuple[int, int]]:  # type: ignore[override]
        return {address: (size, handle) for address, size, handle in self._entries(b"m")}

    @property
    def handles(self) -> Mapping[int, Any]:  # type: ignore[override]
        return {handle: (file, size) for file, size, handle in self._entries(b"h")}

    @property
    def accessible(self) -> Collection[int]:  # type: ignore[override]
        return self.mapped.keys()

    def launch(self, tensor: torch.Tensor) -> None:
        self.check_access(tensor)
        self.library.fake_launch()

    def fail_after(self, name: str, count: int) -> None:
        self.library.fake_fail(_FUNCTIONS[name].encode(), count)

    def create(self, num_bytes: int) -> Any:
        return self.memory.create(num_bytes)

    def release(self, handle: Any) -> None:
        self.memory.release(handle)
