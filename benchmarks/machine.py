"""What a reader must know of the machine and the code to judge a number."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import psutil

from benchmarks.driver import ROOT
from benchmarks.peers.protocol import package_versions

__all__ = ["ask_nvidia_smi", "git_commit", "machine_facts", "shown_path"]

_PACKAGES = ("ringcore", "torch", "triton", "transformers", "tokenizers", "numpy", "msgspec", "pyzmq")


def machine_facts() -> dict[str, str | int | float | dict[str, str] | list[str]]:
    """CPU model, cores this process may use, memory in bytes, system, Python, packages, the load just now, and GPUs."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": package_versions(_PACKAGES),
        "load_average_1min": os.getloadavg()[0],
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    """Name, memory, driver and highest clocks of each NVIDIA GPU, as its tool tells them."""
    return ask_nvidia_smi("--query-gpu=name,memory.total,driver_version,clocks.max.sm,clocks.max.mem", "csv,noheader")


def ask_nvidia_smi(query: str, form: str) -> list[str]:
    """The lines that NVIDIA's tool answers, of the GPUs that CUDA may use; none where it is not there, or fails."""
    command = ["nvidia-smi", query, f"--format={form}"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30.0)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def git_commit() -> str:
    """The commit of this checkout, with "+changes" where tracked files differ from it; "unknown" outside of git."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def shown_path(path: str | Path) -> str:
    """A path as a result may show it: relative to the repository, or to the home folder, or its name alone."""
    absolute = Path(path).expanduser().absolute()
    if absolute.is_relative_to(ROOT):
        return str(absolute.relative_to(ROOT))
    if absolute.is_relative_to(Path.home()):
        return f"~/{absolute.relative_to(Path.home())}"
    return absolute.name
