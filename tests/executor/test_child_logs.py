"""Log records of child processes, which their parent logs as records; and text, which it copies."""

from __future__ import annotations

import ast
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from ringcore.executor.child_process import ChildProcess
from ringcore.host.log_format import JsonFormatter, TextFormatter

PACKAGE = Path(__file__).parents[2] / "ringcore"


def run(name: str, entry: str) -> ChildProcess:
    child = ChildProcess.start(name, f"child_entries:{entry}")
    assert child.wait(60)
    child.last_log()
    child.terminate()
    return child


def messages(caplog) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()[:40]) for record in caplog.records]


def test_records_arrive_as_records(caplog, capfd):
    with caplog.at_level(logging.INFO, logger="ringcore"):
        child = run("worker 3", "logs")
    assert messages(caplog) == [
        ("INFO", "on its way"),
        ("WARNING", "3 of four"),
        ("ERROR", "two\nlines"),
        ("ERROR", "é" * 40),
    ]
    _, warning, error, long = caplog.records
    assert (warning.name, warning.rank, warning.request_id) == ("ringcore.worker.worker", 3, "r-1")
    assert (warning.process, warning.processName, warning.threadName) == (child.pid, "worker 3", "MainThread")
    assert warning.funcName == "logs"
    assert error.exc_text.endswith("ZeroDivisionError: as asked")
    assert error.request_id is None
    assert len(long.getMessage()) == 32 << 10
    assert capfd.readouterr().err == "".join(
        f"[worker 3] {line}\n"
        for line in (
            "plain text",
            "of another library",
            '\x1eringcore-log {"name": "ringcore", "levelno"',  # what cannot be read is not lost
            "\x1eringcore-log [1]",
        )
    )


def test_the_last_lines_have_the_records_too(caplog, capfd):
    child = run("worker 0", "logs")
    capfd.readouterr()
    last = child.last_log()
    assert last[:5] == ["3 of four", "plain text", "two", "lines", "Traceback (most recent call last):"]
    assert "ZeroDivisionError: as asked" in last
    assert "in detail" not in last


def test_a_level_that_is_off_stays_in_the_child(caplog, capfd):
    with caplog.at_level(logging.ERROR, logger="ringcore"):
        child = run("worker 0", "logs")
    assert [level for level, _ in messages(caplog)] == ["ERROR", "ERROR"]
    assert "3 of four" not in child.last_log()


def test_records_of_a_grandchild(caplog, capfd):
    run("engine", "logs_in_a_child")
    found = [(record.processName, record.rank, record.getMessage()[:20]) for record in caplog.records]
    assert found[0] == ("worker 1", 1, "3 of four")
    assert found[-1] == ("engine", None, "the engine's own")
    assert [name for name, _, _ in found] == ["worker 1"] * 3 + ["engine"]
    assert caplog.records[0].request_id == "r-1"


SILENT = """
import logging, sys
sys.path[:0] = {path}
from ringcore.executor.child_process import ChildProcess
logging.getLogger("ringcore.front_end").error("of this process")
if {configured}:
    logging.basicConfig(format="%(name)s %(message)s")
child = ChildProcess.start("worker 0", "child_entries:logs")
child.wait(60)
child.last_log()
child.terminate()
"""


@pytest.mark.parametrize("configured", [False, True])
def test_silent_unless_configured(configured):
    path = [str(Path(__file__).parent), str(PACKAGE.parent)]
    script = SILENT.format(path=path, configured=configured)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    ours = [line[:50] for line in done.stderr.split("\n") if line[:11] not in ("", "[worker 0] ")]
    assert ours[:1] == (["ringcore.worker.worker 3 of four"] if configured else [])
    assert done.stdout == ""


def record(**fields) -> logging.LogRecord:
    basis = {"name": "ringcore.x", "levelno": 30, "levelname": "WARNING", "msg": 'a "b"\nc', "created": 0.5}
    return logging.makeLogRecord(basis | {"processName": "worker 2", "process": 7, "threadName": "main"} | fields)


def test_json_is_one_object_a_line():
    line = JsonFormatter().format(record(rank=2, request_id="r", exc_text="Traceback\nboom"))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.500Z",
        "level": "warning",
        "logger": "ringcore.x",
        "message": 'a "b"\nc',
        "process": "worker 2",
        "pid": 7,
        "thread": "main",
        "rank": 2,
        "request_id": "r",
        "exception": "Traceback\nboom",
    }
    assert {"rank", "request_id", "exception"}.isdisjoint(json.loads(JsonFormatter().format(record(rank=None))))


def test_text():
    assert TextFormatter().format(record(msg="hm")) == "1970-01-01T00:00:00.500Z warning worker 2 ringcore.x: hm"
    with_all = record(msg="hm", request_id="r", exc_text="boom")
    assert TextFormatter().format(with_all) == "1970-01-01T00:00:00.500Z warning worker 2 r ringcore.x: hm\nboom"


# What may write to the terminal by itself, outside of `cli`, and why.
WRITERS = {
    "executor/child_log.py": "what a child has written that is no record",
    "host/log_forwarding.py": "records, to the parent",
    "model_executor/reference.py": "a program whose output is its answer",
    "model_executor/models/transformers/known_types.py": "a program whose output is its answer",
    "model_executor/models/transformers/text_defaults.py": "likewise",
    "worker/checkup.py": "likewise",
}


def test_nothing_else_writes_to_the_terminal():
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        where = str(path.relative_to(PACKAGE))
        if where.startswith("cli/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="print")):
                    found.add(where)
                case ast.Attribute(value=ast.Name(id="sys"), attr="stderr" | "stdout"):
                    found.add(where)
                case ast.Attribute(value=ast.Name(id="traceback"), attr="print_exc" | "print_exception"):
                    found.add(where)
                case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="write"), args=[first, *_]) if (
                    ast.unparse(first) in ("1", "2", "STDERR", "STDOUT")
                ):
                    found.add(where)
    assert found == set(WRITERS)
