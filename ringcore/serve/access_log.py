"""The log of requests: of those that clients mean, not of what watches the service all the time."""

from __future__ import annotations

import logging
from http import HTTPStatus

from ringcore.serve.access import MONITORING_PATHS

__all__ = ["leave_out_polls"]

_PAGE = "/page/"  # its files, and the calls of an open chat page


def leave_out_polls(logger: logging.Logger) -> None:
    """Leaves probes, scrapes and the chat page's own requests out of uvicorn's access log, unless they fail."""
    logger.addFilter(_is_meant)  # the same one again changes nothing


def _is_meant(record: logging.LogRecord) -> bool:
    """record: with uvicorn's arguments, which are client, method, path, HTTP version and status."""
    if not isinstance(record.args, tuple) or len(record.args) != 5:
        return True
    _, _, path, _, status = record.args
    path = str(path).partition("?")[0]
    is_poll = path in MONITORING_PATHS or path.startswith(_PAGE)
    return not (is_poll and isinstance(status, int) and status < HTTPStatus.BAD_REQUEST)
