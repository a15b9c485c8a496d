from __future__ import annotations

import copy
import math
import subprocess
import sys

import numpy as np
import pytest

import ringcore
from ringcore.protocol.host_tensor import ITEMSIZES, NUMPY_DTYPES, HostTensor, to_torch

BF16 = bytes.fromhex("803f00c0807fc07f")  # 1, -2, inf, nan


def test_it_has_what_it_was_given():
    tensor = HostTensor("int16", [2, 1], b"\x01\x00\xff\xff")
    assert (tensor.dtype, tensor.shape, tensor.nbytes, bytes(tensor.data)) == ("int16", (2, 1), 4, b"\x01\x00\xff\xff")
    assert tensor.tolist() == [[1], [-1]]
    assert repr(tensor) == "HostTensor(dtype='int16', shape=(2, 1))"
    assert ringcore.HostTensor is HostTensor


def test_it_owns_its_memory_and_numpy_shares_it():
    source = bytearray(4)
    tensor = HostTensor("int32", [], source)
    source[0] = 9
    assert tensor.tolist() == 0
    tensor.numpy()[()] = 7
    assert tensor.tolist() == 7


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy_dtypes(dtype):
    array = np.array([[0, 1, 1]], dtype=dtype)
    tensor = HostTensor(dtype, array.shape, array.tobytes())
    assert tensor.numpy().dtype == array.dtype
    assert tensor.numpy().tolist() == tensor.tolist() == [[0, 1, 1]]


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), (0, 2**58)])
def test_no_elements(shape):
    tensor = HostTensor("float32", shape, b"")
    assert tensor.numpy().shape == shape
    assert np.zeros((2, 0, 3)).tolist() == HostTensor("float64", (2, 0, 3), b"").tolist() == [[], []]


def test_bfloat16_without_torch():
    with pytest.raises(TypeError, match="numpy has no bfloat16"):
        HostTensor("bfloat16", [4], BF16).numpy()
    code = (
        f"import sys, ringcore; t = ringcore.HostTensor('bfloat16', [2, 2], {BF16!r}); print(t.tolist(), "
        "'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout == "[[1.0, -2.0], [inf, nan]] False\n"


def test_equality_is_of_bits():
    tensor = HostTensor("bfloat16", [4], BF16)  # a nan in it
    assert tensor == HostTensor("bfloat16", [4], BF16) == copy.deepcopy(tensor)
    assert tensor != HostTensor("float16", [4], BF16)
    assert tensor != HostTensor("bfloat16", [2, 2], BF16)
    assert tensor != HostTensor("bfloat16", [4], BF16[::-1])
    assert tensor != BF16
    with pytest.raises(TypeError, match="unhashable"):
        hash(tensor)


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "text"),
    [
        ("int99", [1], b"x", "dtype 'int99' is unknown"),
        ("qint8", [1], b"x", "unknown"),
        ("x" * 10_000, [1], b"x", "unknown"),
        ("int32", [1], b"xyz", "has 4 bytes, not 3"),
        ("int32", [], b"", "has 4 bytes, not 0"),
        ("int32", [2, 0], b"x", "has 0 bytes, not 1"),
        ("uint8", [-1, -1], b"x", "negative"),
        ("uint8", [2**63], b"x", "overflows"),
        ("uint8", [2**32, 2**32], b"", "overflows"),
        ("uint8", [0, 2**32, 2**32], b"", "overflows"),
        ("uint8", [1] * 65, b"x", "65 dimensions"),
        ("bool", [2], b"\x01\x02", "neither 0 nor 1"),
    ],
)
def test_bytes_that_are_no_such_tensor(dtype, shape, data, text):
    with pytest.raises(ValueError, match=text) as caught:
        HostTensor(dtype, shape, data)
    assert len(str(caught.value)) < 200


def test_lists_and_dicts_without_a_tensor_are_passed_as_they_are():
    value = [1, 2.0, "x", None]
    assert to_torch(value) is value
    named = {"a": 1}
    assert to_torch(named) is named
    assert to_torch(5) == 5
    assert to_torch([[1], {"a": [2]}]) == [[1], {"a": [2]}]


class TestWithTorch:
    torch = None

    @pytest.fixture(autouse=True)
    def _torch(self):
        self.torch = pytest.importorskip("torch")

    def test_every_dtype_of_torch_is_known(self):
        dtypes = {d for d in vars(self.torch).values() if isinstance(d, self.torch.dtype)}
        plain = {
            str(d).removeprefix("torch."): d.itemsize for d in dtypes if "qint" not in str(d) and "quint" not in str(d)
        }
        assert plain.items() <= ITEMSIZES.items()
        assert len(plain) > 20

    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "bool", "uint32"])
    def test_the_tensor_shares_the_memory(self, dtype):
        kind = getattr(self.torch, dtype)
        given = self.torch.tensor([[0, 1], [1, 0]]).to(kind)
        tensor = HostTensor(dtype, (2, 2), given.view(self.torch.uint8).numpy().tobytes())
        made = tensor.torch()
        assert made.dtype == kind
        assert made.tolist() == given.tolist() == tensor.tolist()
        made.zero_()
        assert tensor.data == bytes(tensor.nbytes)

    @pytest.mark.filterwarnings("ignore:ComplexHalf support")
    @pytest.mark.parametrize("dtype", ITEMSIZES)
    @pytest.mark.parametrize("shape", [(0, 3), (), (1, 2)])
    def test_any_dtype_and_shape(self, dtype, shape):
        if not hasattr(self.torch, dtype):
            pytest.skip(f"this torch has no {dtype}")
        made = HostTensor(dtype, shape, bytes(ITEMSIZES[dtype] * math.prod(shape))).torch()
        assert (made.dtype, tuple(made.shape)) == (getattr(self.torch, dtype), shape)

    def test_a_dtype_that_torch_lacks(self, monkeypatch):
        monkeypatch.delattr(self.torch, "float8_e8m0fnu")
        with pytest.raises(TypeError, match=r"torch .* has no float8_e8m0fnu"):
            HostTensor("float8_e8m0fnu", [1], b"x").torch()

    def test_tensors_at_any_depth(self):
        made = to_torch({"a": [1, {"b": HostTensor("bfloat16", [4], BF16)}], "c": HostTensor("int8", [], b"\x05")})
        assert made["a"][0] == 1
        assert made["a"][1]["b"].dtype == self.torch.bfloat16
        assert made["c"].item() == 5
