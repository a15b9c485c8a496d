"""The checks of `ringcore doctor`, on machines that lack something."""

from __future__ import annotations

import os
import resource
import select
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringcore.front_end.doctor import device_checks, examination, host_checks, package_checks
from ringcore.front_end.doctor.device_checks import device_findings
from ringcore.front_end.doctor.examination import HOST_CHECKS, host_findings
from ringcore.front_end.doctor.host_checks import (
    check_caches,
    check_driver,
    check_limits,
    check_memory,
    check_port,
    check_processors,
    check_shared_memory,
    check_system_calls,
)
from ringcore.front_end.doctor.package_checks import check_compiler, check_packages, check_python
from ringcore.protocol.finding import DEVICE_CHECKS, Finding


def levels(findings) -> list[str]:
    return [finding.level for finding in findings]


# ---------------------------------------------------------------------------------------------------------------
# Deadlines and faults of the checks themselves.


def test_a_check_that_hangs_or_fails_is_an_error_and_the_others_are_made(monkeypatch):
    ends = threading.Event()

    def hang():
        ends.wait()
        yield

    def fail():
        yield Finding("b", "ok", "first")
        raise ZeroDivisionError("no")

    def once_the_others_are_made() -> float:
        for thread in threading.enumerate():
            if thread.name in ("b", "c"):
                thread.join()
        return time.monotonic()

    monkeypatch.setattr(examination, "time", SimpleNamespace(monotonic=once_the_others_are_made))
    checks = {"a": hang, "b": fail, "c": lambda: iter([Finding("c", "ok", "fine")])}
    assert list(host_findings(checks, 0.1)) == [
        Finding("a", "error", "the check has not ended within 0.1 s"),
        Finding("b", "ok", "first"),
        Finding("b", "error", "the check failed: ZeroDivisionError: no"),
        Finding("c", "ok", "fine"),
    ]
    ends.set()


def program(code: str) -> list[str]:
    """A program of the device column that does this for each check."""
    head = "import json, os, sys, time\ndef say(**line): print(json.dumps(line), flush=True)\n"
    return [sys.executable, "-c", f"{head}for name in sys.argv[1:]:\n    {code}\n    say(type='done', check=name)"]


def test_findings_of_the_program_among_what_libraries_print():
    code = "print('a library says'); say(type='finding', check=name, level='ok', found='x', mend=None)"
    assert list(device_findings(program(code))) == [Finding(name, "ok", "x") for name in DEVICE_CHECKS]


def test_a_check_that_ends_the_program_is_an_error_and_the_next_are_made():
    code = "name == 'triton' and (print('LLVM ERROR: no', flush=True), os.abort()); "
    code += "name == DEVICE_CHECKS[-1] and say(type='finding', check=name, level='ok', found='x')"
    assert list(device_findings(program(code.replace("DEVICE_CHECKS[-1]", repr(DEVICE_CHECKS[-1]))))) == [
        Finding(
            "triton",
            "error",
            "the check ended its process, killed by SIGABRT; it said last: LLVM ERROR: no",
            "python -m ringcore.worker.checkup 'triton'",
        ),
        Finding(DEVICE_CHECKS[-1], "ok", "x"),
    ]


def test_a_check_that_hangs_in_the_program_is_an_error_and_the_next_are_made(tmp_path, monkeypatch):
    hangs = tmp_path / "hangs"

    class Poll:
        """A deadline begins when a check hangs, and not where the machine is slow to start its program."""

        def __init__(self) -> None:
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            while not (found := self._poll.poll(10)):
                if hangs.exists():
                    hangs.unlink()
                    return self._poll.poll(timeout_ms)
            return found

    monkeypatch.setattr(device_checks, "select", SimpleNamespace(poll=Poll, POLLIN=select.POLLIN))
    code = f"name == 'GPU' and (open({str(hangs)!r}, 'w').close(), time.sleep(600)); "
    code += "say(type='finding', check=name, level='ok', found='x')"
    found = list(device_findings(program(code), deadline_s=0.5))
    assert [finding.check for finding in found] == list(DEVICE_CHECKS)
    assert levels(found) == ["ok", "error", "ok", "ok", "ok"]
    assert found[1].found == "the check was silent for 0 s"


