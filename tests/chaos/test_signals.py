"""Ctrl-C and SIGTERM at any moment of a user's script: it ends soon, in the usual way, and leaves nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from process_stat import session_members
from process_table import wait_until
from scenarios import HERE, child_environment

SHORT, LONG = 3, 50  # moments in each phase
AT_ONCE = 2
EXIT_S = 60.0
GONE_S = 60.0
MAX_LOG_LINES = 80  # a traceback of the script is to be expected, one of every process is a flood
START_S = 0.5  # about the time that the engine's start takes


class Script:
    def __init__(self, model_folder, tmp_path, number: int) -> None:
        self.tmp = tmp_path / f"tmp{number}"
        self.tmp.mkdir()
        self.log = tmp_path / f"log{number}"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "serving_script.py"), model_folder, "10000000"],
                stdout=subprocess.PIPE,
                stderr=log,
                env=child_environment(self.tmp),
                start_new_session=True,
            )

    def send(self, number: signal.Signals, to_group: bool) -> None:
        """As a terminal does it, to everybody, or as `kill` does, to the script alone."""
        (os.killpg if to_group else os.kill)(self.process.pid, number)

    def close(self) -> None:
        if session_members(self.process.pid):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", ["start-up", "serving"])
def test_a_signal_at_any_moment_ends_a_script(model_folder, tmp_path, is_long, seed, phase):
    def attempt(number: int) -> float:
        return interrupt(Script(model_folder, tmp_path, number), phase, random.Random(f"{seed} {phase} {number}"))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        slowest_s = max(pool.map(attempt, range(LONG if is_long else SHORT)))
    print(f"\n{phase}: the slowest script took {slowest_s:.2f} s to end")


def interrupt(script: Script, phase: str, rng: random.Random) -> float:
    """One script, ended at a random moment in a random way: how long it took."""
    number = rng.choice([signal.SIGINT, signal.SIGTERM])
    to_group, twice = rng.random() < 0.5, rng.random() < 0.5
    delay_s = rng.random() * (START_S if phase == "start-up" else 0.3)
    what = f"{number.name} after {delay_s:.3f} s of {phase}, to {'all' if to_group else 'one'}, twice: {twice}"
    try:
        # Not during its own imports: an interrupt there is the import's to tell, and numpy makes another error of it.
        assert script.process.stdout.readline() == b"starting\n"
        if phase == "serving":
            assert script.process.stdout.readline() == b"serving\n"
        time.sleep(delay_s)
        return end_and_check(script, number, to_group, twice, what)
    finally:
        script.close()


def end_and_check(script: Script, number: signal.Signals, to_group: bool, twice: bool, what: str) -> float:
    """Seconds from the signal to the end of the script."""
    sent_at = time.monotonic()
    script.send(number, to_group)
    if twice:
        time.sleep(0.03)
        if script.process.poll() is None:
            script.send(number, to_group)
    try:
        code = script.process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{what}: still there after {EXIT_S} s\n{script.log.read_text()[-4000:]}")
    took_s = time.monotonic() - sent_at
    log = script.log.read_text(errors="replace")
    assert code in (-number, 128 + number), f"{what}: exit code {code}\n{log[-4000:]}"
    assert wait_until(lambda: not session_members(script.process.pid), GONE_S), f"{what}: processes left\n{log[-4000:]}"
    assert os.listdir(script.tmp) == [], f"{what}: left {os.listdir(script.tmp)}"
    assert len(log.splitlines()) <= MAX_LOG_LINES, f"{what}: a flood of {len(log.splitlines())} lines\n{log[:6000]}"
    return took_s
