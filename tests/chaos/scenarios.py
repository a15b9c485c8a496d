"""Runs the front end of a scenario in a session of its own, kills in it, and looks at what is left."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos_plan import FRONT_END, VARIABLE, Plan, read_roles
from kill_points import GROUP, Point
from process_stat import is_alive, session_members
from process_table import shared_memory_names, status_kb, wait_until

from ringcore.executor.foreign_stacks import stacks_of

HERE = Path(__file__).parent
PACKAGE = HERE.parent.parent
BOUND_S = 60.0  # for what has no bound of its own
ERROR_S = 60.0  # until every call has its error; how long it took is in the table
GONE_S = 60.0  # until no process is left

_numbers = itertools.count()


class ScenarioFailed(AssertionError):
    """What a scenario ended in, with the output of its processes."""


def child_environment(tmp: Path, **extra: str) -> dict[str, str]:
    """The environment of a front end: the test's own modules, in every process of it, and a folder for its files. One
    thread for libraries: those of a pool that starts before `arm_stack_dumps` would take its signal."""
    path = [str(HERE / "in_every_process"), str(HERE), str(HERE.parent), str(PACKAGE)]
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    own = os.environ.get("PYTHONPATH")
    ours = {"PYTHONPATH": os.pathsep.join([*([own] if own else []), *path]), "TMPDIR": str(tmp), "OMP_NUM_THREADS": "1"}
    return inherited | ours | extra


@dataclass
class Outcome:
    """Of one kill. error_s: from the kill to the last pending call's error, None where the front end was killed;
    gone_s: to the end of the last process. left: names of files that nobody removed."""

    error_s: float | None
    gone_s: float
    left: list[str]


class FrontEnd:
    """A front end process that runs one scenario after the other, until one of them kills it."""

    def __init__(self, folder: str, tmp: Path) -> None:
        tmp.mkdir(parents=True)
        self._folder, self._dir = folder, tmp
        self._tmp = tmp / "tmp"
        self._tmp.mkdir()
        self._address = f"ringcore-chaos-{os.getpid()}-{next(_numbers)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + self._address)
        self._listener.listen(16)
        self._shared_memory = shared_memory_names()
        self._log = open(tmp / "log", "wb")  # noqa: SIM115 - closed with the front end
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "front_end.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=child_environment(self._tmp),
            start_new_session=True,
        )
        self._num_scenarios = 0

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def resident_kb(self) -> int:
        return status_kb("RssAnon", self._process.pid)

    def kill(self, point: Point, victim: str, seed: int = 0) -> Outcome:
        """Runs the scenario of `point` up to it, kills `victim` there, and checks all that follows."""
        try:
            return self._kill(point, victim, seed)
        except BaseException as error:
            stacks = self._stacks()
            self.close()
            log = (self._dir / "log").read_text(errors="replace")[-12000:]
            raise ScenarioFailed(f"{point.phase}: {point.name}, {victim} killed: {error}\n{log}\n{stacks}") from error

    def _kill(self, point: Point, victim: str, seed: int) -> Outcome:
        self._num_scenarios += 1
        roles_file = self._dir / f"roles{self._num_scenarios}"
        roles_file.touch()
        plan = Plan(self._address, str(roles_file), point.stop)
        self._say(kind=point.scenario, plan=asdict(plan), options=point.options, seed=seed)
        stopped = self._wait_for_stop()
        killed_at = self._end_victim(victim, str(roles_file))
        stopped.close()
        if victim in (FRONT_END, GROUP):
            self._process.wait(BOUND_S)
            gone_s = self._check_gone(killed_at, [])
            return Outcome(None, gone_s, self._take_files())
        first = self._read_answer()
        gone_s = self._check_gone(killed_at, [self._process.pid])
        left = self._take_files()
        self._say_go_on()
        second = self._read_answer()
        return Outcome(_judge(point, victim, killed_at, first, second), gone_s, left)

    def check_serves(self, **options: Any) -> None:
        """A new engine of this front end starts and serves."""
        self._say(kind="check", options=options)
        answer = self._read_answer()
        assert answer["wrong"] == [], answer

    def close(self) -> None:
        if self.is_alive:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log, self._listener):
            stream.close()

    # -----------------------------------------------------------------------------------------------------------

    def _say(self, **scenario: Any) -> None:
        self._process.stdin.write(json.dumps(scenario | {"folder": self._folder}).encode() + b"\n")
        self._process.stdin.flush()

    def _say_go_on(self) -> None:
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def _stacks(self) -> str:
        """Where each thread of each process is; of one whose interpreter starts, that there is no stack."""
        return "\n".join(f"process {pid}:\n{stacks_of(pid)}" for pid in session_members(self._process.pid))

    def _read_answer(self) -> dict[str, Any]:
        if not select.select([self._process.stdout], [], [], BOUND_S)[0]:
            raise AssertionError(f"the front end says nothing for {BOUND_S} s")
        line = self._process.stdout.readline()
        assert line, f"the front end ended with {self._process.wait()}"
        return json.loads(line)

    def _wait_for_stop(self) -> socket.socket:
        """The connection of the process that has reached the point; it goes on when that is closed."""
        ready = select.select([self._listener, self._process.stdout], [], [], BOUND_S)[0]
        if self._listener not in ready:
            said = self._process.stdout.readline() if ready else b"nothing"
            raise AssertionError(f"the point was not reached; the front end says {said!r}")
        connection, _ = self._listener.accept()
        assert connection.recv(16)
        return connection

    def _end_victim(self, victim: str, roles_file: str) -> float:
        if victim == GROUP:
            os.killpg(self._process.pid, signal.SIGKILL)
            return time.monotonic()

        def living() -> list[int]:
            return [pid for pid, role in read_roles(roles_file) if role == victim and is_alive(pid)]

        # One that was forked a moment ago has a role when its interpreter starts.
        assert wait_until(living, BOUND_S), f"there is no {victim}: {read_roles(roles_file)}"
        os.kill(living()[-1], signal.SIGKILL)
        return time.monotonic()

    def _take_files(self) -> list[str]:
        """Files that were left, removed now so that each is blamed on one scenario."""
        names = os.listdir(self._tmp)
        for name in names:
            shutil.rmtree(self._tmp / name)
        return names

    def _check_gone(self, killed_at: float, spared: list[int]) -> float:
        """Seconds until the last process ended. Raises where one lives on, or where shared memory has been left."""
        left_s = killed_at + GONE_S - time.monotonic()
        if not wait_until(lambda: set(session_members(self._process.pid)) <= set(spared), max(0.0, left_s)):
            left = set(session_members(self._process.pid)) - set(spared)
            shown = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in left if is_alive(pid)}
            raise AssertionError(f"{shown} alive {GONE_S} s after the kill")
        gone_s = time.monotonic() - killed_at
        # What a program beside the tests unlinks as it ends is not ours.
        assert wait_until(lambda: shared_memory_names() <= self._shared_memory, GONE_S), "something left in /dev/shm"
        return gone_s


def _judge(point: Point, victim: str, killed_at: float, first: dict[str, Any], second: dict[str, Any]) -> float:
    """Checks what the surviving front end's calls came to; the seconds to the last error of a pending one."""
    assert first["wrong"] == [], first
    assert second["wrong"] == [], second
    pending = first["pending"]
    assert pending, "no call was pending"
    for end in pending:
        after_s = end["at"] - killed_at
        if point.scenario == "close":  # the close it was that ended the calls, and it takes the time of a close
            continue
        assert after_s < ERROR_S, f"{end['call']} took {after_s:.2f} s: {end}"
        _check_names(victim, end)
    for end in second["later"]:
        assert end["type"] or end["call"] == "close", f"{end['call']} worked after {victim} was killed"
    assert second["later_s"] < ERROR_S, f"later calls took {second['later_s']:.2f} s"
    return max(end["at"] for end in pending) - killed_at


def _check_names(victim: str, end: dict[str, Any]) -> None:
    """The error says which process ended, which rank it had, and by which signal."""
    assert end["type"] in ("EngineDeadError", "WorkerDiedError"), end
    details = end["details"]
    assert details["process"] == victim, end
    assert details["signal"] == "SIGKILL", end
    assert "SIGKILL" in end["message"], end
    if victim.startswith("worker"):
        assert details["rank"] == int(victim.removeprefix("worker ")), end
