import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_files import F16, F32, Q4_0, Q8_0, SCALARS, gguf_bytes, string
from samples import num_examples

from ringcore.checkpoint import read_gguf_header
from ringcore.checkpoint.gguf_header import LongArray
from ringcore.errors import ModelLoadError


def read(tmp_path, content, **options):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return read_gguf_header(path, **options)


def test_every_kind_of_value(tmp_path):
    items = [(f"k.{kind}", kind, True if kind == "bool" else 1.5 if kind[0] == "f" else 3) for kind in SCALARS]
    items += [
        ("k.str", "str", "Ġ→ text"),
        ("k.list", "[i32]", [-1, 2, 3]),
        ("k.flags", "[bool]", [True, False]),
        ("k.words", "[str]", ["a", "", "ß"]),
        ("k.nested", "[[u8]]", [[1, 2], [3]]),
        ("k.empty", "[str]", []),
    ]
    header = read(tmp_path, gguf_bytes(items))
    assert header.metadata == {key: item for key, _, item in items}
    assert isinstance(header.metadata["k.bool"], bool)
    assert isinstance(header.metadata["k.u8"], int)


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_have_places_in_the_file(tmp_path, version):
    data = np.arange(64, dtype="<f4").tobytes()
    tensors = [("m", (3, 4), F32, 0), ("half", (8,), F16, 64), ("q", (2, 32), Q4_0, 96), ("r", (1, 32), Q8_0, 160)]
    content = gguf_bytes([("a.b", "str", "x" * 7)], tensors, data, version)
    header = read(tmp_path, content)
    assert header.version == version
    assert {t.name: (t.shape, t.nbytes) for t in header.tensors.values()} == {
        "m": ((3, 4), 48),
        "half": ((8,), 16),
        "q": ((2, 32), 36),
        "r": ((1, 32), 34),
    }
    begin = header.tensors["m"].offset
    assert begin % 32 == 0
    assert content[begin : begin + 256] == data
    assert header.tensors["q"].offset == begin + 96


def test_alignment_of_the_file_is_kept(tmp_path):
    metadata = [("general.alignment", "u32", 128)]
    content = gguf_bytes(metadata, [("m", (1,), F32, 128)], b"\0" * 132, alignment=128)
    assert read(tmp_path, content).tensors["m"].offset % 128 == 0


def test_long_arrays_are_read_when_asked(tmp_path):
    words, numbers = [f"w{i}" for i in range(2000)], list(range(2000))
    content = gguf_bytes([("words", "[str]", words), ("numbers", "[u32]", numbers), ("last", "str", "end")])
    short = read(tmp_path, content)
    assert short.metadata == {"words": LongArray(2000), "numbers": LongArray(2000), "last": "end"}
    whole = read(tmp_path, content, long_arrays=True)
    assert whole.metadata == {"words": words, "numbers": numbers, "last": "end"}


def test_agrees_with_the_library(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b"])
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    writer.add_tensor("plain", values)
    writer.add_tensor("packed", gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0), raw_dtype=8)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    ours, theirs = read_gguf_header(tmp_path / "w.gguf"), gguf.GGUFReader(tmp_path / "w.gguf")
    assert ours.metadata["llama.block_count"] == 3
    assert {(t.name, int(t.data_offset), int(t.n_bytes), int(t.tensor_type)) for t in theirs.tensors} == {
        (t.name, t.offset, t.nbytes, t.ggml_type) for t in ours.tensors.values()
    }
    assert ours.tensors["packed"].shape == (4, 64)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "empty file"),
        (b"GGML" + b"\0" * 40, "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1; little-endian files of version 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "of big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "claims 1152921504606846976 entries"),
        (gguf_bytes([("a", "str", "x"), ("a", "str", "y")]), "key 'a' comes twice"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IQ", 99, 0), "type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 4, 1 << 40), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2) + b"\xff\xff" + b"\0" * 16, "not UTF-8"),
        (gguf_bytes([("k", "[[[[[u8]]]]]", [[[[[1]]]]])]), "type 9"),
        (gguf_bytes([("general.alignment", "u32", 0)]), "general.alignment is 0"),
        (gguf_bytes([("general.alignment", "u32", 48)]), "general.alignment is 48, a power of two"),
        (gguf_bytes([], [("t", (4,), F32, 0), ("t", (4,), F32, 32)], b"\0" * 64), "'t' comes twice"),
        (gguf_bytes([], [("t", (4,), F32, 16)], b"\0" * 64), "offset 16 is no multiple of 32"),
        (gguf_bytes([], [("t", (400,), F32, 0)], b"\0" * 64), "truncated: tensor 't' ends at byte"),
        (gguf_bytes([], [("t", (16,), F32, 0), ("u", (4,), F32, 32)], b"\0" * 64), "'t' and 'u' overlap"),
        (gguf_bytes([], [("t", (2, 33), Q4_0, 0)], b"\0" * 64), "rows of 33 do not divide into blocks of 32"),
        (gguf_bytes([], [("t", (2,), 77, 0)], b"\0" * 64), "ggml type 77"),
        (gguf_bytes([], [("t", (1, 1, 1, 1, 1), F32, 0)], b"\0" * 64), "5 dimensions"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, content, match):
    with pytest.raises(ModelLoadError, match=match) as caught:
        read(tmp_path, content)
    assert caught.value.details["path"].endswith("x.gguf")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="cannot be read: No such file"):
        read_gguf_header(tmp_path / "nothing.gguf")


WHOLE = gguf_bytes(
    [("a.word", "str", "hello"), ("a.list", "[str]", ["x", "yy"]), ("a.number", "f64", 0.5)],
    [("t", (2, 4), F32, 0), ("u", (2, 32), Q4_0, 32)],
    b"\0" * 68,
)


@settings(max_examples=num_examples(40, 80), deadline=None)
@given(cut=st.integers(0, len(WHOLE) - 1))
def test_every_truncation_is_noticed(tmp_path_factory, cut):
    with pytest.raises(ModelLoadError):
        read(tmp_path_factory.mktemp("cut"), WHOLE[:cut], long_arrays=True)


@settings(max_examples=num_examples(80, 200), deadline=None)
@given(noise=st.binary(min_size=1, max_size=16), at=st.integers(0, len(WHOLE)))
def test_noise_raises_only_the_typed_error(tmp_path_factory, noise, at):
    content = WHOLE[:at] + noise + WHOLE[at + len(noise) :]
    try:
        header = read(tmp_path_factory.mktemp("noise"), content, long_arrays=True)
    except ModelLoadError:
        return
    assert all(t.offset + t.nbytes <= len(content) for t in header.tensors.values())
