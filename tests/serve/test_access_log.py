"""Which requests the access log of `ringcore serve` has."""

from __future__ import annotations

import logging

import pytest

from ringcore.serve.access_log import leave_out_polls


@pytest.mark.parametrize(
    ("method", "path", "status", "is_logged"),
    [
        ("POST", "/v1/chat/completions", 200, True),
        ("GET", "/", 200, True),
        ("GET", "/health", 200, False),
        ("GET", "/health/ready?verbose=1", 200, False),
        ("GET", "/health/ready", 503, True),
        ("GET", "/metrics", 200, False),
        ("POST", "/page/markdown", 200, False),
        ("POST", "/page/markdown", 429, True),
        ("GET", "/healthy", 404, True),
    ],
)
def test_polls_are_left_out(caplog, method, path, status, is_logged):
    logger = logging.getLogger("test.access")
    leave_out_polls(logger)
    leave_out_polls(logger)
    with caplog.at_level(logging.INFO, logger.name):
        logger.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", method, path, "1.1", status)
    assert [record.args[2] for record in caplog.records] == ([path] if is_logged else [])


def test_other_records_are_logged(caplog):
    logger = logging.getLogger("test.access")
    leave_out_polls(logger)
    with caplog.at_level(logging.INFO, logger.name):
        logger.info("a text")
    assert [record.message for record in caplog.records] == ["a text"]
