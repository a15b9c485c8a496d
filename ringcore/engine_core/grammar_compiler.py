"""The engine's side of the compiler process: a grammar that hangs or crashes it fails its own request only."""

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

__all__ = ["CompileResult", "GrammarCompiler"]

_START_S = 120.0  # the imports, on a loaded machine


class CompileResult(NamedTuple):
    """The result for one grammar. error: None if it compiles."""

    error: RingcoreError | None


class GrammarCompiler:
    """Compiles one grammar at a time in a process that starts with the first one and is kept.

    `compile` submits a grammar, `poll` advances it and returns the result; neither waits. A grammar that exceeds its
    deadline or its memory, or crashes, ends the process; the next grammar starts a new one.

    Invariant: `_spec` is the grammar that compiles; without one there is no deadline and no descriptor to poll.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._timeout_s = config.scheduler.structured_outputs_timeout_s
        self._spec: StructuredOutputsParams | None = None
        self._process: JobProcess | None = None
        self._unreaped: list[ChildProcess] = []  # killed, not reaped yet
        self._deadline = math.inf

    @property
    def is_busy(self) -> bool:
        return self._spec is not None

    @property
    def has_unreaped(self) -> bool:
        """Whether a killed process still has to be reaped by `poll`."""
        return bool(self._unreaped)

    @property
    def pid(self) -> int | None:
        """The compiler process's, if one runs."""
        return None if self._process is None else self._process.child.pid

    @property
    def fds(self) -> list[int]:
        """Descriptors that become readable when `poll` has work; a deadline signals none."""
        if self._spec is None or self._process is None:
            return []
        return [self._process.channel.fileno(), self._process.child.pidfd]

    def compile(self, spec: StructuredOutputsParams) -> None:
        """Submits a grammar. Raises `RingcoreError` if no process can be started."""
        assert self._spec is None, "one at a time"
        if self._process is not None and not self._process.child.is_alive():
            self._drop_process()
        if self._process is None:
            self._process = JobProcess("grammars", ENTRY, encode_start(self._config), CHANNEL)
        self._spec = spec
        self._begin(self._process)

    def _begin(self, process: JobProcess) -> None:
        """Sends the grammar once the process is ready; before that the deadline is that of the process's start."""
        if process.is_ready:
            assert self._spec is not None
            process.send(encode_job(self._spec))
        self._deadline = time.monotonic() + (self._timeout_s if process.is_ready else _START_S)

    def poll(self) -> CompileResult | None:
        """The result for the grammar in progress, if it has arrived; then `compile` accepts the next one."""
        reap(self._unreaped)
        if self._spec is None:
            return None
        result = self._poll()
        if result is not None:
            self._spec = None
        return result

    def cancel(self) -> None:
        """Drops the grammar in progress: all its requests were aborted."""
        assert self._spec is not None
        self._spec = None
        if self._process is not None:
            self._drop_process()

    def _poll(self) -> CompileResult | None:
        process = self._process
        assert process is not None
        process.write()
        if not process.is_ready:
            try:
                is_ready = process.poll_ready()
            except RingcoreError as error:
                self._drop_process()
                return CompileResult(error)
            if is_ready:
                self._begin(process)
        answer = process.poll_answer() if process.is_ready else None
        if answer is not None:
            wire = json.loads(answer)
            return CompileResult(None if wire is None else error_from_wire(wire))
        if not process.child.is_alive():
            return self._ended(process)
        if time.monotonic() >= self._deadline:
            return self._timed_out(process)
        return None

    def _ended(self, process: JobProcess) -> CompileResult:
        how = process.child.describe_end()
        self._drop_process()
        if not process.is_ready:
            return CompileResult(RingcoreError(f"the grammar compiler's process did not start: {how}"))
        return self._rejected(
            f"the compiler process died while compiling it ({how}): it needs more than {MAX_MEMORY_BYTES >> 20} MiB of "
            "memory, or is nested too deeply; simplify it"
        )

    def _timed_out(self, process: JobProcess) -> CompileResult:
        self._drop_process()
        if not process.is_ready:
            return CompileResult(RingcoreError(f"the grammar compiler's process did not start within {_START_S:g} s"))
        return self._rejected(
            f"the grammar took longer than {self._timeout_s:g} s to compile; simplify it, or raise "
            "structured_outputs_timeout_s"
        )

    def _rejected(self, why: str) -> CompileResult:
        assert self._spec is not None
        field = f"structured_outputs.{self._spec.kind}"
        return CompileResult(InvalidRequestError(f"{field}: {why}", field=field, value=None))

    # -----------------------------------------------------------------------------------------------------------
    # Ending the process.

    def _drop_process(self) -> None:
        """Kills the process without waiting; `poll` reaps it."""
        assert self._process is not None
        process, self._process = self._process, None
        self._unreaped.append(process.kill())
        reap(self._unreaped)

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._spec = None
        if self._process is not None:
            self._drop_process()
        while self._unreaped:
            self._unreaped.pop().terminate()  # returns soon: it was killed before
