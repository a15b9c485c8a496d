from __future__ import annotations

import math
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from samples import num_examples

from ringcore.errors import CapacityError, InvalidRequestError, RingcoreError, WorkerError
from ringcore.executor.callables import call_packed
from ringcore.executor.value_codec import (
    MAX_BUFFERS,
    OUT_OF_BAND_BYTES,
    decode_error,
    decode_request,
    decode_value,
    encode_error,
    encode_request,
    encode_value,
    portable_error,
)
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheSpec
from ringcore.protocol.host_tensor import ITEMSIZES, NUMPY_DTYPES, HostTensor

LARGE = OUT_OF_BAND_BYTES  # bytes that make a buffer of their own


def roundtrip(value):
    return decode_value(sent(value))


def sent(value) -> list[bytearray]:
    """The buffers as they arrive: copies, that hold until the next message."""
    parts = encode_value(value)
    assert len(parts) <= 1 + MAX_BUFFERS
    for view in map(memoryview, parts):
        assert (view.ndim, view.itemsize, view.c_contiguous) == (1, 1, True)
    return [bytearray(part) for part in parts]


def same(a, b) -> bool:
    """Whether two values are equal, with arrays of the same dtype, shape and bits."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, list | tuple):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


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
        ({"deep": [bytes(3 * LARGE)]}, {"deep": [bytes(3 * LARGE)]}),
        (np.int8(-3), -3),
        (np.bool_(True), True),
        (np.float16(0.5), 0.5),
        (np.longdouble(0.25), 0.25),
        ({np.int64(4): np.str_("s")}, {4: "s"}),
        (np.dtype("float16"), "float16"),
        (Path("/a/b"), "/a/b"),
        (Pair(1, np.arange(2)), {"a": 1, "b": np.arange(2)}),
        ([Pair(1, np.zeros(LARGE))], [{"a": 1, "b": np.zeros(LARGE)}]),
    ],
)
def test_values_become_plain_data(value, arrives):
    assert same(arrives, roundtrip(value))


def test_a_spec_can_be_made_again():
    spec = {"layers.0": FullAttentionSpec(16, 2, 64, "float32")}
    assert msgspec.convert(roundtrip(spec), dict[str, KVCacheSpec]) == spec


# ---------------------------------------------------------------------------------------------------------------
# Arrays.


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3), (LARGE,)])
def test_arrays_of_every_dtype(dtype, shape):
    array = (np.arange(math.prod(shape)) % 2).astype(dtype).reshape(shape)
    arrived = roundtrip(array)
    assert same(array, arrived)
    assert arrived.flags.writeable
    assert arrived.flags.aligned


@pytest.mark.parametrize("scale", [1, LARGE])
def test_arrays_that_lie_otherwise(scale):
    array = np.arange(6 * scale, dtype=np.int32).reshape(2, 3 * scale)
    frozen = array.copy()
    frozen.flags.writeable = False
    for odd in (array.T, array[:, ::-1], array[:, ::2], np.asfortranarray(array), array.astype(">i4"), frozen):
        plain = np.array(odd, dtype=np.int32, order="C")
        assert same([plain, plain], roundtrip([odd, odd]))
    lone = array[1:, 2:3].T  # [1, 1], and strides of more than its one element
    assert same(np.array([[3 * scale + 2]], np.int32), roundtrip(lone))
    assert same(np.array([3 * scale + 2], np.int32), roundtrip(lone[:, 0]))


def test_an_array_goes_beside_the_body_from_the_bound_on():
    below, at = np.zeros(LARGE - 1, np.uint8), np.zeros(LARGE, np.uint8)
    assert [len(part) > LARGE - 1 for part in encode_value(below)] == [True]
    body, buffer = encode_value(at)
    assert (len(body) < 50, len(buffer)) == (True, LARGE)
    assert same([below, at], roundtrip([below, at]))


@pytest.mark.parametrize("count", [MAX_BUFFERS - 1, MAX_BUFFERS, MAX_BUFFERS + 1, 3 * MAX_BUFFERS])
def test_many_large_arrays(count):
    arrays = [np.full(LARGE, i, np.uint8) for i in range(count)]
    assert len(encode_value(arrays)) == 1 + min(count, MAX_BUFFERS)
    assert same(arrays, roundtrip(arrays))


def test_a_large_array_is_not_copied_on_the_way_out():
    array = np.zeros(LARGE, np.uint8)
    buffer = encode_value(array)[1]
    array[7] = 1
    assert buffer[7] == 1


@pytest.mark.parametrize("size", [3, LARGE])
def test_what_arrived_is_its_own(size):
    """Neither the sender's memory nor the receiver's message is part of it."""
    source = np.full(size, 7, np.int64)
    parts = sent([source, HostTensor("int64", [size], source.tobytes())])
    source[:] = 1
    array, tensor = decode_value(parts)
    for part in parts:
        part[:] = b"\xdb" * len(part)
    assert array.tolist() == tensor.tolist() == [7] * size
    array[:] = 2
    assert tensor.tolist() == [7] * size


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.array([object()]), "dtype object"),
        (np.array(["a"]), "dtype <U1"),
        (np.array([b"a"]), r"dtype \|S1"),
        (np.zeros(1, [("a", "i4")]), "dtype .*'a'"),
        (np.array(["2020-01-01"], "M8[D]"), r"dtype datetime64\[D\]"),
        (np.array([1], "m8[s]"), "dtype timedelta64"),
        (np.zeros(1, np.longdouble), "send numbers or bools, or .tolist()"),
        (np.ma.masked_array([1, 2], [True, False]), "its mask would be lost"),
        (np.complex64(1j), "send numpy.array"),
        (1j, "send numpy.array"),
    ],
)
def test_arrays_that_cannot_be_sent(array, text):
    with pytest.raises(TypeError, match=text):
        encode_value({"deep": [array]})


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | hnp.arrays(st.sampled_from(list(NUMPY_DTYPES.values())), hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
    | st.builds(lambda n: np.full(LARGE, n, np.uint8), st.integers(0, 255)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=num_examples(100, 200), deadline=None)
@given(VALUES)
def test_any_value(value):
    assert same(value, roundtrip(value))


# ---------------------------------------------------------------------------------------------------------------
# Tensors.


def test_the_codec_loads_no_torch():
    code = (
        "import sys, ringcore; from ringcore.executor import value_codec as v; "
        "t = ringcore.HostTensor('bfloat16', [2], bytes(4)); "
        "print(v.decode_value(v.encode_value([1, t])), 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout == "[1, HostTensor(dtype='bfloat16', shape=(2,))] False\n"


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", ITEMSIZES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4), (LARGE, 2)])
def test_tensors_of_every_dtype(dtype, shape):
    torch = pytest.importorskip("torch")
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    count = math.prod(shape) * ITEMSIZES[dtype]
    raw = torch.arange(count, dtype=torch.int64).remainder(2 if dtype == "bool" else 251).to(torch.uint8)
    tensor = (
        raw.view(getattr(torch, dtype)).reshape(shape) if count else torch.empty(shape, dtype=getattr(torch, dtype))
    )
    arrived = roundtrip({"t": tensor})["t"]
    assert arrived == HostTensor(dtype, shape, raw.numpy().tobytes())
    again = arrived.torch()
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert roundtrip(again) == arrived


@pytest.mark.parametrize(
    "dtype", ["bool", "bfloat16", "float8_e4m3fn", "float4_e2m1fn_x2", "complex128", "uint4", "int64"]
)
@pytest.mark.parametrize("scale", [1, LARGE])
def test_tensors_that_lie_otherwise(dtype, scale):
    torch = pytest.importorskip("torch")
    raw = torch.arange(6 * scale * ITEMSIZES[dtype]).remainder(2).to(torch.uint8)
    tensor = raw.view(getattr(torch, dtype)).reshape(2, 3 * scale)
    columns = raw.reshape(2, 3 * scale, ITEMSIZES[dtype])
    assert roundtrip(tensor.T) == HostTensor(
        dtype, tensor.T.shape, columns.transpose(0, 1).contiguous().numpy().tobytes()
    )
    assert roundtrip(tensor[:, 1]) == HostTensor(dtype, (2,), columns[:, 1].contiguous().numpy().tobytes())
    assert roundtrip(tensor[1:].expand(3, -1)).shape == (3, 3 * scale)
    lone = tensor[1:, 1]  # [1], and a stride of more than its one element
    assert roundtrip(lone) == HostTensor(dtype, (1,), columns[1, 1].numpy().tobytes())


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_subclasses_of_arrays(tmp_path):
    assert same(np.array([[1, 2]]), roundtrip(np.matrix([[1, 2]])))
    mapped = np.memmap(tmp_path / "file", np.int16, "w+", shape=(LARGE,))
    assert same(np.zeros(LARGE, np.int16), roundtrip(mapped))
    assert np.shares_memory(np.frombuffer(encode_value(mapped)[1], np.int16), mapped)


def test_tensors_with_more_to_them():
    torch = pytest.importorskip("torch")
    wanting = torch.ones(2, requires_grad=True)
    assert roundtrip(wanting * 2).tolist() == [2, 2]
    assert roundtrip(torch.nn.Parameter(torch.ones(2))).tolist() == [1, 1]
    assert roundtrip(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]
    assert roundtrip(torch.tensor([1 + 2j]).conj().imag).tolist() == [-2]
    with torch.inference_mode():
        assert roundtrip(torch.ones(1)).tolist() == [1]
    assert roundtrip([torch.Size([1, 2]), torch.bfloat16, torch.device("cpu")]) == [[1, 2], "bfloat16", "cpu"]


def test_a_large_tensor_is_not_copied_on_the_way_out():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(LARGE, dtype=torch.float8_e5m2)
    buffer = encode_value(tensor)[1]
    tensor[7] = 1.0
    assert buffer[7] != 0


@pytest.mark.filterwarnings("ignore")  # torch's own, of features that are new or old
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda torch: torch.eye(2).to_sparse(), "layout torch.sparse_coo: send .to_dense"),
        (lambda torch: torch.eye(2).to_sparse_csr(), "layout torch.sparse_csr: send .to_dense"),
        (lambda torch: torch.empty(2, device="meta"), "meta tensor: it has no elements"),
        (lambda torch: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized tensor: send .deq"),
        (lambda torch: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested tensor: send .unbind"),
        (
            lambda torch: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            "nested tensor: send .unbind",
        ),
        (lambda torch: torch.Generator(), "cannot send a torch.*Generator"),
    ],
)
def test_tensors_that_cannot_be_sent(make, text):
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=text):
        encode_value([make(torch)])


# ---------------------------------------------------------------------------------------------------------------
# Values that are none.


@pytest.mark.parametrize("value", [object(), 2**64, lambda: None, Exception("x"), "\ud800", {"a": [object()]}])
def test_what_cannot_be_sent_is_an_error(value):
    with pytest.raises((TypeError, OverflowError, UnicodeEncodeError)):
        encode_value(value)
    with pytest.raises(InvalidRequestError, match="'m' cannot be sent"):
        encode_request("m", [value], None)


DEEP = b"\x91" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91",
        b"\x01\x02",
        b"\xa1\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x81\x80\x01",
        DEEP,
        DEEP + b"\x00",
        b"\x81\xa1a" * 100_000,
    ],
    ids=lambda body: body[:8].hex(),
)
def test_bytes_that_are_no_value_are_an_error(body):
    for parts in ([body], [memoryview(body)], [bytearray(body), b""]):
        with pytest.raises(msgspec.DecodeError):
            decode_value(parts)
    with pytest.raises(msgspec.DecodeError):
        decode_error(body, 0, "m")


def test_no_parts_are_an_error():
    with pytest.raises(msgspec.DecodeError, match="no body"):
        decode_value([])


def extension(*head, code=1):
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(head))


def body_of(*heads, code=1):
    return msgspec.msgpack.encode([extension(*head, code=code) for head in heads])


@pytest.mark.parametrize("code", [1, 2])
@pytest.mark.parametrize(
    ("head", "text"),
    [
        (("int8", [2], b"x"), "has 2 bytes, not 1"),
        (("int8", [1], b"xy"), "has 1 bytes, not 2"),
        (("int8", [-1], b""), "negative"),
        (("int8", [2**63], b""), "overflows"),
        (("int8", [0, 2**62, 2**62], b""), "overflows"),
        (("int64", [2**61], b""), "overflows"),
        (("int64", [2**50], b""), "bytes, not 0"),
        (("int8", [1] * 65, b"x"), "65 dimensions"),
        (("object", [1], b"x" * 8), "dtype 'object' is unknown"),
        (("O", [1], b"x" * 8), "unknown"),
        (("", [1], b"x"), "unknown"),
        (("bool", [1], b"\x07"), "neither 0 nor 1"),
        (("int8", [1.0], b"x"), "Expected `int`"),
        (("int8", [2**64 - 1], b"x"), "overflows"),
        (("int8", 1, b"x"), "Expected `array`"),
        ((1, [1], b"x"), "Expected `str`"),
        (("int8", [1]), "length 3"),
        (("int8", [1], b"x", 0), "length 3"),
        (("int8", [1], "x"), "Expected `int | bytes`"),
        (("int8", [1], None), "Expected"),
        (("int8", [1], 0), "buffer 0 is referenced after 0 of 0 buffers"),
        (("int8", [1], -1), "buffer -1"),
        (("int8", [1], 2**63), "buffer 9223372036854775808"),
        (("int8", [1], True), "Expected"),
    ],
)
def test_arrays_that_are_none_are_an_error(head, text, code):
    with pytest.raises(msgspec.DecodeError, match=text):
        decode_value([body_of(head, code=code)])


@pytest.mark.parametrize("data", [b"", b"\x93", b"\xc1", DEEP])
@pytest.mark.parametrize("code", [1, 2])
def test_an_array_without_a_head(data, code):
    with pytest.raises(msgspec.DecodeError):
        decode_value([msgspec.msgpack.encode(msgspec.msgpack.Ext(code, data))])


@pytest.mark.parametrize("code", [0, 3, 127, -2, -128])
def test_other_extensions_are_an_error(code):
    with pytest.raises(msgspec.DecodeError, match=f"code {code} is neither"):
        decode_value([msgspec.msgpack.encode(msgspec.msgpack.Ext(code, b"x"))])


def test_an_array_is_no_key_of_a_map():
    body = b"\x81" + msgspec.msgpack.encode(extension("int8", [1], b"x")) + b"\x01"
    with pytest.raises(msgspec.DecodeError):
        decode_value([body])


def test_numpy_has_not_every_dtype():
    with pytest.raises(msgspec.DecodeError, match="numpy has no bfloat16"):
        decode_value([body_of(("bfloat16", [1], b"xx"), code=1)])


@pytest.mark.parametrize(
    ("indices", "num_buffers"),
    [([0], 0), ([1], 1), ([0], 2), ([0, 0], 1), ([1, 0], 2), ([], 1), ([0, 2], 3), ([0, 1, 1], 2)],
)
def test_each_buffer_is_named_once_and_in_order(indices, num_buffers):
    body = body_of(*(("int8", [1], index) for index in indices))
    with pytest.raises(msgspec.DecodeError, match="buffer"):
        decode_value([body, *[b"x"] * num_buffers])


def test_a_buffer_of_another_length():
    for buffer in (b"", b"x", b"xxx"):
        with pytest.raises(msgspec.DecodeError, match="has 2 bytes"):
            decode_value([body_of(("int8", [2], 0)), buffer])


GOOD = [
    bytes(part)
    for part in encode_value({"a": [np.arange(3), np.zeros(LARGE, np.uint8)], "b": HostTensor("bool", [2], b"\0\1")})
]


def decodes_or_is_refused(parts) -> None:
    try:
        decode_value(parts)
    except msgspec.DecodeError:
        return


@settings(max_examples=num_examples(150, 500), deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD[0]) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_body_with_other_bytes_in_it(changes):
    body = bytearray(GOOD[0])
    for at, byte in changes:
        body[at] = byte
    decodes_or_is_refused([body, *GOOD[1:]])


@settings(max_examples=num_examples(150, 500), deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=3))
def test_any_bytes(parts):
    decodes_or_is_refused(parts)


PLAIN = st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=9) | st.sampled_from([*ITEMSIZES, "O"])


@settings(max_examples=num_examples(150, 500), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), PLAIN, st.lists(PLAIN, max_size=4) | PLAIN, PLAIN), max_size=3),
    st.lists(st.binary(max_size=9), max_size=3),
)
def test_any_heads(heads, buffers):
    body = msgspec.msgpack.encode([extension(*head, code=code) for code, *head in heads])
    decodes_or_is_refused([body, *buffers])


def test_what_is_not_there_is_not_allocated():
    heads = [
        (name, [2**n], payload)
        for name in ("uint8", "complex128", "bool")
        for n in (30, 40, 58)
        for payload in (0, b"x")
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for head in heads:
        for code in (1, 2):
            with pytest.raises(msgspec.DecodeError):
                decode_value([body_of(head, code=code), b"x"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


# ---------------------------------------------------------------------------------------------------------------
# Requests.


def test_a_request_arrives_as_it_was_made():
    big = np.zeros(LARGE)
    parts = encode_request("m", (1, big), {"a": big.astype(np.int8)})
    assert len(parts) == 3
    method, args, kwargs = decode_request(parts)
    assert method == "m"
    assert same([1, big], args)
    assert same({"a": big.astype(np.int8)}, kwargs)
    assert decode_request(encode_request("m", [], None)) == ("m", [], {})


def test_a_function_arrives_as_bytes():
    packed, args, kwargs = decode_request(encode_request(lambda worker, n, *, m: [worker, n, m], [1], {"m": 2}))
    assert isinstance(packed, bytes)
    assert call_packed("w", packed, args, kwargs) == ["w", 1, 2]


@pytest.mark.parametrize("method", [None, 7, b"m", ["m"]])
def test_a_method_is_a_name_or_a_function(method):
    with pytest.raises(InvalidRequestError, match="give the name"):
        encode_request(method, [], None)


def test_the_arguments_of_a_function_that_cannot_be_sent():
    def closing(worker): ...

    with pytest.raises(InvalidRequestError, match="closing' cannot be sent") as caught:
        encode_request(closing, [object()], None)
    assert caught.value.details["field"] == "args"


@pytest.mark.parametrize(
    "value",
    [None, [], ["m"], ["m", []], ["m", [], {}, 1], [1, [], {}], ["m", {}, {}], ["m", [], []], ["m", [], {1: 2}], {}],
)
def test_a_value_that_is_no_request(value):
    with pytest.raises(msgspec.DecodeError, match="a request is"):
        decode_request(encode_value(value))


# ---------------------------------------------------------------------------------------------------------------
# Errors.


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
    assert error.__cause__ is None


def test_details_that_are_not_builtin_travel_as_text():
    error = decode_error(encode_error(raised(CapacityError("m", sizes=np.arange(2))), 0, "m"), 0, "m")
    assert (type(error), error.details) == (CapacityError, {"sizes": "array([0, 1])"})


@pytest.mark.parametrize("error", [RingcoreError("base"), type("Sub", (CapacityError,), {})("sub")])
def test_an_error_that_others_do_not_know_is_a_workers_error(error):
    assert type(portable_error(raised(error), 0, "m")) is WorkerError


def test_any_other_error_carries_rank_type_message_and_traceback():
    error = decode_error(encode_error(raised(ValueError("no\nway")), 2, "m"), 2, "m")
    assert type(error) is WorkerError
    details = dict(error.details)
    assert "raise error" in details.pop("traceback")
    assert details == {"rank": 2, "error_type": "ValueError", "error_message": "no\nway", "method": "m"}
    assert error.__notes__ == ["raised by 'm' in worker 2"]
    assert "raise error" in str(error.__cause__)


def test_long_texts_are_cut():
    error = raised(ValueError("x" * 100_000))
    details = portable_error(error, 0, "m").details
    assert len(details["traceback"]) == 16 << 10
    assert len(details["error_message"]) == 4 << 10


@pytest.mark.parametrize("details", [{"message": "twice"}, {"self": 1}])
def test_details_that_are_no_keywords(details):
    body = msgspec.msgpack.encode({"type": "CapacityError", "message": "m", "details": details})
    with pytest.raises(msgspec.DecodeError, match="an error is malformed"):
        decode_error(body, 0, "m")


@pytest.mark.parametrize(
    "wire", [{}, {"type": 1, "message": ""}, {"type": "X"}, [], {"type": "", "message": "", "z": 1}]
)
def test_a_body_that_is_no_error(wire):
    with pytest.raises(msgspec.DecodeError):
        decode_error(msgspec.msgpack.encode(wire), 0, "m")
