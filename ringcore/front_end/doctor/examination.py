"""All checks in order, each with a deadline; none stops another."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from ringcore.front_end.doctor import host_checks, package_checks
from ringcore.front_end.doctor.device_checks import device_findings
from ringcore.protocol.finding import Finding

__all__ = ["HOST_CHECKS", "examine", "host_findings"]

_DEADLINE_S = 10.0

Check = Callable[[], Iterator[Finding]]
HOST_CHECKS: Mapping[str, Check] = {
    "Python": package_checks.check_python,
    "packages": package_checks.check_packages,
    "C compiler": package_checks.check_compiler,
    "processors": host_checks.check_processors,
    "memory": host_checks.check_memory,
    "shared memory": host_checks.check_shared_memory,
    "limits": host_checks.check_limits,
    "system calls": host_checks.check_system_calls,
    "port": host_checks.check_port,
    "caches": host_checks.check_caches,
    "parked engines": host_checks.check_parked,
    "GPU driver": host_checks.check_driver,
}


def examine() -> Iterator[Finding]:
    """Every finding, as it is made."""
    yield from host_findings(HOST_CHECKS, _DEADLINE_S)
    yield from device_findings()


def host_findings(checks: Mapping[str, Check], deadline_s: float) -> Iterator[Finding]:
    """Those of this process, in the order of the checks, which run at once. One that hangs, in a file system that does
    not answer perhaps, is left to itself."""
    results: dict[str, queue.SimpleQueue[list[Finding]]] = {name: queue.SimpleQueue() for name in checks}
    for name, check in checks.items():
        threading.Thread(target=_make, args=(name, check, results[name]), name=name, daemon=True).start()
    deadline = time.monotonic() + deadline_s
    for name, result in results.items():
        try:
            yield from result.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            yield Finding(name, "error", f"the check has not ended within {deadline_s:g} s")


def _make(name: str, check: Check, result: queue.SimpleQueue[list[Finding]]) -> None:
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except Exception as error:
        findings.append(Finding(name, "error", f"the check failed: {type(error).__name__}: {error}"))
    result.put(findings)
