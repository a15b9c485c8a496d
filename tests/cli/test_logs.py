"""`--log-level` and `--log-format` of every command."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from fake_engine import make_model_folder

from ringcore.cli import main
from ringcore.cli.logs import LogFormat, LogLevel, log_to_stderr, write_alike
from ringcore.host.log_format import JsonFormatter, TextFormatter

TESTS = Path(__file__).parents[1]
FAKE = [
    "--load-format",
    "dummy",
    "--executor",
    "ringcore.testing:FakeExecutor",
    "--max-model-len",
    "64",
    "--no-progress",
]


def generate(capsys, folder, *flags) -> list[str]:
    """The lines on stderr."""
    with pytest.raises(SystemExit) as caught:
        main([*flags, "generate", "--model", folder, *FAKE, "--prompt", "ab", "--max-tokens", "3"])
    assert not caught.value.code
    return capsys.readouterr().err.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def test_json_with_the_request(capsys, folder):
    lines = [json.loads(line) for line in generate(capsys, folder, "--log-format", "json", "--log-level", "debug")]
    (ended,) = [one for one in lines if "request_id" in one]
    assert (ended["message"], ended["level"]) == ("2 prompt tokens, 3 tokens, length", "debug")
    assert ended["logger"] == "ringcore.front_end.observers"


def test_text(capsys, folder):
    (line,) = [one for one in generate(capsys, folder, "--log-level", "debug") if "front_end.observers" in one]
    assert line.endswith("request-0 ringcore.front_end.observers: 2 prompt tokens, 3 tokens, length")


def test_without_flags_nothing_is_said(capsys, folder):
    assert generate(capsys, folder) == []


def test_a_command_leaves_no_handler(capsys, folder):
    logger = logging.getLogger("ringcore")
    before = list(logger.handlers), logger.level
    generate(capsys, folder, "--log-level", "info")
    assert (logger.handlers, logger.level) == before


def test_other_libraries_write_as_ringcore_does():
    handler, other = logging.StreamHandler(), logging.getLogger("test.other")
    other.addHandler(handler)
    for form, kind in ((LogFormat.text, TextFormatter), (LogFormat.json, JsonFormatter)):
        end = log_to_stderr(LogLevel.warning, form)
        write_alike("test.other")
        end()
        assert isinstance(handler.formatter, kind)
    other.removeHandler(handler)


@pytest.mark.parametrize("flags", [["--log-level", "loud"], ["--log-format", "xml"]])
def test_what_there_is_not(capsys, flags):
    with pytest.raises(SystemExit) as caught:
        main([*flags, "models"])
    assert caught.value.code == 2