def test_a_program_that_cannot_even_start_is_an_error_of_each_check():
    found = list(device_findings([sys.executable, "-c", "raise SystemExit('no interpreter')"]))
    assert [finding.check for finding in found] == list(DEVICE_CHECKS)
    assert {finding.found for finding in found} == {
        "the check ended its process, exit code 1; it said last: no interpreter"
    }


# ---------------------------------------------------------------------------------------------------------------
# Packages.

REQUIRES = [
    "numpy>=2",
    "transformers<6,>=5.5",
    "fastapi>=0.115; extra == 'serve'",
    "uvicorn>=0.32; extra == 'serve'",
    "triton>=3.6; (sys_platform == 'linux') and extra == 'kernels'",
    "ruff>=1; extra == 'dev'",
]
UPGRADE = "pip install --upgrade ringcore"


@pytest.mark.parametrize(
    ("versions", "finding"),
    [
        ({"numpy": "2.1", "transformers": "5.9"}, Finding("packages", "ok", "numpy 2.1, transformers 5.9")),
        ({"numpy": "2.1"}, Finding("packages", "error", "not installed: transformers", UPGRADE)),
        (
            {"numpy": "2.1", "transformers": "6.0"},
            Finding("packages", "warning", "transformers 6.0, tested with <6,>=5.5", UPGRADE),
        ),
        (
            {"fastapi": "0.1", "uvicorn": "0.40"},
            Finding("extra serve", "warning", "fastapi 0.1, tested with >=0.115", f"{UPGRADE[:-8]}'ringcore[serve]'"),
        ),
        ({}, Finding("extra serve", "ok", "not installed: fastapi, uvicorn", f"{UPGRADE[:-8]}'ringcore[serve]'")),
        ({"triton": "3.7+cu"}, Finding("extra kernels", "ok", "triton 3.7+cu")),
    ],
)
def test_versions_against_the_tested_ranges(versions, finding):
    found = list(check_packages(REQUIRES, versions))
    assert finding in found
    assert [one.check for one in found] == ["packages", "extra serve", "extra kernels"]


def test_an_old_python(monkeypatch):
    assert levels(check_python()) == ["ok"]
    monkeypatch.setattr(package_checks.platform, "python_version", lambda: "3.9.1")
    (finding,) = check_python()
    assert (finding.level, "3.9.1" in finding.found) == ("error", True)
    assert ">=3.11" in finding.mend


@pytest.mark.parametrize(("has_gpu", "level"), [(False, "warning"), (True, "error")])
def test_without_a_compiler(monkeypatch, has_gpu, level):
    monkeypatch.setattr(package_checks.Host, "c_compiler", lambda self: None)
    monkeypatch.setattr(package_checks.Host, "has_gpu", lambda self: has_gpu)
    (finding,) = check_compiler()
    assert finding.level == level
    assert "no C compiler" in finding.found
    assert "apt-get install gcc" in finding.mend


# ---------------------------------------------------------------------------------------------------------------
# The host.


@pytest.mark.parametrize(("text", "level"), [("max 100000", "ok"), ("50000 100000", "warning"), ("", "ok")])
def test_a_limit_on_processors(tmp_path, text, level):
    (tmp_path / "cpu.max").write_text(text)
    (finding,) = check_processors(tmp_path)
    assert finding.level == level
    assert ("a limit of 0.5 by the cgroup" in finding.found) == (level == "warning")


class SmallHost:
    def total_memory_bytes(self) -> int:
        return 4 << 30

    def free_memory_bytes(self) -> int:
        return 1 << 30


