"""Logging of the commands: to stderr, as text or JSON."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from enum import StrEnum

from ringcore.host.log_format import JsonFormatter, TextFormatter

__all__ = ["LogFormat", "LogLevel", "log_to_stderr", "write_alike"]


class LogFormat(StrEnum):
    text = "text"
    json = "json"


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class _StderrHandler(logging.Handler):
    """Writes to what is sys.stderr then."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def log_to_stderr(level: LogLevel, form: LogFormat) -> Callable[[], None]:
    """Logs ringcore's records of at least this level; the processes that are started afterwards have it too. The
    returned function ends that."""
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter() if form is LogFormat.json else TextFormatter())
    logger = logging.getLogger("ringcore")
    before = logger.level
    logger.setLevel(level.upper())
    logger.addHandler(handler)

    def end() -> None:
        logger.removeHandler(handler)
        logger.setLevel(before)

    return end


def write_alike(*names: str) -> None:
    """Has the handlers of other libraries' loggers write as ringcore's do, with the time of each record."""
    formatters = [one.formatter for one in logging.getLogger("ringcore").handlers if isinstance(one, _StderrHandler)]
    for formatter in formatters:
        for handler in (one for name in names for one in logging.getLogger(name).handlers):
            handler.setFormatter(formatter)
