"""HTTP as bytes, where a client library would not send it so."""

from __future__ import annotations

import json
import socket

from running_service import DEADLINE_S


def connected(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    connection.sendall(sent)
    return connection


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the service closes the connection."""
    received = b""
    try:
        while chunk := connection.recv(1 << 16):
            received += chunk
    except ConnectionResetError:  # it was closed with something unread
        pass
    return received


def answer_of(connection: socket.socket) -> bytes:
    """One answer that tells its length, on a connection that stays open."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    _, headers, body = parted(received)
    while len(body) < int(headers["content-length"]):
        body += connection.recv(1 << 16)
    return received.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + body


def answers(port: int, sent: bytes) -> bytes:
    with connected(port, sent) as connection:
        return rest_of(connection)


def parted(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of one answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split(" ")[1]), headers, body


def error_of(answer: bytes) -> tuple[int, dict[str, str], dict]:
    """(status, headers, error) of an answer in OpenAI's form, the last of its connection."""
    status, headers, body = parted(answer)
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert int(headers["content-length"]) == len(body)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return status, headers, error
