"""The engine's side of the process that compiles new grammars, so that none of them can harm anybody but itself."""

from __future__ import annotations

import json
import math
import time
from typing import NamedTuple

from ringcore.config import EngineConfig
from ringcore.errors import InvalidRequestError, RingcoreError, error_from_wire
from ringcore.executor.child_process import ChildProcess
from ringcore.executor.job_process import JobProcess, reap
from ringcore.grammars.compiler_process import CHANNEL, ENTRY, MAX_MEMORY_BYTES, encode_job
from ringcore.params.structured_outputs import StructuredOutputsParams
from ringcore.protocol.codec import encode_start

__all__ = ["GrammarCompiler", "Verdict"]

_START_S = 120.0  # imports on a machine that is busy with other work


class Verdict(NamedTuple):
    """What became of one grammar: None, or what is wrong with it."""

    error: RingcoreError | None


class GrammarCompiler:
    """One grammar at a time, in a process that is started for the first one and kept.

    `compile` begins, `poll` goes on and gives the verdict; neither waits. A grammar that takes too long, or too much
    memory, or crashes, costs the process; the next one gets another.

    Invariant: `_spec` is the grammar at work; without one nothing is due and no descriptor is to be watched.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._timeout_s = config.scheduler.structured_outputs_timeout_s
        self._spec: StructuredOutputsParams | None = None
        self._process: JobProcess | None = None
        self._ending: list[ChildProcess] = []  # killed, and not reaped yet
        self._due = math.inf

    @property
    def is_busy(self) -> bool:
        return self._spec is not None

    @property
    def is_ending(self) -> bool:
        """Whether a process was killed that `poll` has not reaped yet."""
        return bool(self._ending)

    @property
    def pid(self) -> int | None:
        """The process's, if there is one."""
        return None if self._process is None else self._process.child.pid

    @property
    def fds(self) -> list[int]:
        """Descriptors that become readable when `poll` has something to do, but for a deadline."""
        if self._spec is None or self._process is None:
            return []
        return [self._process.channel.fileno(), self._process.child.pidfd]

    def compile(self, spec: StructuredOutputsParams) -> None:
        """Begins. Raises `RingcoreError` where no process can be started."""
        assert self._spec is None, "one at a time"
        if self._process is not None and not self._process.child.is_alive():
            self._drop_process()
        if self._process is None:
            self._process = JobProcess("grammars", ENTRY, encode_start(self._config), CHANNEL)
        self._spec = spec
        self._begin(self._process)

    def _begin(self, process: JobProcess) -> None:
        """Sends the grammar, where the process is ready for it; till then it is the start that is waited for."""
        if process.is_ready:
            assert self._spec is not None
            process.send(encode_job(self._spec))
        self._due = time.monotonic() + (self._timeout_s if process.is_ready else _START_S)

    def poll(self) -> Verdict | None:
        """The verdict on the grammar at work, if it has come; it is the next one's turn then."""
        reap(self._ending)
        if self._spec is None:
            return None
        verdict = self._poll()
        if verdict is not None:
            self._spec = None
        return verdict

    def cancel(self) -> None:
        """Nobody wants the grammar at work any more."""
        assert self._spec is not None
        self._spec = None
        if self._process is not None:
            self._drop_process()

    def _poll(self) -> Verdict | None:
        process = self._process
        assert process is not None
        process.write()
        if not process.is_ready:
            try:
                is_ready = process.poll_ready()
            except RingcoreError as error:
                self._drop_process()
                return Verdict(error)
            if is_ready:
                self._begin(process)
        answer = process.poll_answer() if process.is_ready else None
        if answer is not None:
            wire = json.loads(answer)
            return Verdict(None if wire is None else error_from_wire(wire))
        if not process.child.is_alive():
            return self._ended(process)
        if time.monotonic() >= self._due:
            return self._overdue(process)
        return None

    def _ended(self, process: JobProcess) -> Verdict:
        how = process.child.describe_end()
        self._drop_process()
        if not process.is_ready:
            return Verdict(RingcoreError(f"the process that compiles grammars did not start: {how}"))
        return self._refused(
            f"to compile it ended the process that does so ({how}): it takes more than {MAX_MEMORY_BYTES >> 20} MiB of "
            "memory, or lies too deeply in itself; simplify it"
        )

    def _overdue(self, process: JobProcess) -> Verdict:
        self._drop_process()
        if not process.is_ready:
            return Verdict(RingcoreError(f"the process that compiles grammars did not start within {_START_S:g} s"))
        return self._refused(
            f"the grammar took longer than {self._timeout_s:g} s to compile; simplify it, or raise "
            "structured_outputs_timeout_s"
        )

    def _refused(self, why: str) -> Verdict:
        assert self._spec is not None
        field = f"structured_outputs.{self._spec.kind}"
        return Verdict(InvalidRequestError(f"{field}: {why}", field=field, value=None))

    # -----------------------------------------------------------------------------------------------------------
    # The end of a process.

    def _drop_process(self) -> None:
        """Kills it; nobody waits until it is gone."""
        assert self._process is not None
        process, self._process = self._process, None
        self._ending.append(process.kill())
        reap(self._ending)

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._spec = None
        if self._process is not None:
            self._drop_process()
        while self._ending:
            self._ending.pop().terminate()  # it was killed: the kernel is at it
