"""Keeps engines parked: starts them ahead, has them sleep, and hands each to the first program that asks for it.

    starting ──ready, asleep──▶ parked ──TAKE──▶ handed over: its processes die with the program that took it
       ▲  └──error──▶ (a pause) ──┐  └──death──▶ (a pause) ──┐
       └──────────────────────────┴──────────────────────────┘

The engines are children of this program. Those that are parked end with it, whatever ends it; one that was handed over
watches its new owner from before that one has it, so that it never lives without an owner.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple

from ringcore.config import EngineConfig
from ringcore.engine_core.admin.local_name import peer_credentials
from ringcore.errors import EngineDeadError, RingcoreError, RpcTimeoutError
from ringcore.front_end.client import EngineCoreClient
from ringcore.front_end.connection import EngineConnection
from ringcore.front_end.parking.key import parked_key
from ringcore.front_end.parking.park_socket import listen
from ringcore.front_end.parking.sleep_level import checked_keep_and_level
from ringcore.front_end.start_checks import check_start
from ringcore.host.os_limits import os_limit_errors
from ringcore.host.owner_process import OwnerProcess
from ringcore.params.field_checks import check_timeout
from ringcore.protocol.codec import encoder
from ringcore.protocol.messages import EngineReady
from ringcore.protocol.parking import STOP, TAKE, HandOver, NoneParked, ParkOffer

__all__ = ["ParkedEngines"]

_TIMEOUT_S = 2.0  # of a message of the program that asks
# After a start that failed, and an engine that died; doubled each time, and cut short when an engine that was handed
# over ends, since it may have had the memory. Also after a hand-over, so that its start-up has the processors.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 600.0
_JOIN_S = 30.0

_log = logging.getLogger(__name__)


class _Parked(NamedTuple):
    client: EngineCoreClient
    connection: EngineConnection  # the client's
    ready: EngineReady


class ParkedEngines:
    """Engines of one configuration that wait for programs of this user on this host, until `close`.

        with ParkedEngines("path/to/model", keep=1) as parked:
            parked.wait()
            llm = LLM("path/to/model", start_from="parked")

    keep: how many are parked; one that was adopted is replaced. level: how deep they sleep meanwhile, see `LLM.sleep`:
    1, with their weights in host memory; 2, without weights, which are then read from the files again; 0, with all
    their memory. None means 1 with enable_sleep_mode, else 0.

    The engine options, the model's files, the versions and the environment variables of the libraries must be equal
    there. Raises `ConfigError`, and what `LLM` raises before an engine starts. Dropped, it stays until the program
    ends.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, keep: int = 1, level: int | None = None, **engine_options: Any
    ) -> None:
        config = EngineConfig.from_options(model=model, **engine_options)
        self.config = replace(config, parallel=replace(config.parallel, start_from="new"))
        self.keep, self.level = checked_keep_and_level(self.config, keep, level)
        check_start(self.config)
        self._owner = OwnerProcess("the pool of parked engines")
        self._key = parked_key(self.config)
        self._changed = threading.Condition()  # guards the following
        self._parked: list[_Parked] = []
        self._starting: EngineCoreClient | None = None
        self._failure: RingcoreError | None = None  # of the last start, until one succeeds
        self._pause_s = _FIRST_PAUSE_S
        self._next_start_s = 0.0  # monotonic
        self._is_closing = False
        self._listening = listen()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._threads = [
            threading.Thread(target=run, name=f"ringcore-park-{name}", daemon=True)
            for name, run in (("starter", self._start_all), ("listener", self._listen))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until `keep` engines are parked. Raises the error of a start that failed, `RpcTimeoutError`, and
        `EngineDeadError` if this was closed."""
        self._owner.check()
        check_timeout("timeout", timeout)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._failure or self.num_parked >= self.keep, timeout)
            if self._is_closing:
                raise EngineDeadError("the pool of parked engines was closed", process="engine")
            if self._failure is not None:
                raise type(self._failure)(self._failure.message, **self._failure.details)
            if self.num_parked < self.keep:
                text = f"{self.num_parked} of {self.keep} engines are parked after {timeout} s"
                raise RpcTimeoutError(text, method="wait", timeout_s=timeout, missing_ranks=[])

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Waits until `close` was called, or 'ringcore park --stop'; whether it was."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_closing, timeout)

    def close(self) -> None:
        """Ends the parked engines; those that were handed over go on. Idempotent. Does nothing in a forked process."""
        if not self._owner.is_here:
            return
        self._begin_closing()
        for thread in self._threads:
            thread.join(_JOIN_S)
        with self._changed:
            parked, self._parked = self._parked, []
            wake_fd, self._wake_fd = self._wake_fd, -1
        for one in parked:
            one.client.close()
        if wake_fd >= 0:
            self._listening.close()
            os.close(wake_fd)

    def _begin_closing(self) -> None:
        with self._changed:
            self._is_closing = True
            starting = self._starting
            self._wake()
        if starting is not None:
            starting.close()

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def __enter__(self) -> ParkedEngines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -----------------------------------------------------------------------------------------------------------
    # Starting, in a thread of its own.

    def _start_all(self) -> None:
        while self._await_start():
            try:
                self._start_one()
            except RingcoreError as error:
                self._note_failure(error)
            except Exception as error:
                self._note_failure(EngineDeadError(f"an engine cannot be parked: {error!r}", process="engine"))

    def _await_start(self) -> bool:
        """Waits until an engine is missing and may be started; False at the end."""
        with self._changed:
            while not self._is_closing:
                left_s = self._next_start_s - time.monotonic()
                is_missing = self.num_parked < self.keep
                if is_missing and left_s <= 0:
                    return True
                self._changed.wait(left_s if is_missing else None)
            return False

    def _start_one(self) -> None:
        with os_limit_errors("the engine cannot be started"):
            connection = EngineConnection(self.config, can_be_handed_over=True)
        client = EngineCoreClient(self.config, connection=connection)
        with self._changed:
            self._starting = client
            if self._is_closing:
                client.close()
                return
        try:
            ready = client.wait_ready()
            if self.level:
                client.sleep(self.level)
            client.is_sleeping()  # once it has answered, it sends nothing until it is asked
        except BaseException:
            client.close()
            raise
        finally:
            with self._changed:
                self._starting = None
        with self._changed:
            self._parked.append(_Parked(client, connection, ready))
            self._failure = None
            self._wake()

    def _note_failure(self, error: RingcoreError) -> None:
        with self._changed:
            if self._is_closing:
                return
            self._failure = error
            self._next_start_s = time.monotonic() + self._pause_s
            _log.error("an engine could not be parked; the next try in %.0f s: %s", self._pause_s, error.message)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._wake()

    # -----------------------------------------------------------------------------------------------------------
    # Handing over, in a thread of its own: one program after the other.

    def _listen(self) -> None:
        while not self._is_closing:
            poll = select.poll()
            with self._changed:
                by_fd = {one.connection.process_fd: one for one in self._parked}
            for fd in (self._listening.fileno(), self._wake_fd, *by_fd):
                poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            for fd in ready.intersection(by_fd):
                self._remove_dead(by_fd[fd])
            if self._listening.fileno() in ready and not self._is_closing:
                self._accept()

    def _remove_dead(self, dead: _Parked) -> None:
        with self._changed:
            self._parked.remove(dead)
        try:
            dead.client.is_sleeping(timeout=_TIMEOUT_S)  # raises the cause
        except RingcoreError as error:
            self._note_failure(error)
        dead.client.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except OSError as error:
            _log.warning("a program that asks for a parked engine was not let in: %s", error)
            return
        with sock:
            sock.settimeout(_TIMEOUT_S)
            try:
                self._serve(sock)
            except (OSError, RingcoreError) as error:
                _log.warning("a program that asked for a parked engine did not get it: %s", error)

    def _serve(self, sock: socket.socket) -> None:
        pid, uid = peer_credentials(sock)
        if uid != os.geteuid():
            return
        sock.send(encoder().encode(self._offer()))
        asked = sock.recv(len(TAKE) + 1)
        if asked == TAKE:
            self._hand_over(sock, pid)
        elif asked == STOP:
            self._begin_closing()

    def _offer(self) -> ParkOffer:
        with self._changed:
            pids = [one.ready.pids for one in self._parked]
            error = None if self._failure is None else self._failure.message
        return ParkOffer(os.getpid(), self.config.model.model, self.level, self.keep, pids, self._key, error)

    def _hand_over(self, sock: socket.socket, pid: int) -> None:
        with self._changed:
            parked = self._parked.pop(0) if self._parked and pid else None
            self._pause_s, self._next_start_s = _FIRST_PAUSE_S, time.monotonic() + _FIRST_PAUSE_S
        if parked is None:
            reason = "it has none that has started" if pid else "it is in another pid namespace"
            sock.send(encoder().encode(NoneParked(reason)))
            return
        ready = parked.ready

        def send(engine_pid: int, fds: list[int]) -> None:
            socket.send_fds(sock, [encoder().encode(HandOver(engine_pid, self.level, ready))], fds)

        try:
            parked.connection.hand_over(pid, send, self._start_soon)
        finally:
            with self._changed:
                self._wake()  # one is missing
        _log.info("the engine process %d belongs to process %d now", ready.pids["engine"], pid)

    def _start_soon(self) -> None:
        """An engine that was handed over has ended."""
        with self._changed:
            self._pause_s, self._next_start_s = _FIRST_PAUSE_S, 0.0
            self._wake()
