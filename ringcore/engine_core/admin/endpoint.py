"""The engine's TCP endpoint for administration: encrypted, restricted to known keys, and off by default.

    AdminClient (DEALER) ──RpcCall, buffers...───▶ AdminEndpoint (ROUTER)
                         ◀──RpcResult, buffers...──

Every connection uses CurveZMQ. Before libzmq delivers a connection's first frame it asks the ZAP handler (RFC 27)
whether the client's public key is one of those in the keys' directory. Without a ZAP handler libzmq refuses every
connection.

A client with a key may call the public methods (`public_methods`) that the key's scopes allow, and may never send code.
It cannot overload the engine: frame sizes, calls in flight and the outgoing backlog are bounded, and the endpoint
counts and drops malformed frames.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import zmq

from ringcore.config.admin_keys import KnownClient, ServerKeys, read_server_keys
from ringcore.engine_core.admin.public_methods import PublicMethods
from ringcore.engine_core.admin.zap_handler import ZAP_DOMAIN, LoggedCounter, ZapHandler
from ringcore.engine_core.transport.framing import MAX_BUFFERS_PER_RANK, Buffer, FrameLimits
from ringcore.errors import ConfigError, InvalidRequestError, PermissionDeniedError, RingcoreError
from ringcore.protocol.codec import decoder, encoder
from ringcore.protocol.messages import RpcCall, RpcResult
from ringcore.protocol.methods import RpcMethod
from ringcore.protocol.requests import WireError
from ringcore.protocol.scopes import SCOPES
from ringcore.protocol.wire_errors import wire_error

__all__ = ["ADMIN_LIMITS", "MAX_TIMEOUT_S", "AdminCall", "AdminEndpoint", "set_common_options"]

ADMIN_LIMITS = FrameLimits(message_bytes=1 << 20, buffer_bytes=64 << 20, num_buffers=MAX_BUFFERS_PER_RANK)
MAX_TIMEOUT_S = 86_400.0
MAX_METHOD_CHARS = 256
MAX_CALLS_IN_FLIGHT = 64  # per key, over all its connections

_CURVE_BYTES = 1 << 10  # upper bound of what encryption adds to a frame
# Per direction: beyond it the endpoint stops reading a connection (back-pressure), or drops replies to a client that
# does not read.
_HIGH_WATER_MARK = MAX_CALLS_IN_FLIGHT
_HANDSHAKE_MS = 10_000
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5_000, 15_000
_MAX_DROPS_PER_RECEIVE = 16  # a flood of malformed messages must not delay the engine's steps


class AdminCall(NamedTuple):
    """A call that an `AdminClient` made. identity: the connection that gets the reply."""

    identity: bytes
    call: RpcCall
    parts: list[memoryview]  # the arguments, as `value_codec.encode_request` encoded them


class AdminEndpoint:
    """The server socket of admin clients. One thread at a time; only `close` blocks.

    `address` is the endpoint with the port that was picked. `fileno` is edge-triggered: before the engine's loop polls,
    `receive` must have returned None and `has_messages` must be False, after every `send` too. `serve` sets the public
    methods, before the first `receive`.

    Raises `ConfigError` for unusable keys and for an address that cannot be bound.
    """

    def __init__(self, endpoint: str, keys: str, num_ranks: int = 1, limits: FrameLimits = ADMIN_LIMITS) -> None:
        server = read_server_keys(keys)
        self._limits = FrameLimits(limits.message_bytes, limits.buffer_bytes, limits.num_buffers * num_ranks)
        self._encoder, self._decoder = encoder(), decoder(RpcCall)
        self._in_flight: dict[tuple[bytes, int], str] = {}  # (identity, call id) -> the client's name
        self._num_in_flight: Counter[str] = Counter()
        self._dropped = LoggedCounter("dropped %d malformed messages of admin clients, the last one: %s")
        self._denied = LoggedCounter("denied %d calls of admin clients without the required scope, the last one: %s")
        self._lost = LoggedCounter("dropped %d replies that admin clients did not read, the last one: %s")
        self._context = zmq.Context()
        self._clients = server.clients
        self._zap_handler = ZapHandler(self._context, server.clients)  # before the first connection
        self._methods: PublicMethods | None = None
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            self._listen(endpoint, server)
        except BaseException:
            self.close()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _listen(self, endpoint: str, server: ServerKeys) -> None:
        set_common_options(self._socket, self._limits)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a client that is gone or does not read raises
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, server.secret)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else a missing ZAP handler accepts every key
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise _cannot_listen(endpoint, error) from error

    def serve(self, methods: PublicMethods) -> None:
        """Sets the methods that clients may call."""
        self._methods = methods

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def has_messages(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def num_dropped(self) -> int:
        """Malformed messages."""
        return self._dropped.num

    @property
    def num_denied(self) -> int:
        """Calls for which the client's key lacks the scope."""
        return self._denied.num

    @property
    def num_lost_replies(self) -> int:
        """Replies dropped because the client is gone or does not read."""
        return self._lost.num

    @property
    def num_rejected(self) -> int:
        """Connections refused because their key is unknown."""
        return self._zap_handler.num_rejected

    # -----------------------------------------------------------------------------------------------------------
    # Receiving.

    def receive(self) -> AdminCall | None:
        """The next permitted call. The endpoint answers a call that is not permitted with its error.

        None if no message is left, or after many rejected messages in a row: see `has_messages`.
        """
        for _ in range(_MAX_DROPS_PER_RECEIVE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            call = self._take(frames)
            if call is not None:
                return call
        return None

    def _take(self, frames: list[zmq.Frame]) -> AdminCall | None:
        identity = frames[0].bytes
        try:
            client = self._clients[str(frames[1].get("User-Id")).encode()]
            call, parts = self._read([frame.buffer for frame in frames[1:]])
            if (identity, call.call_id) in self._in_flight:
                raise ValueError(f"call {call.call_id} is in flight already")
        except Exception as error:  # any error that decoding foreign bytes can raise
            self._dropped.add(f"{type(error).__name__}: {error}"[:200])
            return None
        rejection = self._rejection(call, client)
        if rejection is not None:
            self._send(identity, RpcResult(call.call_id, error=wire_error(rejection)), ())
            return None
        self._in_flight[identity, call.call_id] = client.name
        self._num_in_flight[client.name] += 1
        return AdminCall(identity, call, parts)

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
            limit = f"{MAX_CALLS_IN_FLIGHT} calls with the key {client.name!r} are in flight; wait for one of them"
            return _invalid("method", call.method, limit)
        return None

    # -----------------------------------------------------------------------------------------------------------
    # Sending.

    def send(self, identity: bytes, result: RpcResult, parts: Sequence[Buffer] = ()) -> None:
        """Answers a call. The endpoint drops the reply to a client that does not read.

        Raises what encoding raises, or `ValueError` above a limit; then nothing is sent and the call stays in flight.
        """
        self._send(identity, result, parts)
        client = self._in_flight.pop((identity, result.call_id), None)
        if client is not None:
            self._num_in_flight[client] -= 1

    def _send(self, identity: bytes, result: RpcResult, parts: Sequence[Buffer]) -> None:
        body = self._encoder.encode(result)
        limit_error = self._limits.limit_error(len(body), len(parts), sum(map(len, parts)))
        if limit_error is not None:
            raise ValueError(limit_error)
        try:
            self._socket.send_multipart([identity, body, *parts], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            self._lost.add("the client does not read" if error.errno == errno.EAGAIN else "the client is gone")

    def fail(self, error: WireError) -> None:
        """Answers every call in flight with this error."""
        for identity, call_id in list(self._in_flight):
            self.send(identity, RpcResult(call_id, error=error))

    def close(self, linger_s: float = 0.0) -> None:
        """Closes the socket after at most `linger_s` seconds to send the pending replies. Idempotent."""
        if not self._context.closed:
            self._socket.close(linger=round(linger_s * 1e3))
            self._context.term()  # ends the ZAP handler's thread and waits for its socket
            self._zap_handler.join()
            self._dropped.log()
            self._denied.log()
            self._lost.log()


def set_common_options(socket: zmq.Socket[bytes], limits: FrameLimits) -> None:
    """Socket options of both ends: bounds on a frame, the queues and a handshake; closing does not linger."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max(limits.message_bytes, limits.buffer_bytes) + _CURVE_BYTES)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def _cannot_listen(endpoint: str, error: zmq.ZMQError) -> ConfigError:
    remedies = {
        errno.EADDRINUSE: "the port is in use; give another one, or 0 to have one picked",
        errno.EACCES: "this user may not listen there; give a port above 1023, or 0 to have one picked",
    }
    no_such = f"cannot listen there ({error.strerror}); give an address of this host, e.g. 127.0.0.1"
    remedy = remedies.get(error.errno or 0, no_such)
    return ConfigError(f"admin_endpoint={endpoint!r}: {remedy}", option="admin_endpoint", value=repr(endpoint))


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
