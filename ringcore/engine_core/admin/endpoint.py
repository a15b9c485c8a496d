"""The engine's end of administration over TCP: encrypted, for known keys alone, and only where it was asked for.

    AdminClient (DEALER) ──RpcCall, buffers...───▶ AdminEndpoint (ROUTER)
                         ◀──RpcResult, buffers...──

Every connection is CurveZMQ's. Before its first frame gets here, libzmq has asked the gatekeeper (by ZAP, RFC 27)
whether the client's public key is one of those in the keys' directory. Without a gatekeeper nobody is let in.

A client with a key may call what can be called from outside (`public_methods`), as far as the scopes of the key go, but
never bring code. It may not hurt the engine: the frames, the calls under way and what waits for it are bounded, and a
frame that is none of ours is counted and dropped.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import zmq

from ringcore.config.admin_keys import KnownClient, ServerKeys, read_server_keys
from ringcore.engine_core.admin.gatekeeper import ZAP_DOMAIN, Gatekeeper, Tally
from ringcore.engine_core.admin.public_methods import PublicMethods
from ringcore.engine_core.transport.framing import MAX_BUFFERS_A_RANK, Buffer, FrameLimits
from ringcore.errors import ConfigError, InvalidRequestError, PermissionDeniedError, RingcoreError
from ringcore.protocol.codec import decoder, encoder
from ringcore.protocol.messages import RpcCall, RpcResult
from ringcore.protocol.methods import RpcMethod
from ringcore.protocol.requests import WireError
from ringcore.protocol.scopes import SCOPES
from ringcore.protocol.wire_errors import wire_error

__all__ = ["ADMIN_LIMITS", "MAX_TIMEOUT_S", "AdminCall", "AdminEndpoint", "set_common_options"]

ADMIN_LIMITS = FrameLimits(message_bytes=1 << 20, buffer_bytes=64 << 20, num_buffers=MAX_BUFFERS_A_RANK)
MAX_TIMEOUT_S = 86_400.0
MAX_METHOD_CHARS = 256
MAX_CALLS_UNDER_WAY = 64  # of one key, over however many connections

_CURVE_BYTES = 1 << 10  # more than encryption adds to a frame
_MESSAGES_WAITING = MAX_CALLS_UNDER_WAY  # a way, before a connection is not read, or loses replies: never if it reads
_HANDSHAKE_MS = 10_000
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5_000, 15_000
_DROPS_A_RECEIVE = 16  # a flood must not keep the engine from its steps


class AdminCall(NamedTuple):
    """A call that an `AdminClient` made. identity: whom to answer."""

    identity: bytes
    call: RpcCall
    parts: list[memoryview]  # the arguments, as `value_codec.encode_request` gave them


class AdminEndpoint:
    """Where admin clients connect. One thread at a time; nothing here blocks but `close`.

    `address` is the endpoint with the port that was picked. `fileno` becomes readable when something may have arrived,
    but only once: before its owner sleeps, `receive` must have returned None and `has_messages` must be False, after
    every `send` too. What may be called it is told by `serve`, before the first `receive`.

    Raises `ConfigError` for unusable keys and for an address that cannot be had.
    """

    def __init__(self, endpoint: str, keys: str, num_ranks: int = 1, limits: FrameLimits = ADMIN_LIMITS) -> None:
        server = read_server_keys(keys)
        self._limits = FrameLimits(limits.message_bytes, limits.buffer_bytes, limits.num_buffers * num_ranks)
        self._encoder, self._decoder = encoder(), decoder(RpcCall)
        self._under_way: dict[tuple[bytes, int], str] = {}  # the client's name by identity and call id
        self._num_under_way: Counter[str] = Counter()
        self._dropped = Tally("dropped %d malformed messages of admin clients, the last one: %s")
        self._denied = Tally("denied %d calls of admin clients for want of a scope, the last one: %s")
        self._lost = Tally("dropped %d replies that admin clients did not take, the last one: %s")
        self._context = zmq.Context()
        self._clients = server.clients
        self._gatekeeper = Gatekeeper(self._context, server.clients)  # before anybody can knock
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
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a client that is gone, or does not read, is an error
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, server.secret)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else a missing gatekeeper lets everybody in
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise _cannot_listen(endpoint, error) from error

    def serve(self, methods: PublicMethods) -> None:
        """From now on, these may be called."""
        self._methods = methods

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def has_messages(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def num_dropped(self) -> int:
        """Messages that were malformed."""
        return self._dropped.num

    @property
    def num_denied(self) -> int:
        """Calls for which the client's key lacks the scope."""
        return self._denied.num

    @property
    def num_lost_replies(self) -> int:
        """Replies to clients that are gone, or that do not read."""
        return self._lost.num

    @property
    def num_refused(self) -> int:
        """Connections with a key that is not known here."""
        return self._gatekeeper.num_refused

    # -----------------------------------------------------------------------------------------------------------
    # In.

    def receive(self) -> AdminCall | None:
        """The next call that may be made. What may not be is answered here, with its error.

        None where nothing is left, or after many messages in a row that are no calls: see `has_messages`.
        """
        for _ in range(_DROPS_A_RECEIVE):
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
            if (identity, call.call_id) in self._under_way:
                raise ValueError(f"call {call.call_id} is under way already")
        except Exception as error:  # whatever decoding makes of bytes that are not ours
            self._dropped.add(f"{type(error).__name__}: {error}"[:200])
            return None
        refusal = self._refusal(call, client)
        if refusal is not None:
            self._send(identity, RpcResult(call.call_id, error=wire_error(refusal)), ())
            return None
        self._under_way[identity, call.call_id] = client.name
        self._num_under_way[client.name] += 1
        return AdminCall(identity, call, parts)

    def _read(self, frames: list[memoryview]) -> tuple[RpcCall, list[memoryview]]:
        """A call and its buffers. Raises where they are not what an `AdminClient` sends."""
        body, *parts = frames
        excess = self._limits.excess(len(body), len(parts), sum(map(len, parts)))
        if excess is not None:
            raise ValueError(excess)
        call: RpcCall = self._decoder.decode(body)
        if call.is_callable or (call.target != "workers" and not parts):
            return call, parts
        # Workers execute what stands here: neither another method than the one that is checked, nor a function.
        (method, _, _) = _request_decoder.decode(parts[0])
        if method != call.method:
            raise ValueError("the arguments are those of another method")
        return call, parts

    def _refusal(self, call: RpcCall, client: KnownClient) -> RingcoreError | None:
        """Why a well-formed call is not made."""
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
        if self._num_under_way[client.name] >= MAX_CALLS_UNDER_WAY:
            limit = f"{MAX_CALLS_UNDER_WAY} calls with the key {client.name!r} are under way; wait for one of them"
            return _invalid("method", call.method, limit)
        return None

    # -----------------------------------------------------------------------------------------------------------
    # Out.

    def send(self, identity: bytes, result: RpcResult, parts: Sequence[Buffer] = ()) -> None:
        """Answers a call. A client that does not read loses its reply.

        Raises what encoding raises, or `ValueError` above a limit; nothing is sent then, and the call is under way.
        """
        self._send(identity, result, parts)
        client = self._under_way.pop((identity, result.call_id), None)
        if client is not None:
            self._num_under_way[client] -= 1

    def _send(self, identity: bytes, result: RpcResult, parts: Sequence[Buffer]) -> None:
        body = self._encoder.encode(result)
        excess = self._limits.excess(len(body), len(parts), sum(map(len, parts)))
        if excess is not None:
            raise ValueError(excess)
        try:
            self._socket.send_multipart([identity, body, *parts], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            self._lost.add("the client does not read" if error.errno == errno.EAGAIN else "the client is gone")

    def fail(self, error: WireError) -> None:
        """Answers every call that is under way with this error."""
        for identity, call_id in list(self._under_way):
            self.send(identity, RpcResult(call_id, error=error))

    def close(self, linger_s: float = 0.0) -> None:
        """Closes the socket; what was sent last has `linger_s` seconds to leave. Idempotent."""
        if not self._context.closed:
            self._socket.close(linger=round(linger_s * 1e3))
            self._context.term()  # which ends the gatekeeper, and waits for it
            self._gatekeeper.join()
            self._dropped.log()
            self._denied.log()
            self._lost.log()


def set_common_options(socket: zmq.Socket[bytes], limits: FrameLimits) -> None:
    """What either end sets: bounds on a frame, on what waits, and on a handshake; closing never waits."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max(limits.message_bytes, limits.buffer_bytes) + _CURVE_BYTES)
    socket.setsockopt(zmq.SNDHWM, _MESSAGES_WAITING)
    socket.setsockopt(zmq.RCVHWM, _MESSAGES_WAITING)
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
        f"method={method.name!r}: it takes the scope {method.scope!r}, the key {client.name!r} has {has or 'none'!r}; "
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
