import gguf
import numpy as np
import pytest
from raw_files import gguf_bytes, tiny_gguf, tiny_metadata

from ringcore.checkpoint import read_gguf_header
from ringcore.checkpoint.gguf_names import gguf_tensor_names
from ringcore.checkpoint.gguf_tensors import GGUFTensors, read_gguf_tensor
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES
from ringcore.families.gemma3 import GEMMA3
from ringcore.families.llama import LLAMA
from ringcore.families.qwen2 import QWEN2
from ringcore.families.qwen3 import QWEN3

KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def random_tensor(kind, rows, columns):
    """Bytes of a tensor whose numbers are sane in any kind, [rows, bytes of a row]."""
    ggml = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(rows)
    if kind.endswith("_K"):  # `gguf` expands these, and makes none; bytes below 60 make no float16 infinite
        block, size = gguf.GGML_QUANT_SIZES[ggml]
        return ggml, rng.integers(0, 60, (rows, columns // block * size), dtype=np.uint8)
    values = rng.normal(size=(rows, columns)).astype(np.float32)
    return ggml, np.ascontiguousarray(gguf.quants.quantize(values, ggml)).view(np.uint8).reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_bit_identical_to_the_library(tmp_path, kind):
    ggml, raw = random_tensor(kind, 37, 1024)
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([], [("t", (37, 1024), int(ggml), 0)], raw.tobytes()))
    info = read_gguf_header(path).tensors["t"]
    plain = {"F32": np.float32, "F16": np.float16}.get(kind, np.uint8)
    expected = gguf.quants.dequantize(raw.view(plain), ggml)
    whole = read_gguf_tensor(path, info)
    assert whole.dtype == np.float32
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(whole, expected)
    np.testing.assert_array_equal(read_gguf_tensor(path, info, 5, 21), expected[5:21])
    assert read_gguf_tensor(path, info, 5, 5).shape == (0, 1024)


def test_a_file_cut_after_its_header_was_read(tmp_path):
    path = tiny_gguf(tmp_path / "x.gguf", [], {"t": np.ones((8, 8))})
    info = read_gguf_header(path).tensors["t"]
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ModelLoadError, match="truncated: tensor 't' needs 256 bytes"):
        read_gguf_tensor(path, info)


def test_a_type_that_cannot_be_expanded(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_K
    block, size = gguf.GGML_QUANT_SIZES[kind]
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([], [("t", (1, block), int(kind), 0)], b"\0" * size))
    with pytest.raises(ModelLoadError, match="'t' has the type Q8_K"):
        read_gguf_tensor(path, read_gguf_header(path).tensors["t"])


@pytest.mark.parametrize("family", [LLAMA, QWEN2, QWEN3, GEMMA3], ids=lambda family: family.gguf.name)
def test_names_are_those_of_the_library(family):
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.gguf.name.upper()], 3)
    for hf_name, gguf_name in gguf_tensor_names(family, 3).items():
        stem, suffix = hf_name.rsplit(".", 1)
        theirs = names.get_name(stem)
        if theirs is not None:  # Llama has no q_norm
            assert f"{theirs}.{suffix}" == gguf_name
    assert names.get_name("model.layers.2.self_attn.q_proj") == "blk.2.attn_q"


