"""Authentication of connections over TCP: libzmq's ZAP handler (RFC 27)."""

from __future__ import annotations

import threading
from collections.abc import Container
from typing import Any

import zmq
from zmq.utils import z85

from ringcore.curve.logged_counter import LoggedCounter

__all__ = ["ZapHandler", "require_known_key"]

ZAP_DOMAIN = b"ringcore"
_ZAP_ADDRESS, _ZAP_VERSION = "inproc://zeromq.zap.01", b"1.0"


def require_known_key(socket: zmq.Socket[bytes], secret_key: bytes) -> None:
    """Makes it the listening end of encrypted connections, whose keys the context's `ZapHandler` must know."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else a missing ZAP handler accepts every key


class ZapHandler:
    """Answers libzmq's authentication requests: it accepts clients with one of these public keys (Z85), and the key
    becomes the "User-Id" of each of their frames. It runs in its own thread, so a handshake does not wait for the
    engine's step. It serves every socket of the context that `require_known_key` prepares; `what` they are goes to the
    log."""

    def __init__(self, context: zmq.Context[Any], clients: Container[bytes], what: str) -> None:
        self._clients = clients
        self._refused = LoggedCounter(f"refused %d connections to {what}, the last from %s: unknown key")
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.bind(_ZAP_ADDRESS)
        self._thread = threading.Thread(target=self._run, name="ZAP handler", daemon=True)
        self._thread.start()

    @property
    def num_rejected(self) -> int:
        return self._refused.num

    def join(self) -> None:
        self._thread.join()
        self._refused.log()

    def _run(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            return
        finally:
            self._socket.close(linger=0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        address, public = b"?", b""
        match request:
            case [version, _, domain, address, _, b"CURVE", key] if (version, domain) == (_ZAP_VERSION, ZAP_DOMAIN):
                public = z85.encode(key)
        if public not in self._clients:
            self._refused.add(address.decode("utf-8", "replace"))
            return [_ZAP_VERSION, request[1], b"400", b"unknown key", b"", b""]
        return [_ZAP_VERSION, request[1], b"200", b"OK", public, b""]
