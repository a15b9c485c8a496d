"""The checks that need torch, in a program of its own: see `worker/checkup.py`."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence

import msgspec

from ringcore.protocol.finding import DEVICE_CHECKS, CheckDone, Finding

__all__ = ["device_findings"]

_PROGRAM = (sys.executable, "-m", "ringcore.worker.checkup")
_DEADLINE_S = 120.0  # the first import of torch from a cold disk takes a minute
_MAX_CHARS = 200


def device_findings(program: Sequence[str] = _PROGRAM, deadline_s: float = _DEADLINE_S) -> Iterator[Finding]:
    """What the program finds, as it finds it. A check that ends the process, or is silent for longer than the deadline,
    is an error; the next ones are made by a new process."""
    left = list(DEVICE_CHECKS)
    while left:
        how = yield from _run([*program, *left], left, deadline_s)
        if left:
            check = left.pop(0)
            yield Finding(check, "error", f"the check {how}", f"python -m ringcore.worker.checkup {check!r}")


def _run(command: Sequence[str], left: list[str], deadline_s: float) -> Generator[Finding, None, str]:
    """Takes each check that is done from `left`. Returns how the process ended."""
    said = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            for line in _lines(process, deadline_s):
                match _decoded(line):
                    case CheckDone():
                        left.pop(0)
                    case Finding() as finding:
                        yield finding
                    case None:
                        said = line.decode(errors="replace").strip()[:_MAX_CHARS] or said
            ended = _how(process.wait())
            return f"ended its process, {ended}{f'; it said last: {said}' if said else ''}"
        except TimeoutError:
            return f"was silent for {deadline_s:.0f} s"
        finally:
            process.kill()


def _lines(process: subprocess.Popen[bytes], deadline_s: float) -> Iterator[bytes]:
    """Until the end of its output. Raises `TimeoutError` when it is silent for too long."""
    assert process.stdout is not None
    fd, rest = process.stdout.fileno(), b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        if not poll.poll(deadline_s * 1e3):
            raise TimeoutError
        if not (data := os.read(fd, 1 << 16)):
            yield from [rest] if rest else []
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _decoded(line: bytes) -> Finding | CheckDone | None:
    """None for what a library prints."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        return None


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


_decoder: msgspec.json.Decoder[Finding | CheckDone] = msgspec.json.Decoder(Finding | CheckDone)
