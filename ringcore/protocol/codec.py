"""The array types of the messages, and their msgpack encoding."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ringcore.host.file_names import with_utf8_names

__all__ = [
    "FloatArray",
    "IntArray",
    "decoder",
    "encode_start",
    "encoder",
    "int_array",
]

IntArray = np.ndarray  # [n] int32
FloatArray = np.ndarray[tuple[int], np.dtype[np.float32]]  # [n] float32


def int_array(values: Any = ()) -> np.ndarray:
    return np.asarray(values, dtype=np.int32).reshape(-1)


_ARRAY_DTYPES = (np.dtype(np.int32), np.dtype(np.float32))


def _encode_extra(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype in _ARRAY_DTYPES and value.ndim == 1:
        return value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot encode {type(value).__name__}")


def _decode_extra(kind: type, value: Any) -> Any:
    if isinstance(value, bytes) and (kind is np.ndarray or kind == FloatArray):
        return np.frombuffer(value, dtype=np.int32 if kind is np.ndarray else np.float32)
    raise TypeError(f"cannot decode {kind!r} from {type(value).__name__}")


def encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=_encode_extra)


def encode_start(start: Any) -> bytes:
    """The start payload of a child process. Raises `ModelLoadError` for a file name that is not UTF-8."""
    return msgspec.msgpack.encode(with_utf8_names(msgspec.to_builtins(start)))


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder for exactly one type or union of this package."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_extra)
