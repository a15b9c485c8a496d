"""The examples that say what they came to, as they are run by hand."""

from __future__ import annotations

import re
import subprocess
import sys
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
