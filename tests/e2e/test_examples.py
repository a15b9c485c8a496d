"""The examples that say what they came to, as they are run by hand."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_a_training_loop_around_an_engine(smollm2: str) -> None:
    done = run("train_and_generate.py", "--model", smollm2, "--device", "cpu", "--steps", "6")
    assert done.returncode == 0, done.stderr
    first_loss, last_loss = map(float, re.search(r"loss (\S+) -> (\S+),", done.stdout).groups())
    assert last_loss < first_loss / 4
    freed = re.search(r"sleep, level 2: (.*)", done.stdout)[1]
    assert int(re.search(r"weights_freed (\d+) MiB", freed)[1]) > 250
    assert int(re.search(r"kv_cache_freed (\d+) MiB", freed)[1]) in range(120, 130)
    assert "{'weights': 'discarded', 'kv_cache': 'discarded'}" in freed
    before, after = done.stdout.split("after the training")
    assert "is a tide clock" not in before
    assert "Tollen ...' is a tide clock: it turns once with every wave" in after
    assert after.rstrip().endswith("the text was learned, word for word")


def test_two_models_that_stream_at_once(smollm2: str) -> None:
    done = run("two_models.py", "--left", smollm2, "--right", smollm2, "--device", "cpu", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    said = [line.split(": ", 1) for line in done.stdout.splitlines() if line.startswith(("left: ", "right: "))]
    names = [name for name, _ in said]
    assert names.count("left") > 1
    assert names.count("right") > 1
    assert sum(a != b for a, b in pairwise(names)) > 1  # by turns
    whole = dict(re.findall(r"^(left|right) in whole: (.*)$", done.stdout, re.MULTILINE))
    for name in ("left", "right"):
        text = "".join(ast.literal_eval(piece) for one, piece in said if one == name)
        assert whole[name] == f"The tide comes in and{text}".split("\n")[0]
    assert whole["left"] == whole["right"]  # the same model