def test_little_memory():
    (finding,) = check_memory(SmallHost())
    assert finding.level == "warning"
    assert finding.found.startswith("1.00 GiB of 4.00 GiB free, by the cgroup; the machine has ")


def test_a_low_limit_on_open_files(monkeypatch):
    assert (
        all(level == "ok" for level in levels(check_limits())) or resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 4096
    )
    monkeypatch.setattr(host_checks.resource, "getrlimit", lambda which: (1024, 2048))
    finding = next(check_limits())
    assert (finding.level, finding.mend) == ("warning", "ulimit -n 2048")


def test_what_was_searched_by_kernel_autotune(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    *_, nothing = check_caches()
    assert (nothing.check, nothing.found) == ("kernel tuning", "0 shapes searched by kernel_autotune")
    folder = tmp_path / "ringcore" / "tiles"
    folder.mkdir(parents=True)
    for name in ("a.json", "b.json", "lock"):
        (folder / name).touch()
        os.utime(folder / name, (0, 86_400 * 365))
    *_, found = check_caches()
    assert found.found == "2 shapes searched by kernel_autotune, the last of them on 1971-01-01"


def test_shared_memory_without_memfds(monkeypatch):
    (finding,) = check_shared_memory()
    assert (finding.level, finding.found.startswith("sealed memfds; /dev/shm has ")) == ("ok", True)
    monkeypatch.setattr(host_checks, "HAS_MEMFD", False)
    (finding,) = check_shared_memory()
    assert (finding.level, "no memfd_create" in finding.found) == ("warning", True)


def test_a_system_call_that_a_sandbox_forbids(monkeypatch):
    names = [finding.found for finding in check_system_calls()]
    assert "pidfd_open and pidfd_send_signal" in names
    assert "abstract sockets and /proc" in names

    def forbidden(pid):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(host_checks.os, "pidfd_open", forbidden)
    finding, *others = check_system_calls()
    assert finding.level == "error"
    assert finding.found.startswith("pidfd_open and pidfd_send_signal: [Errno 1] Operation not permitted; the deaths")
    assert "seccomp" in finding.mend
    assert set(levels(others)) == {"ok"}


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (finding,) = check_port(port)
        assert (finding.level, finding.found) == ("warning", f"{port}: Address already in use")
        assert f"ringcore serve --port {port + 1}" in finding.mend
    assert levels(check_port(port)) == ["ok"]


def test_a_driver(tmp_path):
    assert levels(check_driver(tmp_path)) == ["ok"]
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    version = tmp_path / "driver/nvidia/version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1\nGCC version: 12\n")
    (finding,) = check_driver(tmp_path)
    assert finding.found == "NVIDIA UNIX x86_64 Kernel Module  570.1"


def test_a_cache_that_is_full_or_another_users(monkeypatch, tmp_path):
    missing = tmp_path / "not" / "there"
    usage = host_checks.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(host_checks.shutil, "disk_usage", lambda path: usage._replace(free=20 << 30))
    assert host_checks._cache("model cache", missing, "0 models", "HF_HOME").level == "ok"
    monkeypatch.setattr(host_checks.os, "access", lambda path, mode: False)
    finding = host_checks._cache("model cache", missing, "0 models", "HF_HOME")
    assert (finding.level, finding.mend) == ("error", "export HF_HOME=FOLDER")
    monkeypatch.undo()
    monkeypatch.setattr(host_checks.shutil, "disk_usage", lambda path: usage._replace(free=1 << 30))
    assert host_checks._cache("model cache", missing, "0 models", "HF_HOME").level == "warning"


def test_checks_leave_nothing_open():
    before = len(os.listdir("/proc/self/fd"))
    assert {"Python", "port", "caches"} <= set(HOST_CHECKS)
    for check in (check_shared_memory, check_system_calls, check_port):
        list(check())
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [line for line in Path("/proc/net/unix").read_text().splitlines() if f"/{os.getpid()}/" in line]