def interleave(rows, heads):
    """Halves of a head -> neighbours, as llama.cpp's converter writes Llama's q and k."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)


@pytest.mark.parametrize("family", [LLAMA, QWEN2], ids=lambda family: family.gguf.name)
def test_rows_come_in_the_order_of_hugging_face(tmp_path, family):
    rng = np.random.default_rng(1)
    own = {"attn_q.weight": (32, 32), "attn_k.weight": (16, 32), "attn_v.weight": (16, 32), "attn_q.bias": (32,)}
    hf = {f"blk.1.{name}": rng.normal(size=shape).astype(np.float32) for name, shape in own.items()}
    hf["token_embd.weight"] = rng.normal(size=(9, 32)).astype(np.float32)
    heads = {"blk.1.attn_q.weight": 4, "blk.1.attn_q.bias": 4, "blk.1.attn_k.weight": 2} if family is LLAMA else {}
    stored = {name: interleave(rows, heads[name]) if name in heads else rows for name, rows in hf.items()}
    tensors = GGUFTensors(tiny_gguf(tmp_path / "x.gguf", tiny_metadata(family.gguf.name), stored), FAMILIES)
    for hf_name, gguf_name in gguf_tensor_names(family, 2).items():
        if gguf_name not in hf:
            assert hf_name not in tensors.shapes
            continue
        expected = hf[gguf_name]
        assert tensors.shapes[hf_name] == expected.shape
        np.testing.assert_array_equal(tensors.read(hf_name), expected)
        for start, stop in ((0, 8), (8, 9), (3, len(expected) - 1), (5, 5)):
            np.testing.assert_array_equal(tensors.read(hf_name, start, stop), expected[start:stop])


def test_norms_of_gemma3_come_without_the_1_that_is_stored_with_them(tmp_path):
    weights = np.array([0.5, 1.0, -0.25, 3.0], np.float32)
    names = {
        "output_norm": "norm",
        "blk.0.attn_norm": "layers.0.input_layernorm",
        "blk.0.attn_q_norm": "layers.0.self_attn.q_norm",
        "blk.1.ffn_norm": "layers.1.pre_feedforward_layernorm",
    }
    arrays = {f"{name}.weight": weights + 1 for name in names} | {"blk.0.attn_q.bias": weights}
    tensors = GGUFTensors(tiny_gguf(tmp_path / "x.gguf", tiny_metadata("gemma3"), arrays), FAMILIES)
    for name in names.values():
        np.testing.assert_array_equal(tensors.read(f"model.{name}.weight"), weights)
        np.testing.assert_array_equal(tensors.read(f"model.{name}.weight", 1, 3), weights[1:3])
    np.testing.assert_array_equal(tensors.read("model.layers.0.self_attn.q_proj.bias"), weights)


def test_an_unknown_tensor_is_named(tmp_path):
    arrays = {"token_embd.weight": np.ones((4, 32)), "blk.0.ffn_gate_exps.weight": np.ones((2, 2))}
    with pytest.raises(ModelLoadError, match=r"1 tensors are not known for 'llama', the first is 'blk.0.ffn_gate_exps"):
        GGUFTensors(tiny_gguf(tmp_path / "x.gguf", tiny_metadata(), arrays), FAMILIES)
    arrays = {"token_embd.weight": np.ones((4, 32)), "rope_freqs.weight": np.ones(4)}
    assert list(GGUFTensors(tiny_gguf(tmp_path / "y.gguf", tiny_metadata(), arrays), FAMILIES).shapes) == [
        "model.embed_tokens.weight"
    ]


def mapped(tmp_path, architecture, arrays, wanted):
    path = tiny_gguf(tmp_path / "x.gguf", tiny_metadata(architecture), arrays)
    return GGUFTensors(path, FAMILIES, wanted)


def test_experts_are_entries_of_one_tensor(tmp_path):
    rng, expert = np.random.default_rng(2), "model.layers.1.mlp.experts.{}.down_proj.weight"
    ggml, raw = random_tensor("Q8_0", 4 * 24, 64)
    tensors = [("blk.1.ffn_down_exps.weight", (4, 24, 64), int(ggml), 0)]
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes(tiny_metadata("qwen3moe"), tensors, raw.tobytes()))
    read = GGUFTensors(path, FAMILIES, [expert.format(i) for i in range(5)])
    assert read.shapes == {expert.format(i): (24, 64) for i in range(4)}
    expected = gguf.quants.dequantize(raw, ggml).reshape(4, 24, 64)
    for i in range(4):
        np.testing.assert_array_equal(read.read(expert.format(i)), expected[i])
    np.testing.assert_array_equal(read.read(expert.format(2), 5, 21), expected[2, 5:21])
    gate = {"blk.0.ffn_gate_inp_shexp.weight": rng.normal(size=32).astype(np.float32)}
    name = "model.layers.0.mlp.shared_expert_gate.weight"
    read = mapped(tmp_path, "qwen2moe", gate, [name])
    assert read.shapes == {name: (1, 32)}
    np.testing.assert_array_equal(read.read(name), gate["blk.0.ffn_gate_inp_shexp.weight"][None])


def test_matrices_of_gpt2_are_transposed(tmp_path):
    values = np.random.default_rng(3).normal(size=(96, 32)).astype(np.float32)
    names = ["transformer.h.1.attn.c_attn.weight", "lm_head.weight"]
    read = mapped(tmp_path, "gpt2", {"blk.1.attn_qkv.weight": values, "output.weight": values}, names)
    assert read.shapes == {names[0]: (32, 96), names[1]: (96, 32)}
    assert [read.is_read_whole(name) for name in names] == [True, False]
    np.testing.assert_array_equal(read.read(names[0]), values.T)
    np.testing.assert_array_equal(read.read(names[0], 3, 7), values.T[3:7])


def test_gate_and_up_of_gpt_oss_alternate(tmp_path):
    rng, experts = np.random.default_rng(4), "model.layers.0.mlp.experts"
    shapes = {"gate_exps.weight": (3, 24, 32), "up_exps.weight": (3, 24, 32), "down_exps.weight": (3, 32, 24)}
    shapes |= {"gate_exps.bias": (3, 24), "up_exps.bias": (3, 24)}
    stored = {f"blk.0.ffn_{name}": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    wanted = [f"{experts}.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")]
    read = mapped(tmp_path, "gpt-oss", stored, wanted)
    assert list(read.shapes.values()) == [(3, 32, 48), (3, 48), (3, 24, 32)]
    both = read.read(f"{experts}.gate_up_proj", 1, 3)
    np.testing.assert_array_equal(both[..., ::2], stored["blk.0.ffn_gate_exps.weight"][1:].swapaxes(1, 2))
    np.testing.assert_array_equal(both[..., 1::2], stored["blk.0.ffn_up_exps.weight"][1:].swapaxes(1, 2))
    biases = read.read(f"{experts}.gate_up_proj_bias")
    np.testing.assert_array_equal(biases[:, ::2], stored["blk.0.ffn_gate_exps.bias"])
    np.testing.assert_array_equal(biases[:, 1::2], stored["blk.0.ffn_up_exps.bias"])
    down = read.read(f"{experts}.down_proj", 2, 3)
    np.testing.assert_array_equal(down, stored["blk.0.ffn_down_exps.weight"][2:].swapaxes(1, 2))


def test_a_tensor_that_a_mapped_model_does_not_ask_for_is_named(tmp_path):
    arrays = {"token_embd.weight": np.ones((4, 32)), "blk.0.attn_norm.weight": np.full(32, 3.0)}
    norm = "model.layers.0.input_layernorm.weight"
    read = mapped(tmp_path, "gemma2", arrays, ["model.embed_tokens.weight", norm])
    np.testing.assert_array_equal(read.read(norm), np.full(32, 2.0))
    with pytest.raises(ModelLoadError, match=r"1 tensors are not known for 'gemma2', the first is 'blk.0.attn_norm"):
        mapped(tmp_path, "gemma2", arrays, ["model.embed_tokens.weight"])


def test_an_architecture_that_an_older_library_lacks(tmp_path, monkeypatch):
    known = {kind: name for kind, name in gguf.MODEL_ARCH_NAMES.items() if name != "gpt-oss"}
    monkeypatch.setattr(gguf.constants, "MODEL_ARCH_NAMES", known)
    with pytest.raises(ModelLoadError, match="the installed package gguf does not know 'gpt-oss'; install a newer"):
        mapped(tmp_path, "gpt-oss", {"token_embd.weight": np.ones((4, 32))}, [])


@pytest.mark.real_model
def test_the_folder_holds_what_the_gguf_file_holds(smollm2, smollm2_gguf):
    torch = pytest.importorskip("torch")
    from safetensors import safe_open

    tensors = GGUFTensors(smollm2_gguf, FAMILIES)
    with safe_open(f"{smollm2}/model.safetensors", "pt") as folder:
        assert set(folder.keys()) == set(tensors.shapes)
        for name in (
            "model.layers.7.self_attn.k_proj.weight",
            "model.norm.weight",
            "model.layers.29.mlp.down_proj.weight",
        ):
            assert torch.equal(folder.get_tensor(name), torch.from_numpy(tensors.read(name)).bfloat16())
