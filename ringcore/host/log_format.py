"""How log records are written: as text, or as JSON. Both name the process, and its rank and request where there are."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

__all__ = ["JsonFormatter", "TextFormatter"]

_FIELDS = ("rank", "request_id")  # attributes that some records have


class JsonFormatter(logging.Formatter):
    """One object in a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.processName,
            "pid": record.process,
            "thread": record.threadName,
        }
        known = vars(record)
        fields |= {name: known[name] for name in _FIELDS if known.get(name) is not None}
        if exception := _exception(self, record):
            fields["exception"] = exception
        return json.dumps(fields, default=str)


class TextFormatter(logging.Formatter):
    """2026-11-24T17:20:31.123Z warning worker 0 request-5 ringcore.executor: the message"""

    def format(self, record: logging.LogRecord) -> str:
        request_id = vars(record).get("request_id")
        where = record.processName if request_id is None else f"{record.processName} {request_id}"
        text = f"{_time(record)} {record.levelname.lower()} {where} {record.name}: {record.getMessage()}"
        exception = _exception(self, record)
        return f"{text}\n{exception}" if exception else text


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    if record.exc_info and not record.exc_text:
        record.exc_text = formatter.formatException(record.exc_info)
    return record.exc_text
