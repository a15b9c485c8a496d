"""Every command of the guide, as typed, with an engine that has no model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from batch_command import openai_lines, plain_lines, write_lines
from fake_engine import make_model_folder

from ringcore.batch import api
from ringcore.cli import main
from ringcore.front_end.replicas.device_groups import options_of_engines
from ringcore.testing import FakeExecutor

ROOT = Path(__file__).parents[2]
GUIDE, README = ROOT / "docs" / "guide" / "batch.md", ROOT / "README.md"
COMMANDS = [
    line.strip()
    for page in (GUIDE, README)
    for line in page.read_text().splitlines()
    if line.startswith("    ringcore batch ")
]
PNG = b"\x89PNG\r\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """What the commands name: a model, requests, prompts."""
    (tmp_path / "path/to/model").mkdir(parents=True)
    make_model_folder(tmp_path / "path/to/model")
    fake = {"load_format": "dummy", "executor": FakeExecutor, "max_model_len": 128}
    monkeypatch.setattr(api, "options_of_engines", lambda given, num: options_of_engines(given | fake, num))
    requests = openai_lines(6)
    for request in requests:
        request["body"].pop("model", None)
    write_lines(tmp_path / "requests.jsonl", requests)
    zstandard = pytest.importorskip("zstandard")
    plain = "".join(f"{json.dumps(line)}\n" for line in plain_lines(6)).encode()
    (tmp_path / "prompts.jsonl.zst").write_bytes(zstandard.compress(plain))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_guide(place, capsys, command):
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(command)[1:])
    told = capsys.readouterr().err
    assert caught.value.code == 0, told
    assert "6 of 6 requests done, 0 of them failed" in told
    assert "to the first token: p50 " in told
    if "--status" in command:
        status = json.loads((place / "status.json").read_text())
        assert (status["state"], status["num_done"], status["num_in_flight"]) == ("complete", 6, 0)
        assert status["percentiles"]["e2e_s"]["p99"] > 0
    if "--chart" in command:
        assert (place / "chart.png").read_bytes().startswith(PNG)


def test_commands_of_the_help_are_those_of_the_guide(capsys):
    with pytest.raises(SystemExit):
        main(["batch", "--help"])
    shown = [line.strip() for line in capsys.readouterr().out.splitlines() if "ringcore batch " in line]
    assert len([line for line in shown if line in COMMANDS]) == 3


def test_lines_of_the_guide_are_lines():
    shown = re.findall(r"^    (\{.*\})$", GUIDE.read_text(), re.M)
    assert [sorted(json.loads(line)) for line in shown] == [
        ["body", "custom_id", "method", "url"],
        ["max_tokens", "prompt", "temperature"],
    ]
