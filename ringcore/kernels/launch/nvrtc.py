"""Compiles CUDA C++ by NVRTC, once for a user."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringcore.host.cache_folder import our_cache_folder

__all__ = ["NvrtcError", "compile_cuda", "nvrtc_version"]


class NvrtcError(Exception):
    """Why there is no machine code."""


@functools.cache
def nvrtc_version() -> tuple[int, int] | None:
    """None where cuda-bindings or the library is not installed."""
    try:
        from cuda.bindings import nvrtc

        code, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):  # the latter: the library is not found
        return None
    return None if int(code) else (major, minor)


def compile_cuda(source: str, architecture: str, macros: Sequence[str], folder: Path | None = None) -> bytes:
    """The cubin of a source for an architecture such as sm_90a. macros: "NAME=value". folder: where cubins are kept;
    None: the user's cache.

    A cubin is kept under a hash of all that it depends on, and written whole or not at all. Raises `NvrtcError`.
    """
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{macro}" for macro in macros)]
    version = nvrtc_version()
    if version is None:
        raise NvrtcError("NVRTC is not installed (cuda-bindings and nvidia-cuda-nvrtc)")
    key = hashlib.sha256("\0".join([source, *map(str, version), *options]).encode()).hexdigest()
    path = (Path(our_cache_folder("cuda")) if folder is None else folder) / f"{key[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        cubin = _compile(source, options)
    _keep(path, cubin)
    return cubin


def _compile(source: str, options: Sequence[str]) -> bytes:
    from cuda.bindings import nvrtc

    def call(name: str, *arguments: Any) -> Any:
        code, *found = getattr(nvrtc, name)(*arguments)
        if int(code):
            raise NvrtcError(f"{name}: {code.name}")
        return found[0] if found else None

    program = call("nvrtcCreateProgram", source.encode(), b"kernel.cu", 0, [], [])
    try:
        try:
            call("nvrtcCompileProgram", program, len(options), [option.encode() for option in options])
        except NvrtcError as error:
            log = b" " * call("nvrtcGetProgramLogSize", program)
            call("nvrtcGetProgramLog", program, log)
            raise NvrtcError(f"{error}: {log.decode(errors='replace').strip(chr(0))}") from None
        cubin = b" " * call("nvrtcGetCUBINSize", program)
        call("nvrtcGetCUBIN", program, cubin)
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _keep(path: Path, cubin: bytes) -> None:
    """A cubin that cannot be kept is compiled again by the next process."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, made = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            with open(handle, "wb") as file:
                file.write(cubin)
            os.replace(made, path)
        finally:
            Path(made).unlink(missing_ok=True)
