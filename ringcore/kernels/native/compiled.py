"""Compiles the C sources of this package for this processor, once for a user, and loads the library."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from ringcore.host.cache_folder import our_cache_folder
from ringcore.host.resources import Host

__all__ = ["NoLibrary", "load_compiled"]

_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-std=gnu11", "-w")
_COMPILE_S = 300.0  # product.c takes half a minute of CPU time on a slow machine
_FOLDER = Path(__file__).parent


class NoLibrary(Exception):
    """The reason why there is no library."""


def load_compiled(source: str, folder: Path | None = None) -> ctypes.CDLL:
    """source: a C file of this package. folder: where libraries are kept; None: the user's cache.

    A library is kept under a hash of the sources, the compiler and the processor, and written whole or not at all. One
    that another user could have written is not loaded. Raises `NoLibrary`.
    """
    command = [_compiler(), *_FLAGS, "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"]
    folder = Path(our_cache_folder("native")) if folder is None else folder
    path = folder / f"{_key(source, command)}.so"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _compile(command, _FOLDER / source, path)
        for owned in (folder, path):
            status = owned.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise NoLibrary(f"{owned} can be written by others; remove it")
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibrary(f"{path}: {error}") from error


def _compiler() -> str:
    found = Host().c_compiler()
    if found is None:
        raise NoLibrary("no C compiler (cc, gcc or clang) is installed")
    return found


def _key(source: str, command: list[str]) -> str:
    """Of all that the library depends on: for another processor of a shared home folder it is another one."""
    found = hashlib.sha256("\0".join(command).encode())
    for path in (_FOLDER / source, *sorted(_FOLDER.glob("*.h")), Path("/proc/cpuinfo")):
        text = path.read_text()
        if path.name == "cpuinfo":
            text = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
        found.update(text.encode())
    status = os.stat(command[0])
    found.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    return found.hexdigest()[:32]


def _compile(command: list[str], source: Path, path: Path) -> None:
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
    os.close(handle)
    try:
        done = subprocess.run(
            [*command, "-o", made, str(source), "-lm"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_S,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise NoLibrary(f"{command[0]}: {lines[0]}")
        os.chmod(made, 0o700)
        os.replace(made, path)
    except subprocess.TimeoutExpired as error:
        raise NoLibrary(f"{command[0]} took more than {_COMPILE_S:.0f} s") from error
    finally:
        Path(made).unlink(missing_ok=True)
