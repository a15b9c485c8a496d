"""Values and errors of a call as bytes. What arrives is builtin: dict, list, str, bytes, int, float, bool, None.

Nothing here can run code: a peer that sends other bytes than ours gets a typed error, and no more.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec
import numpy as np

from ringcore.errors import InvalidRequestError, RingcoreError, WorkerError, error_from_wire, error_to_wire
from ringcore.protocol import WireError

__all__ = ["decode_error", "decode_value", "encode_error", "encode_request", "encode_value", "portable_error"]

MAX_TRACEBACK_CHARS = 16 << 10
MAX_MESSAGE_CHARS = 4 << 10


def _encode_extra(value: Any) -> Any:
    """What msgpack has no word for, as builtins. numpy arrays and torch tensors become nested lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.dtype | PurePath):
        return str(value)
    torch = sys.modules.get("torch")  # who never loaded it has no tensor to send
    if torch is not None:
        if isinstance(value, torch.Tensor):
            return value.detach().cpu().tolist()
        if isinstance(value, torch.dtype | torch.device):
            return str(value).removeprefix("torch.")
        if isinstance(value, torch.Size):
            return list(value)
    raise TypeError(f"cannot send a {type(value).__module__}.{type(value).__qualname__} to another process")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_extra)
_decoder = msgspec.msgpack.Decoder()
_error_decoder = msgspec.msgpack.Decoder(WireError)


def encode_value(value: Any) -> bytes:
    """A value as msgpack: builtins, tuples and sets (they arrive as lists), dataclasses and Structs (as dicts), numpy
    scalars, arrays and dtypes, torch tensors. Raises what says why it cannot be sent: TypeError, OverflowError, ..."""
    return _encoder.encode(value)


def decode_value(data: bytes | memoryview) -> Any:
    """The value of `encode_value`. Raises `msgspec.DecodeError`."""
    return _decoder.decode(data)


def encode_request(method: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """A call as its workers get it. Raises `InvalidRequestError` for arguments that cannot be sent."""
    if not isinstance(method, str):
        raise InvalidRequestError(f"method={method!r}: give a name", field="method", value=repr(method))
    try:
        return encode_value((method, list(args), dict(kwargs or {})))
    except Exception as error:  # whatever an argument's own code raises
        raise InvalidRequestError(
            f"the arguments of {method!r} cannot be sent: {error}; give builtin values, dataclasses, Structs or arrays",
            field="args",
            value=repr(method),
        ) from error


def portable_error(error: BaseException, rank: int, method: str) -> RingcoreError:
    """The error as it is raised in the calling process: ours as itself, any other as a `WorkerError`.

    An error of ours that only this process knows (a subclass in a worker extension, say) is any other.
    """
    if isinstance(error, RingcoreError) and _is_known_to_all(error):
        return error
    kind = type(error).__qualname__
    message = _text_of(error)[:MAX_MESSAGE_CHARS]
    lines = "".join(traceback.format_exception(error))
    return WorkerError(
        f"{kind} in {method!r} on rank {rank}: {message}",
        rank=rank,
        error_type=kind,
        error_message=message,
        traceback=_sendable(lines[-MAX_TRACEBACK_CHARS:]),  # its end says the most
        method=method,
    )


def _is_known_to_all(error: RingcoreError) -> bool:
    """Whether its wire form leads back to its type. A plain `RingcoreError` stands for those that are unknown."""
    kind = type(error)
    return kind is not RingcoreError and type(error_from_wire(error_to_wire(error))) is kind


def encode_error(error: BaseException, rank: int, method: str) -> bytes:
    """An error that a method raised, for `decode_error`. Never raises: what cannot be sent of it is sent as text."""
    ours = portable_error(error, rank, method)
    try:
        return encode_value(error_to_wire(ours))
    except Exception:
        details = {_sendable(str(key)): _sendable(repr(value)) for key, value in ours.details.items()}
        return encode_value({"type": type(ours).__name__, "message": _text_of(ours), "details": details})


def decode_error(data: bytes | memoryview, rank: int, method: str) -> RingcoreError:
    """The error of `encode_error`, with a note that says where it comes from. Raises `msgspec.DecodeError`."""
    wire: Mapping[str, Any] = msgspec.structs.asdict(_error_decoder.decode(data))
    error = error_from_wire(wire)
    error.add_note(f"raised by {method!r} in worker {rank}")
    if "traceback" in error.details:
        error.add_note(f"remote {error.details['traceback']}")
    return error


def _text_of(error: BaseException) -> str:
    try:
        return _sendable(str(error))
    except Exception as broken:
        return f"<its text raised {type(broken).__name__}>"


def _sendable(text: str) -> str:
    """The text without lone surrogates, which have no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
