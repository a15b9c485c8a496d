"""The examples that say what they came to, as they are run by hand."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_checkpoints import hf_model
from tokenizers_made import byte_level, tokenizer_folder

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama with a tokenizer and a chat template."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    folder = tokenizer_folder(tmp_path_factory.mktemp("tiny-chat"), byte_level(), template)
    model = hf_model("Llama", vocab_size=512, max_position_embeddings=1024)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    return str(folder)


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.real_model
@pytest.mark.long_form
def test_a_training_loop_around_an_engine(smollm2: str) -> None:
    done = run("train_and_generate.py", "--model", smollm2, "--device", "cpu", "--steps", "5")
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


@pytest.mark.real_model
@pytest.mark.long_form
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


def test_an_offline_batch(tiny_chat: str) -> None:
    done = run("offline_batch.py", "--model", tiny_chat, "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    prompts = [line for line in (EXAMPLES / "prompts.txt").read_text().splitlines() if line.strip()]
    assert re.findall(r"^> (.*)$", done.stdout, re.MULTILINE) == prompts
    num_out = int(re.search(rf"^{len(prompts)} prompts, \d+ tokens in, (\d+) tokens out in ", done.stdout, re.M)[1])
    assert len(prompts) <= num_out <= 8 * len(prompts)


@pytest.mark.real_model
@pytest.mark.long_form
def test_structured_answers(smollm2: str) -> None:
    done = run("structured_answers.py", "--model", smollm2)
    assert done.returncode == 0, done.stderr
    assert set(ast.literal_eval(re.search(r"^read back: (.*)$", done.stdout, re.M)[1])) == {"name", "population"}
    assert re.search(r"^Today's date is \d{4}-\d{2}-\d{2}$", done.stdout, re.M)
    assert re.search(r"^Is water wet\? Answer: (yes|no)$", done.stdout, re.M)
    assert "one of two at each place:" in done.stdout


def test_driving_the_workers(tiny_chat: str) -> None:
    done = run("drive_workers.py", tiny_chat)
    assert done.returncode == 0, done.stderr
    assert "during a step: {" in done.stdout
    assert "by an extension: [0.25]" in done.stdout
    assert "ZeroDivisionError" in done.stdout
    assert done.stdout.rstrip().endswith("on ranks [0]")


def test_how_many_replicas_a_load_needs() -> None:
    done = run("simulate_capacity.py", "--requests", "300")
    assert done.returncode == 0, done.stderr
    *replicas, last = done.stdout.splitlines()
    assert last == f"{len(replicas)} replicas are enough for 60 requests/s"
    waits = [float(re.search(r"p99 +(\S+) s", line)[1]) for line in replicas]
    assert waits[-1] <= 0.15 < min(waits[:-1], default=1)
