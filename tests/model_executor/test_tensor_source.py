"""How the sources read: in pieces of any size, from a file that may change under them."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ringcore.errors import ModelLoadError
from ringcore.model_executor import tensor_source
from ringcore.model_executor.tensor_source import DummySource, GGUFSource, SafetensorsSource
from ringcore.model_executor.weight import Uniform, WeightPart

ROWS, COLUMNS = 37, 24
SLICES = [(0, 0, ROWS), (0, 5, 1), (0, 11, 26), (1, 0, COLUMNS), (1, 7, 5), (1, 23, 1)]


@pytest.fixture
def matrix():
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def read(source, name, shape, dim, start, length, dtype=torch.float32):
    part = WeightPart(name, shape, dim, start, length)
    out = torch.full((*shape[:dim], length, *shape[dim + 1 :]), float("nan"), dtype=dtype)
    source.read(part, Uniform(-1.0, 1.0), out)
    return out


@pytest.mark.parametrize("buffer_bytes", [1, 96, 250, 1 << 20])
@pytest.mark.parametrize("piece", SLICES)
def test_safetensors_slices(tmp_path, monkeypatch, matrix, piece, buffer_bytes):
    """Buffers smaller than a row, of a row, of some rows, of all."""
    monkeypatch.setattr(SafetensorsSource, "BUFFER_BYTES", buffer_bytes)
    save_file({"before": torch.ones(3), "m": matrix}, tmp_path / "m.safetensors")
    with SafetensorsSource([str(tmp_path / "m.safetensors")]) as source:
        assert torch.equal(read(source, "m", (ROWS, COLUMNS), *piece), matrix.narrow(*piece))


def test_only_the_bytes_of_a_slice_are_read(tmp_path, monkeypatch, matrix):
    save_file({"m": matrix}, tmp_path / "m.safetensors")
    seen = []
    preadv = os.preadv

    def counted(descriptor, buffers, offset):
        seen.append(preadv(descriptor, buffers, offset))
        return seen[-1]

    monkeypatch.setattr(os, "preadv", counted)
    with SafetensorsSource([str(tmp_path / "m.safetensors")]) as source:
        for dim, start, length in SLICES:
            seen.clear()
            assert read(source, "m", (ROWS, COLUMNS), dim, start, length).nbytes == sum(seen)


def test_short_reads_are_continued(tmp_path, monkeypatch, matrix):
    """A read may return less than was asked for, on a network file system say."""
    save_file({"m": matrix}, tmp_path / "m.safetensors")
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:100]], at))
    with SafetensorsSource([str(tmp_path / "m.safetensors")]) as source:
        assert torch.equal(read(source, "m", (ROWS, COLUMNS), 0, 3, 30), matrix[3:33])


def test_a_file_that_became_shorter_is_an_error(tmp_path, matrix):
    path = tmp_path / "m.safetensors"
    save_file({"m": matrix}, path)
    with SafetensorsSource([str(path)]) as source:
        os.truncate(path, path.stat().st_size - 50)
        assert torch.equal(read(source, "m", (ROWS, COLUMNS), 0, 0, 5), matrix[:5])
        with pytest.raises(ModelLoadError, match=r"m\.safetensors: truncated: tensor 'm' goes on at byte"):
            read(source, "m", (ROWS, COLUMNS), 0, 0, ROWS)


def test_files_are_closed(tmp_path, matrix):
    save_file({"m": matrix}, tmp_path / "m.safetensors")
    before = len(os.listdir("/proc/self/fd"))
    with SafetensorsSource([str(tmp_path / "m.safetensors")]) as source:
        read(source, "m", (ROWS, COLUMNS), 0, 0, 1)
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before


def test_reading_into_a_view_converts_and_leaves_the_rest(tmp_path, matrix):
    save_file({"m": matrix.bfloat16()}, tmp_path / "m.safetensors")
    whole = torch.zeros(ROWS + 4, COLUMNS)
    with SafetensorsSource([str(tmp_path / "m.safetensors")]) as source:
        source.read(WeightPart("m", (ROWS, COLUMNS), 0, 0, ROWS), Uniform(0.0, 1.0), whole[2:-2])
    assert torch.equal(whole[2:-2], matrix.bfloat16().float())
    assert not whole[:2].any()
    assert not whole[-2:].any()


@pytest.mark.parametrize("group_elements", [1, 100, 1 << 20])
@pytest.mark.parametrize("piece", SLICES)
def test_dummy_slices_are_slices_of_one_tensor(monkeypatch, piece, group_elements):
    whole = read(DummySource(4), "m", (ROWS, COLUMNS), 0, 0, ROWS)
    monkeypatch.setattr(DummySource, "GROUP_ELEMENTS", group_elements)
    source = DummySource(4)
    assert whole.isfinite().all()
    assert torch.equal(read(source, "m", (ROWS, COLUMNS), *piece), whole.narrow(*piece))


def test_no_two_rows_or_seeds_or_names_of_dummy_tensors_are_alike():
    rows = [read(DummySource(seed), name, (ROWS, COLUMNS), 0, 0, ROWS) for seed in (4, 5) for name in ("m", "n")]
    assert len(torch.cat(rows).unique(dim=0)) == 4 * ROWS


def test_dummy_numbers_are_spread_evenly_and_do_not_depend_on_one_another():
    values = tensor_source._uniform(0, 1 << 20, (123, -456), torch.device("cpu"))
    assert 0 < values.min() < 1e-5
    assert 1 - 1e-5 < values.max() < 1
    counts = torch.histc(values, 64, 0, 1)
    assert (counts - counts.mean()).square().sum() / counts.mean() < 120  # chi squared of 63 degrees: 1 in 100,000
    for distance in (1, 2, 64, 4096):
        pairs = torch.stack((values[distance:], values[:-distance]))
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.005


def test_dummy_numbers_of_a_tensor_with_more_than_32_bits_of_elements():
    keys, cpu = (1, 2), torch.device("cpu")
    across = tensor_source._uniform((1 << 31) - 2, 4, keys, cpu)
    assert torch.equal(across[2:], tensor_source._uniform(1 << 31, 2, keys, cpu))
    assert len(across.unique()) == 4


@pytest.mark.parametrize("piece_elements", [1, 100, 1 << 20])
@pytest.mark.parametrize("piece", [(0, 0, 64), (0, 16, 32), (1, 0, 64), (1, 3, 5)])
def test_gguf_slices(tmp_path, monkeypatch, piece, piece_elements):
    import gguf

    values = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_tensor("blk.0.attn_q.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0))
    monkeypatch.setattr(GGUFSource, "PIECE_ELEMENTS", piece_elements)
    source = GGUFSource(str(tmp_path / "m.gguf"), ())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(read(source, name, (64, 64), *piece), expected.narrow(*piece))
