"""`ringcore doctor` as typed, and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from ringcore.cli.app import make_app
from ringcore.protocol.finding import DEVICE_CHECKS, Finding

ROOT = Path(__file__).parents[2]
FINDINGS = [
    Finding("Python", "ok", "3.13.1"),
    Finding("port", "warning", "8000 \x1b[2J: in use", "ringcore serve --port 8001"),
]
ERROR = Finding("torch", "error", "the check failed")


def invoke(monkeypatch, findings, *flags):
    monkeypatch.setattr("ringcore.front_end.doctor.examination.examine", lambda: iter(findings))
    return CliRunner().invoke(make_app(["doctor"]), ["doctor", *flags], catch_exceptions=False)


def test_the_lines(monkeypatch):
    result = invoke(monkeypatch, FINDINGS)
    assert (result.exit_code, result.stdout) == (
        0,
        "ok       Python              3.13.1\n"
        "warning  port                8000 ?[2J: in use\n"
        "                             mend: ringcore serve --port 8001\n"
        "1 ok, 1 warning, 0 errors\n",
    )


def test_an_error_is_the_exit_code(monkeypatch):
    result = invoke(monkeypatch, [*FINDINGS, ERROR])
    assert result.exit_code == 1
    assert result.stdout.endswith("error    torch               the check failed\n1 ok, 1 warning, 1 error\n")


def test_json(monkeypatch):
    result = invoke(monkeypatch, [*FINDINGS, ERROR], "--json")
    assert result.exit_code == 1
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["level"] for row in rows] == ["ok", "warning", "error"]
    assert (rows[1]["check"], rows[1]["mend"]) == ("port", "ringcore serve --port 8001")


def test_the_command_as_typed():
    """Its own process does not import torch."""
    program = (
        "import sys, atexit; from ringcore.cli import main; "
        "atexit.register(lambda: print('torch' in sys.modules)); main()"
    )
    command = [sys.executable, "-c", program, "doctor"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT).stdout.splitlines()
    assert out.pop() == "False"
    assert " ok, " in out.pop()
    lines = [line[9:28].strip() for line in out if not line.startswith(" ")]
    assert lines[0] == "Python"
    assert {"packages", "shared memory", "model cache", *DEVICE_CHECKS} <= set(lines)
