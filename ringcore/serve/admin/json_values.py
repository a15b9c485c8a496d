"""What workers return, as JSON: arrays and tensors as nested lists, a complex number as [real, imag]."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from ringcore.errors import InvalidRequestError
from ringcore.protocol.host_tensor import NUMPY_DTYPES, HostTensor

__all__ = ["json_of_values"]

_MAX_ELEMENTS = 1 << 20  # of an array: numbers in JSON are slow


def json_of_values(value: Any) -> bytes:
    """Raises `InvalidRequestError` for an array that is too large or of no number."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, complex):
        return [value.real, value.imag]
    assert isinstance(value, np.ndarray | HostTensor), f"{type(value)} is no value of a call"
    num_elements = math.prod(value.shape)
    if num_elements > _MAX_ELEMENTS:
        raise _refused(f"an array of {num_elements} numbers, and JSON takes {_MAX_ELEMENTS}")
    if isinstance(value, HostTensor) and value.dtype not in (*NUMPY_DTYPES, "bfloat16"):
        raise _refused(f"a tensor of {value.dtype}, which is no number of JSON")
    return value.tolist()


def _refused(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"method: it returned {what}; return less, or call it by ringcore.AdminClient", field="method"
    )
