"""A service for other projects' clients of OpenAI's and Anthropic's APIs, whose model says what it is told.

    pytest tests/clients --chaos-long

Needs the extra `ringcore[clients]`; a library that is missing is skipped. The clients are imported by fixtures alone:
collecting these tests costs nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # as in Qwen3's tokenizer
MODEL = "echo"


@pytest.fixture(scope="session")
def service(tmp_path_factory):
    from echo_model import HERMES_MARKS, serve_echo

    folder = tmp_path_factory.mktemp("echo")
    with serve_echo(folder, HERMES_MARKS, (), PLAIN, served_model_names=(MODEL,)) as running:
        yield running


@pytest.fixture(scope="session")
def url(service) -> str:
    """Of OpenAI's API."""
    return f"{service.url}/v1"


@pytest.fixture
def is_left_idle(service):
    """Fails where a request is left in the service or the engine."""
    from running_service import eventually

    yield
    eventually(service.is_idle, "the service is idle")


@pytest.fixture
def fails_once(service, monkeypatch):
    """fails_once(error): the next request gets this error."""

    def set_up(error: Exception) -> None:
        errors = [error]

        def check() -> None:
            if errors:
                raise errors.pop()

        monkeypatch.setattr(service.service, "check_started", check)

    return set_up
