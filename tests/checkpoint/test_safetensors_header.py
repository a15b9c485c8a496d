import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_files import safetensors_bytes, safetensors_file
from safetensors.numpy import save_file
from samples import num_examples

from ringcore.checkpoint import TensorIndex, read_safetensors_header
from ringcore.errors import ModelLoadError


def entry(begin, end, dtype="F32", shape=(1,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def refused(tmp_path, content, match):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=match) as caught:
        read_safetensors_header(path)
    assert caught.value.details["path"] == str(path)
    assert str(path) in caught.value.message
    return caught.value


def test_agrees_with_the_library(tmp_path):
    arrays = {
        "b": np.arange(12, dtype=np.float32).reshape(3, 4),
        "a": np.arange(5, dtype=np.float16),
        "scalar": np.array(7, dtype=np.int64),
        "empty": np.zeros((0, 3), dtype=np.uint8),
    }
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    raw = (tmp_path / "x.safetensors").read_bytes()
    header = read_safetensors_header(tmp_path / "x.safetensors")
    assert set(header) == set(arrays)
    for name, array in arrays.items():
        found = header[name]
        assert found.shape == array.shape
        assert found.nbytes == array.nbytes
        np.testing.assert_array_equal(np.frombuffer(raw[found.begin : found.end], array.dtype), array.ravel())


def test_entries_come_in_the_order_of_their_bytes(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"z": entry(4, 8), "y": entry(0, 4)}, b"\0" * 8))
    assert list(read_safetensors_header(path)) == ["y", "z"]


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"t": entry(0, 16)}, r"'t': F32 \[1\] takes 4 bytes, its offsets say 16"),
        ({"t": entry(4, 0)}, "offsets 4 to 0"),
        ({"t": entry(-4, 0)}, "offsets -4 to 0"),
        ({"t": entry(6, 10)}, r"truncated: tensor 't' ends at byte \d+"),
        ({"t": entry(0, 4, dtype="F5")}, "dtype 'F5'; known: F64"),
        ({"t": entry(0, 4, shape=(-1, -1))}, r"shape \[-1, -1\]"),
        ({"t": entry(0, 4), "u": entry(2, 6)}, "'t' and 'u' overlap"),
        ({"t": entry(0, 8, shape=(2,)), "u": entry(4, 8)}, "'t' and 'u' overlap"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path, header, match):
    error = refused(tmp_path, safetensors_bytes(header, b"\0" * 8), match)
    assert error.details["tensor"] in header


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "0 bytes"),
        (b"\1\2\3", "3 bytes"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "claims 4611686018427387904 bytes"),
        ((999).to_bytes(8, "little") + b"{}", "truncated: the header needs 1007 bytes, the file has 10"),
        (safetensors_bytes(b"[1, 2]", b""), "header is not valid"),
        (safetensors_bytes(b'{"t": {"dtype": "F32"}}', b""), "header is not valid"),
        (safetensors_bytes(b"\xff\xfe{}", b""), "header is not valid"),
    ],
)
def test_a_broken_header_is_refused(tmp_path, content, match):
    refused(tmp_path, content, match)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"nothing.safetensors: cannot be read: No such file"):
        read_safetensors_header(tmp_path / "nothing.safetensors")


@settings(max_examples=num_examples(40, 60), deadline=None)
@given(cut=st.integers(0, 10_000))
def test_every_truncation_is_noticed(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("cut")
    whole = safetensors_file(folder / "x.safetensors", a=np.ones((4, 4)), b=np.ones(3)).read_bytes()
    (folder / "x.safetensors").write_bytes(whole[: cut % len(whole)])
    with pytest.raises(ModelLoadError):
        read_safetensors_header(folder / "x.safetensors")


@settings(max_examples=num_examples(50, 100), deadline=None)
@given(noise=st.binary(max_size=60), at=st.integers(0, 200))
def test_noise_raises_only_the_typed_error(tmp_path_factory, noise, at):
    path = tmp_path_factory.mktemp("noise") / "x.safetensors"
    whole = safetensors_file(path, a=np.ones((4, 4)), b=np.ones(3)).read_bytes()
    path.write_bytes(whole[:at] + noise + whole[at + len(noise) :])
    try:
        header = read_safetensors_header(path)
    except ModelLoadError:
        return
    assert all(0 <= found.begin <= found.end <= path.stat().st_size for found in header.values())


def test_the_index_spans_shards(tmp_path):
    one = safetensors_file(tmp_path / "1.safetensors", a=np.ones(2))
    two = safetensors_file(tmp_path / "2.safetensors", b=np.ones(3), c=np.ones(1))
    index = TensorIndex([str(one), str(two)])
    assert list(index) == ["a", "b", "c"]
    assert index["b"].file == str(two)
    assert "d" not in index


def test_a_name_in_two_shards_is_refused(tmp_path):
    one = safetensors_file(tmp_path / "1.safetensors", a=np.ones(2))
    two = safetensors_file(tmp_path / "2.safetensors", a=np.ones(2))
    with pytest.raises(ModelLoadError, match=r"2.safetensors: tensor 'a' is also in .*1.safetensors"):
        TensorIndex([str(one), str(two)])
