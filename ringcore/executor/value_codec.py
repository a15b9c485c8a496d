"""Serializes values and errors of a call. Decoded values are plain data: dict, list, str, bytes, int, float, bool,
None, numpy arrays, and `HostTensor` for torch tensors.

A value is a list of buffers (scatter-gather): a msgpack body, then the bytes of its large arrays, sent without a copy.
In the body an array is an extension:

    code 1 (numpy) or 2 (torch), data: msgpack of (dtype, shape, the bytes | the number of its buffer)

Buffers are numbered from 0 in the order in which the body references them, each once.

Decoding never runs code: malformed bytes raise a `msgspec.DecodeError`, and memory for an array is allocated only after
a check that its bytes have arrived.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec
import numpy as np

from ringcore.errors import InvalidRequestError, RingcoreError, WorkerError, error_from_wire, error_to_wire
from ringcore.executor.array_bytes import bytes_of_array, bytes_of_tensor, torch_name
from ringcore.executor.callables import callable_name, pack_callable
from ringcore.executor.ring_buffer import Buffer
from ringcore.protocol.host_tensor import NUMPY_DTYPES, HostTensor
from ringcore.protocol.requests import WireError

__all__ = [
    "MAX_BUFFERS",
    "OUT_OF_BAND_BYTES",
    "Buffer",
    "decode_error",
    "decode_request",
    "decode_value",
    "encode_error",
    "encode_request",
    "encode_value",
    "portable_error",
]

OUT_OF_BAND_BYTES = 4096  # larger arrays have their own buffer
MAX_BUFFERS = 32  # of one value; further arrays are in the body
MAX_TRACEBACK_CHARS = 16 << 10
MAX_MESSAGE_CHARS = 4 << 10

_ARRAY, _TENSOR = 1, 2  # extension codes
_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}  # numpy takes a microsecond to make one


# ---------------------------------------------------------------------------------------------------------------
# Encoding values.


def encode_value(value: Any) -> list[Buffer]:
    """A value as one-dimensional byte buffers: the body, then those of large arrays, `MAX_BUFFERS` at most.

    Accepts builtins, tuples and sets (they arrive as lists), dataclasses and Structs (as dicts), numpy scalars (as
    Python's), dtypes, devices and paths (as text), numpy arrays of numbers, dense torch tensors on any device. The
    buffers of arrays are views: send or copy them before the value changes. Raises TypeError,
    OverflowError and others for values that cannot be sent.
    """
    try:
        return [_plain_encoder.encode(value)]
    except _HasArrays:
        return _Outgoing().encode(value)


class _HasArrays(Exception):
    """The value has arrays, which need `_Outgoing`."""


def _encode_unless_array(value: Any) -> Any:
    torch = sys.modules.get("torch")
    if isinstance(value, np.ndarray | HostTensor) or (torch is not None and isinstance(value, torch.Tensor)):
        raise _HasArrays
    return _encode_plain(value)


class _Outgoing:
    """Encodes one value with arrays."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []

    def encode(self, value: Any) -> list[Buffer]:
        body = msgspec.msgpack.Encoder(enc_hook=self._encode_extra).encode(value)
        return [body, *self._buffers]

    def _encode_extra(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            name = _NAMES.get(value.dtype) or value.dtype.name
            return self._extension(_ARRAY, name, value.shape, bytes_of_array(value))
        if isinstance(value, HostTensor):
            return self._extension(_TENSOR, value.dtype, value.shape, value.data)
        torch = sys.modules.get("torch")  # without torch loaded, no value is a tensor
        if torch is not None and isinstance(value, torch.Tensor):
            data = bytes_of_tensor(value, torch)  # before the shape, which not every tensor has
            return self._extension(_TENSOR, torch_name(value.dtype), tuple(value.shape), data)
        return _encode_plain(value)

    def _extension(self, code: int, dtype: str, shape: tuple[int, ...], data: memoryview) -> msgspec.msgpack.Ext:
        payload: int | memoryview = data
        if len(data) >= OUT_OF_BAND_BYTES and len(self._buffers) < MAX_BUFFERS:
            payload = len(self._buffers)
            self._buffers.append(data)
        return msgspec.msgpack.Ext(code, _array_encoder.encode((dtype, shape, payload)))


def _encode_plain(value: Any) -> Any:
    """Types that msgpack does not know, other than arrays, as builtins."""
    if isinstance(value, np.longdouble):  # its item() is no builtin
        return float(value)
    if isinstance(value, np.generic) and not isinstance(value, np.complexfloating):
        return value.item()
    if isinstance(value, np.dtype | PurePath):
        return str(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype | torch.device):
        return torch_name(value)
    if isinstance(value, complex | np.complexfloating):
        raise TypeError("cannot send a complex number by itself; send numpy.array(number)")
    raise TypeError(f"cannot send a {type(value).__module__}.{type(value).__qualname__} to another process")


# ---------------------------------------------------------------------------------------------------------------
# Decoding values.


def decode_value(parts: Sequence[Buffer]) -> Any:
    """The value of `encode_value`, which owns its memory. Raises `msgspec.DecodeError`."""
    if not parts:
        raise msgspec.DecodeError("a value has no body")
    if len(parts) == 1:
        return _decoded(_plain_decoder, parts[0])
    incoming = _Incoming(parts[1:])
    value = _decoded(msgspec.msgpack.Decoder(ext_hook=incoming.extension), parts[0])
    incoming.check_all_taken()
    return value


def _decoded(decoder: msgspec.msgpack.Decoder[Any], body: Buffer) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError:
        raise
    except (RecursionError, ValueError, TypeError) as error:  # nested too deeply, no UTF-8, an unhashable map key
        raise msgspec.DecodeError(f"MessagePack data is malformed: {error}") from error


class _Incoming:
    """Decodes one value with arrays."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        self._num_taken = 0

    def extension(self, code: int, data: memoryview) -> Any:
        if code not in (_ARRAY, _TENSOR):
            raise msgspec.DecodeError(f"an extension of code {code} is neither array nor tensor")
        dtype, shape, payload = _decoded(_array_decoder, data)
        try:
            tensor = HostTensor(dtype, shape, self._take(payload) if isinstance(payload, int) else payload)
            return tensor if code == _TENSOR else tensor.numpy()
        except (ValueError, TypeError) as error:
            raise msgspec.DecodeError(f"an array is malformed: {error}") from error

    def _take(self, index: int) -> Buffer:
        if index != self._num_taken or index >= len(self._buffers):
            raise ValueError(f"buffer {index} is referenced after {self._num_taken} of {len(self._buffers)} buffers")
        self._num_taken += 1
        return self._buffers[index]

    def check_all_taken(self) -> None:
        if self._num_taken != len(self._buffers):
            raise msgspec.DecodeError(f"{len(self._buffers)} buffers, of which the body references {self._num_taken}")


# An encoder or decoder costs more to make than a small value to encode or decode.
_plain_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_unless_array)
_plain_decoder = msgspec.msgpack.Decoder(ext_hook=_Incoming(()).extension)
_array_encoder = msgspec.msgpack.Encoder()
_array_decoder = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], int | memoryview])


# ---------------------------------------------------------------------------------------------------------------
# Requests.


def encode_request(
    method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> list[Buffer]:
    """Encodes a call for the workers. Raises `InvalidRequestError` for a method or arguments that cannot be sent."""
    packed = method if isinstance(method, str) else pack_callable(method)
    name = method if isinstance(method, str) else callable_name(method)
    try:
        return encode_value((packed, list(args), dict(kwargs or {})))
    except Exception as error:  # any error of an argument's own code
        raise InvalidRequestError(
            f"the arguments of {name!r} cannot be sent: {error}; give builtin values, dataclasses, Structs, arrays or "
            f"tensors",
            field="args",
            value=repr(name),
        ) from error


def decode_request(parts: Sequence[Buffer]) -> tuple[str | bytes, list[Any], dict[str, Any]]:
    """Method, positional and keyword arguments of `encode_request`; the method is bytes if it was a callable.

    Raises `msgspec.DecodeError`.
    """
    match decode_value(parts):
        case [str() | bytes() as method, list(args), dict(kwargs)] if all(isinstance(key, str) for key in kwargs):
            return method, args, kwargs
    raise msgspec.DecodeError("a request is a method, its arguments and its keyword arguments")


# ---------------------------------------------------------------------------------------------------------------
# Errors.


def portable_error(error: BaseException, rank: int, method: str) -> RingcoreError:
    """The error as the calling process raises it: a `RingcoreError` as itself, any other as a `WorkerError`.

    A `RingcoreError` subclass that only this process knows, as one of a worker extension, becomes a `WorkerError` too.
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
        traceback=_sendable(lines[-MAX_TRACEBACK_CHARS:]),  # the end matters most
        method=method,
    )


def _is_known_to_all(error: RingcoreError) -> bool:
    """Whether its wire form decodes to its type. Unknown types decode to a plain `RingcoreError`."""
    kind = type(error)
    return kind is not RingcoreError and type(error_from_wire(error_to_wire(error))) is kind


def encode_error(error: BaseException, rank: int, method: str) -> bytes:
    """Encodes an error of a method for `decode_error`. Never raises: details that cannot be sent become text."""
    ours = portable_error(error, rank, method)
    try:
        return _error_encoder.encode(error_to_wire(ours))
    except Exception:
        details = {_sendable(str(key)): _sendable(repr(value)) for key, value in ours.details.items()}
        return _error_encoder.encode({"type": type(ours).__name__, "message": _text_of(ours), "details": details})


def decode_error(data: Buffer, rank: int, method: str) -> RingcoreError:
    """The error of `encode_error`, with a note of method and rank. Raises `msgspec.DecodeError`."""
    wire: Mapping[str, Any] = msgspec.structs.asdict(_decoded(_error_decoder, data))
    try:
        error = error_from_wire(wire)
    except TypeError as odd:  # details that are no keyword arguments
        raise msgspec.DecodeError(f"an error is malformed: {odd}") from odd
    error.add_note(f"raised by {method!r} in worker {rank}")
    return error


_error_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_plain)
_error_decoder = msgspec.msgpack.Decoder(WireError)


def _text_of(error: BaseException) -> str:
    try:
        return _sendable(str(error))
    except Exception as broken:
        return f"<its text raised {type(broken).__name__}>"


def _sendable(text: str) -> str:
    """The text without lone surrogates, which have no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
