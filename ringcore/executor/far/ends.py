"""Both ends of the connections between hosts: the engine's, where hosts join, and a host's that joins."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import zmq

from ringcore.config.admin_keys import ClientKeys, ServerKeys
from ringcore.curve.logged_counter import LoggedCounter
from ringcore.curve.zap_handler import ZapHandler, require_known_key
from ringcore.errors import ConfigError, EngineDeadError
from ringcore.executor.far.frames import NOTE, Join, Refuse, unpack_head, unpack_note
from ringcore.executor.far.link import Link
from ringcore.executor.far.port import NEVER_MS, Port
from ringcore.executor.ring_memory import RingCorruptError
from ringcore.executor.waiting import Event, PeerDied, Waiter

__all__ = ["HostListener", "JoiningEnd"]

_NUM_IO_THREADS = 2  # they encrypt
_LOST = "the connection ended: its process has ended, or it does not answer"


class Joined(NamedTuple):
    """A host that has joined, from the IP address `address`."""

    note: Join
    address: str


class HostListener:
    """A ROUTER behind CurveZMQ, where hosts join. address: the endpoint, with the port that was picked. joined: the
    last that each host said when it joined, by name. closing_fd: readable after `interrupt` or `close`.

    check: why a host may not join, or None. Raises `ConfigError` for an address where nothing can listen.
    """

    def __init__(self, endpoint: str, keys: ServerKeys, check: Callable[[Join], str | None]) -> None:
        self._check = check
        self._context = zmq.Context(_NUM_IO_THREADS)
        self._zap_handler = ZapHandler(self._context, keys.clients, "the hosts' endpoint")
        self._strange = LoggedCounter("%d frames of strangers at the hosts' endpoint were dropped, the last: %s")
        self._links: dict[bytes, Link] = {}  # by routing id
        self._link_of_fd: dict[int, Link] = {}  # by the socket of the connection
        self._waiting: dict[str, Link] = {}  # joined, and not yet taken by `wait_for`
        self.joined: dict[str, Joined] = {}
        self._joined, self._closing = Event(), Event()
        self.closing_fd = self._closing.fd
        self._port = Port(self._context, zmq.ROUTER, self._take, self._on_event, zmq.EVENT_DISCONNECTED)
        try:
            require_known_key(self._port.socket, keys.secret)
            self._port.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            self._port.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            remedy = "give another port, or 0" if error.errno == errno.EADDRINUSE else "give an address of this host"
            text = f"join_endpoint={endpoint!r}: cannot listen there ({error.strerror}); {remedy}"
            raise ConfigError(text, option="join_endpoint", value=repr(endpoint)) from error
        self.address = self._port.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait_for(self, hosts: Sequence[str], deadline: float) -> dict[str, Link]:
        """The link to each of these hosts, once all have joined; the caller closes them.

        Raises `DeadlinePassed`, and `EngineDeadError` after `interrupt` or `close`.
        """

        def all_are_here() -> bool:
            self._port.pump()
            return all(map(self.is_waiting, hosts))

        with self._port.lock:
            if self._port.is_closed:
                raise EngineDeadError("the workers were shut down", process="workers")
            waiter = Waiter([self._joined.fd], [self.closing_fd], sources=self._port.sources)
        with closing(waiter):
            try:
                waiter.wait(all_are_here, deadline)
            except PeerDied:
                raise EngineDeadError("the workers were shut down", process="workers") from None
        return {name: self._waiting.pop(name) for name in hosts}

    def is_waiting(self, host: str) -> bool:
        """Whether it has joined, and neither been taken by `wait_for` nor left."""
        return host in self._waiting and self._waiting[host].why is None

    def interrupt(self) -> None:
        """Ends `wait_for` in another thread."""
        self._closing.signal()

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        identity = frames[0].bytes
        link = self._links.get(identity)
        if len(frames) != 2:
            self._strange.add(f"{len(frames)} frames")
        elif link is None:
            self._take_stranger(identity, frames[1])
        else:
            link.take(memoryview(frames[1].buffer))

    def _take_stranger(self, identity: bytes, frame: zmq.Frame) -> None:
        """A host's first frame. It has a known key."""
        try:
            kind, *_ = unpack_head(frame.buffer)
            note = unpack_note(frame.buffer) if kind == NOTE else None
        except RingCorruptError as error:
            self._strange.add(error.message)
            return
        if not isinstance(note, Join):
            self._strange.add(f"kind {kind} before a host has joined")
            return
        link = Link(self._port, f"{note.host!r} ({frame.get('Peer-Address')})", [identity])
        reason = self._check(note)
        if reason is None and self.is_waiting(note.host):
            reason = f"a host of the name {note.host!r} has joined already"
        if reason is not None:
            link.note(Refuse(reason))
            link.close()
            return
        self._port.take_events()  # of an earlier connection that had this descriptor
        self._link_of_fd[int(str(frame.get("__fd")))] = link
        self._links[identity] = self._waiting[note.host] = link
        self.joined[note.host] = Joined(note, str(frame.get("Peer-Address")))
        self._joined.signal()

    def _on_event(self, event: int, value: int) -> Callable[[], None] | None:
        link = self._link_of_fd.pop(value, None)
        return None if link is None else partial(self._lose, link)

    def _lose(self, link: Link) -> None:
        link.lose(_LOST)
        self._links = {identity: one for identity, one in self._links.items() if one is not link}

    def close(self) -> None:
        """Idempotent, in any thread."""
        with self._port.lock:
            if not self._port.close():
                return
            for link in {*self._links.values(), *self._waiting.values()}:
                link.close()
            self._closing.close()
            self._joined.close()
        self._context.term()
        self._zap_handler.join()


class JoiningEnd:
    """A DEALER behind CurveZMQ that connects once. link: to the engine, whose first note must be a `Join`; the engine's
    answer may arrive while that is sent, so `on_note` is set before.

    refused: why the engine does not want this host, for a person, if it does not. unknown: why the handshake failed
    otherwise: a wrong server key, or an engine that ends.
    """

    def __init__(self, endpoint: str, keys: ClientKeys) -> None:
        self.refused: str | None = None
        self.unknown: str | None = None
        self._context = zmq.Context()
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        events |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
        self._port = Port(self._context, zmq.DEALER, self._take, self._on_event, events)
        self.link = Link(self._port, f"the engine at {endpoint}")
        socket = self._port.socket
        try:
            socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
            socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            text = f"join={endpoint!r}: {error.strerror}; give the address that the engine reports"
            raise ConfigError(text, option="join", value=repr(endpoint)) from error

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        self.link.take(memoryview(frames[-1].buffer))

    def _on_event(self, event: int, value: int) -> Callable[[], None] | None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refused = "the engine does not know this key"
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            self.unknown = "the handshake failed: the server key may be that of another engine"
        elif event in (zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED):
            return partial(self.link.lose, "nothing listens there")
        reason = self.refused or self.unknown
        return partial(self.link.lose, reason or "the connection ended: the engine has ended, or does not answer")

    def close(self) -> None:
        """Idempotent, in any thread."""
        self.link.close()
        if self._port.close():
            self._context.term()
