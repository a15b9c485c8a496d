"""A job that is killed at random and resumed, again and again, writes byte for byte what an undisturbed one does."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from batch_command import DEADLINE_S, FAKE, INSTANT, PACED, ends, lasting, openai_lines, plain_lines, start, write_lines
from fake_engine import make_model_folder

NUM_LINES = 240
KILLS_A_JOB = 4


@dataclass(frozen=True)
class Kind:
    """flags: of the job. is_same: what of the results must be the same bytes. tears: whether nothing is synced, so that
    any end of the files may be lost too."""

    make_lines: object
    name: str
    flags: tuple[str, ...]
    is_same: object
    tears: bool


KINDS = {
    "plain": Kind(plain_lines, "out.jsonl", ("--order", "input", "--look-ahead", "32"), bytes, tears=False),
    "openai": Kind(openai_lines, "out.jsonl", ("--sync-interval-s", "3600"), lasting, tears=True),
    "gzip": Kind(
        plain_lines,
        "out.jsonl.gz",
        ("--sync-interval-s", "0.01", "--data-parallel", "2"),
        lambda data: lasting(gzip.decompress(data)),
        tears=False,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


class Job:
    def __init__(self, folder: str, work: Path, kind: Kind) -> None:
        self._kind, self._common = kind, ["--model", folder, *FAKE, *kind.flags, "--max-in-flight", "6"]
        self.input = write_lines(work / "in.jsonl", kind.make_lines(NUM_LINES))
        self.output = work / kind.name
        self.journal = Path(f"{self.output}.journal")
        undisturbed = work / f"whole-{kind.name}"
        assert ends(start(self.input, undisturbed, *self._common, *INSTANT))[0] == 0
        self.expected = kind.is_same(undisturbed.read_bytes())

    def start(self) -> subprocess.Popen:
        return start(self.input, self.output, *self._common, *PACED, "--resume")

    def num_done(self) -> int:
        """As far as the journal tells from outside."""
        return self.journal.stat().st_size // 40 if self.journal.exists() else 0

    def check(self) -> None:
        code, err = ends(self.start())
        assert code == 0, err
        assert self._kind.is_same(self.output.read_bytes()) == self.expected

    def tear(self, rng: random.Random) -> None:
        """Cuts the files as a power cut may."""
        if not self._kind.tears or not self.journal.exists():
            return
        begin = self.journal.read_bytes().index(b"\n") + 1
        for path, first in ((self.journal, begin), (self.output, 0)):
            if path.exists():
                os.truncate(path, max(first, path.stat().st_size - rng.choice([0, 1, 50, 300, 1000])))

    def discard(self) -> None:
        for path in (self.output, self.journal):
            path.unlink(missing_ok=True)


def kill_somewhere(job: Job, rng: random.Random) -> None:
    """Kills a run after it has done some lines more, or its engine, which the run survives."""
    process, until, begun = job.start(), job.num_done() + rng.randrange(NUM_LINES // KILLS_A_JOB), time.monotonic()
    kills_engine = rng.random() < 0.2
    while job.num_done() < until and process.poll() is None:
        assert time.monotonic() < begun + DEADLINE_S
        time.sleep(0.002)
    time.sleep(rng.random() * 0.02)
    if kills_engine and process.poll() is None:
        engines = [child for child in psutil.Process(process.pid).children() if "engine" in child.name()]
        for engine in rng.sample(engines, k=min(1, len(engines))):
            engine.kill()
        time.sleep(rng.random())
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=DEADLINE_S)
    job.tear(rng)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["plain", "openai", pytest.param("gzip", marks=pytest.mark.long_form)])
def test_a_job_that_is_killed(folder, tmp_path, is_long, name):
    """One kill each; 200 in all in the long form."""
    rng = random.Random(name)
    job = Job(folder, tmp_path, KINDS[name])
    num_kills = {"plain": 68, "openai": 68, "gzip": 64}[name] if is_long else 1
    while num_kills:
        for _ in range(min(num_kills, KILLS_A_JOB)):
            kill_somewhere(job, rng)
            num_kills -= 1
        job.check()
        job.discard()


def test_memory_does_not_grow_with_the_input(folder, tmp_path, is_long):
    """100,000 lines within 200 MB in the long form; what 2,500 take is most of it."""
    num_lines, max_bytes = (100_000, 200e6) if is_long else (2500, 120e6)
    with (tmp_path / "in.jsonl").open("w") as file:
        for i in range(num_lines):
            file.write(f'{{"prompt": "line {i}", "max_tokens": 4}}\n')
    process = start(tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--model", folder, *FAKE, *INSTANT)
    peak = 0
    while process.poll() is None:  # what wait4() tells begins with the memory of this process, which it was forked from
        with suppress(OSError, TypeError):  # it has ended
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]))
        time.sleep(0.02)
    assert ends(process)[0] == 0
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == num_lines
    print(f"{num_lines:,} lines: {peak / 1e6:.0f} MB resident at most")
    assert 40e6 < peak < max_bytes


def test_the_same_texts_however_a_job_runs(folder, tmp_path):
    """One at a time, in another order, from a compressed input."""
    lines = plain_lines(30)
    whole = tmp_path / "whole.jsonl"
    assert ends(start(write_lines(tmp_path / "in.jsonl", lines), whole, "--model", folder, *FAKE, *INSTANT))[0] == 0
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "in.jsonl").read_bytes()))
    other = tmp_path / "other.jsonl"
    flags = ["--max-in-flight", "1", "--look-ahead", "7", "--order", "input"]
    assert ends(start(packed, other, "--model", folder, *FAKE, *INSTANT, *flags))[0] == 0
    assert lasting(other.read_bytes()) == lasting(whole.read_bytes())
    assert [json.loads(line)["custom_id"] for line in other.read_text().splitlines()] == [
        line["custom_id"] for line in lines
    ]
