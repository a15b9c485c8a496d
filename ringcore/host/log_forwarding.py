"""Log records of a child process, logged by its parent as records: the child writes each as a line to its stderr.

    child: logger ──▶ ForwardingHandler ──line──▶ parent: logged_line ──▶ the logger of the same name

Only the loggers under "ringcore" are forwarded, from the level that they have in the parent when the child starts.
Whatever else a child writes is text.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

__all__ = ["FORWARDED", "forward_logs", "forwarded_level", "logged_line"]

FORWARDED = b"\x1eringcore-log "  # begins a record's line
STDERR = 2
_ROOT = "ringcore"
_MAX_CHARS = 32 << 10  # of a message and of a traceback; JSON may escape each character with six bytes


def forwarded_level() -> int:
    """The least level that is logged in this process."""
    return logging.getLogger(_ROOT).getEffectiveLevel()


def forward_logs(process: str, level: int) -> None:
    """Has this process, a child of this name, forward its records of at least this level."""
    logger = logging.getLogger(_ROOT)
    logger.setLevel(level)
    logger.addHandler(_ForwardingHandler(process))


class _ForwardingHandler(logging.Handler):
    """Writes to the descriptor, as a crash of this process must not lose what it has said."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self._rank = _rank_of(process)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = FORWARDED + json.dumps(self._fields(record), default=str).encode() + b"\n"
            while line:
                line = line[os.write(STDERR, line) :]
        except Exception:
            self.handleError(record)

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        is_ours = record.process == os.getpid()  # else a child of this process has forwarded it
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        return {
            "name": record.name,
            "levelno": record.levelno,
            "msg": record.getMessage()[:_MAX_CHARS],
            "created": record.created,
            "processName": self._process if is_ours else record.processName,
            "process": record.process,
            "threadName": record.threadName,
            "pathname": record.pathname,
            "lineno": record.lineno,
            "funcName": record.funcName,
            "exc_text": record.exc_text and record.exc_text[-_MAX_CHARS:],
            "rank": self._rank if is_ours else vars(record).get("rank"),
            "request_id": vars(record).get("request_id"),
        }


def _rank_of(process: str) -> int | None:
    kind, _, number = process.partition(" ")
    return int(number) if kind == "worker" and number.isdecimal() else None


def logged_line(line: bytes) -> list[str] | None:
    """Logs the record of a child's line in this process; -> its text, by lines. None for a line that is no record."""
    if not line.startswith(FORWARDED):
        return None
    try:
        fields = json.loads(line.removeprefix(FORWARDED))
        fields["levelname"] = logging.getLevelName(fields["levelno"])
        fields["msecs"] = fields["created"] % 1 * 1000
        record = logging.makeLogRecord(fields)
        logger = logging.getLogger(fields["name"])
        lines = [*record.getMessage().splitlines(), *(record.exc_text or "").splitlines()]
        is_logged = logger.isEnabledFor(record.levelno)
    except (ValueError, TypeError, KeyError, AttributeError):  # another writer's bytes have come between
        return None
    if is_logged:
        logger.handle(record)
    return lines
