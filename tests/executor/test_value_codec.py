from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ringcore.errors import CapacityError, InvalidRequestError, RingcoreError, WorkerError
from ringcore.executor.value_codec import (
    decode_error,
    decode_value,
    encode_error,
    encode_request,
    encode_value,
    portable_error,
)
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheSpec


def roundtrip(value):
    return decode_value(encode_value(value))


@dataclass
class Pair:
    a: int
    b: np.ndarray


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        (None, None),
        ([1, -1, 2**63, 0.5, "é", b"\x00", True], [1, -1, 2**63, 0.5, "é", b"\x00", True]),
        ({1: {"a": (1, 2)}, (1, 2): 3}, {1: {"a": [1, 2]}, (1, 2): 3}),
        (frozenset({7}), [7]),
        (bytearray(b"x"), b"x"),
        (memoryview(b"xy"), b"xy"),
        (np.int8(-3), -3),
        (np.bool_(True), True),
        (np.float16(0.5), 0.5),
        ({np.int64(4): np.str_("s")}, {4: "s"}),
        (np.zeros((2, 0)), [[], []]),
        (np.array(5), 5),
        (np.array([[True], [False]]), [[True], [False]]),
        (np.dtype("float16"), "float16"),
        (Path("/a/b"), "/a/b"),
        (Pair(1, np.arange(2)), {"a": 1, "b": [0, 1]}),
    ],
)
def test_values_become_builtins(value, arrives):
    assert roundtrip(value) == arrives
    assert type(roundtrip(value)) is type(arrives)


def test_a_spec_can_be_made_again():
    spec = {"layers.0": FullAttentionSpec(16, 2, 64, "float32")}
    assert msgspec.convert(roundtrip(spec), dict[str, KVCacheSpec]) == spec


def test_tensors_become_lists_where_torch_is_loaded():
    torch = pytest.importorskip("torch")
    value = {
        "t": torch.arange(4).reshape(2, 2).to(torch.bfloat16).requires_grad_(),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    assert roundtrip(value) == {
        "t": [[0.0, 1.0], [2.0, 3.0]],
        "size": [1, 2],
        "dtype": "bfloat16",
        "device": "cpu",
    }


def test_the_codec_loads_no_torch():
    code = (
        "import sys; from ringcore.executor import value_codec as v; v.encode_value([1]); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"


@pytest.mark.parametrize("value", [object(), 2**64, lambda: None, Exception("x"), "\ud800", {"a": [object()]}])
def test_what_cannot_be_sent_is_an_error(value):
    with pytest.raises((TypeError, OverflowError, UnicodeEncodeError)):
        encode_value(value)
    with pytest.raises(InvalidRequestError, match="'m' cannot be sent"):
        encode_request("m", [value], None)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91", b"\xc6\xff\xff\xff\xff", b"\x91" * 100000])
def test_bytes_that_are_no_value_are_an_error(data):
    with pytest.raises((msgspec.DecodeError, RecursionError)):
        decode_value(data)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_an_error_of_ours_travels_as_itself():
    error = decode_error(encode_error(raised(CapacityError("m", needed_bytes=np.int64(3))), 1, "load"), 1, "load")
    assert type(error) is CapacityError
    assert (error.message, error.details) == ("m", {"needed_bytes": 3})
    assert error.__notes__ == ["raised by 'load' in worker 1"]


@pytest.mark.parametrize("error", [RingcoreError("base"), type("Sub", (CapacityError,), {})("sub")])
def test_an_error_that_others_do_not_know_is_a_workers_error(error):
    assert type(portable_error(raised(error), 0, "m")) is WorkerError


def test_any_other_error_carries_rank_type_message_and_traceback():
    error = decode_error(encode_error(raised(ValueError("no\nway")), 2, "m"), 2, "m")
    assert type(error) is WorkerError
    details = dict(error.details)
    assert "raise error" in details.pop("traceback")
    assert details == {"rank": 2, "error_type": "ValueError", "error_message": "no\nway", "method": "m"}


def test_long_texts_are_cut():
    error = raised(ValueError("x" * 100_000))
    details = portable_error(error, 0, "m").details
    assert len(details["traceback"]) == 16 << 10
    assert len(details["error_message"]) == 4 << 10
