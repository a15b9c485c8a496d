"""Administration of a running engine by other processes: the calls that they may make, and the answers.

    AdminClient ──RpcCall, buffers...───▶ AdminListener ──▶ AdminEndpoint
                ◀──RpcResult, buffers...──

A listener authenticates the client: `LocalListener` by its user, on this host; `CurveListener` by its key, over TCP.
The endpoint does the rest for both.

A client may call the public methods (`public_methods`) that its scopes allow, and may never send code. It cannot
overload the engine: frame sizes, calls in flight and the outgoing backlog are bounded, and the endpoint counts and
drops malformed frames.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import msgspec

from ringcore.config.admin_keys import KnownClient
from ringcore.curve.logged_counter import LoggedCounter
from ringcore.engine_core.admin.listener import MAX_CALLS_IN_FLIGHT, AdminListener, Incoming
from ringcore.engine_core.admin.public_methods import PublicMethods
from ringcore.engine_core.transport.framing import Buffer, FrameError, FrameLimits
from ringcore.errors import InvalidRequestError, PermissionDeniedError, RingcoreError
from ringcore.protocol.codec import decoder, encoder
from ringcore.protocol.messages import RpcCall, RpcResult
from ringcore.protocol.methods import RpcMethod
from ringcore.protocol.requests import WireError
from ringcore.protocol.scopes import SCOPES
from ringcore.protocol.wire_errors import wire_error

__all__ = ["MAX_TIMEOUT_S", "AdminCall", "AdminEndpoint", "Caller"]

MAX_TIMEOUT_S = 86_400.0
MAX_METHOD_CHARS = 256

_MAX_DROPS_PER_RECEIVE = 16  # a flood of malformed messages must not delay the engine's steps
_LOOK_EVERY_S = 1e-3  # in an engine whose loop does not poll: a look is a system call


class Caller(NamedTuple):
    """Where a call came from and its answer goes: the listener, and its name for the connection."""

    listener: AdminListener
    identity: bytes


class AdminCall(NamedTuple):
    """A call that an `AdminClient` made."""

    caller: Caller
    call: RpcCall
    parts: list[memoryview]  # the arguments, as `value_codec.encode_request` encoded them


class AdminEndpoint:
    """The server side of admin clients. One thread at a time; only `close` blocks. It owns the listeners.

    The engine's loop polls `fds`, which may be edge-triggered: before it polls, `receive` must have returned None and
    `has_messages` must be False, after every `send` too. It calls `receive` when that `is_due`, and `notice` with what
    its poll returned. `serve` sets the public methods, before the first `receive`.
    """

    def __init__(self, listeners: Iterable[AdminListener], limits: FrameLimits) -> None:
        self._listeners = deque(listeners)
        self._edge_triggered = [one for one in self._listeners if one.is_edge_triggered]
        self._limits = limits
        self.fds = frozenset(listener.fileno() for listener in self._listeners)
        self.address = next((one.address for one in self._listeners if one.address is not None), None)
        self._encoder, self._decoder = encoder(), decoder(RpcCall)
        self._in_flight: dict[tuple[Caller, int], str] = {}  # (caller, call id) -> the client's name
        self._num_in_flight: Counter[str] = Counter()
        self._dropped = LoggedCounter("dropped %d malformed messages of admin clients, the last one: %s")
        self._denied = LoggedCounter("denied %d calls of admin clients without the required scope, the last one: %s")
        self._lost = LoggedCounter("dropped %d replies that admin clients did not read, the last one: %s")
        self._methods: PublicMethods | None = None
        self._is_signalled, self._looked_s = True, 0.0

    def serve(self, methods: PublicMethods) -> None:
        """Sets the methods that clients may call."""
        self._methods = methods

    @property
    def has_messages(self) -> bool:
        """Whether the descriptors will not signal messages that have arrived."""
        for listener in self._edge_triggered:
            if listener.has_messages:
                self._is_signalled = True
                return True
        return False

    @property
    def is_due(self) -> bool:
        """Whether a poll has signalled messages, or the last `receive` was a millisecond ago."""
        return self._is_signalled or time.monotonic() - self._looked_s >= _LOOK_EVERY_S

    def notice(self, ready: Set[int]) -> None:
        """ready: the descriptors that a poll found readable."""
        if not ready.isdisjoint(self.fds):
            self._is_signalled = True

    @property
    def num_dropped(self) -> int:
        """Malformed messages."""
        return self._dropped.num

    @property
    def num_denied(self) -> int:
        """Calls for which the client lacks the scope."""
        return self._denied.num

    @property
    def num_lost_replies(self) -> int:
        """Replies dropped because the client is gone or does not read."""
        return self._lost.num

    @property
    def num_rejected(self) -> int:
        """Connections refused: an unknown key, another user."""
        return sum(listener.num_rejected for listener in self._listeners)

    # -----------------------------------------------------------------------------------------------------------
    # Receiving.

    def receive(self) -> AdminCall | None:
        """The next permitted call. The endpoint answers a call that is not permitted with its error.

        None if no message is left, or after many rejected messages in a row: see `has_messages`.
        """
        for _ in range(_MAX_DROPS_PER_RECEIVE):
            try:
                received = self._next_message()
            except FrameError as error:
                self._dropped.add(str(error)[:200])
                continue
            if received is None:
                self._is_signalled, self._looked_s = False, time.monotonic()
                return None
            call = self._take(*received)
            if call is not None:
                return call
        return None

    def _next_message(self) -> tuple[AdminListener, Incoming] | None:
        """From the listeners in turn."""
        for _ in range(len(self._listeners)):
            listener = self._listeners[0]
            self._listeners.rotate(-1)
            if (incoming := listener.receive()) is not None:
                return listener, incoming
        return None

    def _take(self, listener: AdminListener, incoming: Incoming) -> AdminCall | None:
        caller, client = Caller(listener, incoming.identity), incoming.client
        try:
            call, parts = self._read(incoming.frames)
            if (caller, call.call_id) in self._in_flight:
                raise ValueError(f"call {call.call_id} is in flight already")
        except Exception as error:  # any error that decoding foreign bytes can raise
            self._dropped.add(f"{type(error).__name__}: {error}"[:200])
            return None
        rejection = self._rejection(call, client)
        if rejection is not None:
            self._send(caller, RpcResult(call.call_id, error=wire_error(rejection)), ())
            return None
        self._in_flight[caller, call.call_id] = client.name
        self._num_in_flight[client.name] += 1
        return AdminCall(caller, call, parts)

    def _read(self, frames: list[memoryview]) -> tuple[RpcCall, list[memoryview]]:
        """Decodes a call and its buffers. Raises if an `AdminClient` could not have sent them."""
        body, *parts = frames
        limit_error = self._limits.limit_error(len(body), len(parts), sum(map(len, parts)))
        if limit_error is not None:
            raise ValueError(limit_error)
        call: RpcCall = self._decoder.decode(body)
        if call.is_callable or (call.target != "workers" and not parts):
            return call, parts
        # Workers execute the method named in the buffers, so it must be the one whose scope is checked.
        (method, _, _) = _request_decoder.decode(parts[0])
        if method != call.method:
            raise ValueError("the arguments belong to another method")
        return call, parts

    def _rejection(self, call: RpcCall, client: KnownClient) -> RingcoreError | None:
        """The error of a well-formed call that is not permitted; None if it is."""
        if call.is_callable:
            return _invalid("method", call.method, "an admin client may not send functions; give a method's name")
        if len(call.method) > MAX_METHOD_CHARS:
            return _invalid("method", call.method, f"the name has more than {MAX_METHOD_CHARS} characters")
        if call.timeout_s is None or not 0 <= call.timeout_s <= MAX_TIMEOUT_S:
            return _invalid("timeout", call.timeout_s, f"give seconds, at most {MAX_TIMEOUT_S:.0f}")
        assert self._methods is not None, "serve() comes before receive()"
        try:
            method = self._methods.find(call.target, call.method)
        except InvalidRequestError as error:
            return error
        if method.scope not in client.scopes:
            self._denied.add(f"{call.method} with the key {client.name}")
            return _denied(method, client)
        if self._num_in_flight[client.name] >= MAX_CALLS_IN_FLIGHT:
            limit = f"{MAX_CALLS_IN_FLIGHT} calls of {client.name!r} are in flight; wait for one of them"
            return _invalid("method", call.method, limit)
        return None

    # -----------------------------------------------------------------------------------------------------------
    # Sending.

    def send(self, caller: Caller, result: RpcResult, parts: Sequence[Buffer] = ()) -> None:
        """Answers a call. The endpoint drops the reply to a client that does not read.

        Raises what encoding raises, or `ValueError` above a limit; then nothing is sent and the call stays in flight.
        """
        self._send(caller, result, parts)
        client = self._in_flight.pop((caller, result.call_id), None)
        if client is not None:
            self._num_in_flight[client] -= 1
            if not self._num_in_flight[client]:
                del self._num_in_flight[client]  # there may be many clients in an engine's life

    def _send(self, caller: Caller, result: RpcResult, parts: Sequence[Buffer]) -> None:
        body = self._encoder.encode(result)
        limit_error = self._limits.limit_error(len(body), len(parts), sum(map(len, parts)))
        if limit_error is not None:
            raise ValueError(limit_error)
        lost = caller.listener.send(caller.identity, body, parts)
        if lost is not None:
            self._lost.add(lost)

    def fail(self, error: WireError) -> None:
        """Answers every call in flight with this error."""
        for caller, call_id in list(self._in_flight):
            self.send(caller, RpcResult(call_id, error=error))

    def close(self, linger_s: float = 0.0) -> None:
        """Closes every listener after at most `linger_s` seconds each to send the pending replies. Idempotent."""
        for listener in self._listeners:
            listener.close(linger_s)
        for counter in (self._dropped, self._denied, self._lost):
            counter.log()


def _denied(method: RpcMethod, client: KnownClient) -> PermissionDeniedError:
    has = " ".join(scope for scope in SCOPES if scope in client.scopes)
    wanted = " ".join(scope for scope in SCOPES if scope in {*client.scopes, method.scope})
    return PermissionDeniedError(
        f"method={method.name!r}: it needs the scope {method.scope!r}, the key {client.name!r} has {has or 'none'!r}; "
        f'write scope = "{wanted}" into the metadata of {client.file}, and restart the engine',
        method=method.name,
        scope=method.scope,
        key=client.name,
        file=client.file,
    )


def _invalid(field: str, value: object, remedy: str) -> InvalidRequestError:
    shown = repr(value)[: MAX_METHOD_CHARS + 2]
    return InvalidRequestError(f"{field}={shown}: {remedy}", field=field, value=shown)


_request_decoder = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw, msgspec.Raw])
