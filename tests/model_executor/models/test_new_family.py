"""A family is added by its record, its model class and its place in the table: here `pebble.py`, `pebble_model.py` and
`KNOWN`. Its computation is Qwen3's with biases, so that transformers is the reference."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from dense_attention import DenseRun
from pebble import PEBBLE
from raw_files import tiny_gguf, tiny_metadata
from safetensors.torch import load_file, save_file
from tiny_checkpoints import MAX_LEN, hf_logits, hf_model, load, random_ids

from ringcore.checkpoint import Families, find_model, read_model_spec
from ringcore.checkpoint.expected_tensors import check_checkpoint, expected_tensors
from ringcore.checkpoint.gguf_names import gguf_tensor_names
from ringcore.checkpoint.gguf_tensors import GGUFTensors
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES
from ringcore.families.llama import LLAMA

KNOWN = Families(LLAMA, PEBBLE)
NAMES = {
    "input_layernorm": "ln_attn",
    "post_attention_layernorm": "ln_mlp",
    "q_norm": "query_ln",
    "k_norm": "key_ln",
}


@pytest.fixture
def pebble(tmp_path):
    """(transformers' Qwen3 with biases, a folder with the same model in the words of the family)."""
    hf = hf_model("Qwen3", attention_bias=True)
    hf.save_pretrained(tmp_path)
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        tensors[".".join(NAMES.get(part, part) for part in name.split("."))] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    rewrite(tmp_path, architectures=["PebbleForCausalLM"], act="silu", hidden_act="gelu", attention_bias=False)
    return hf, tmp_path


def rewrite(folder, **changed):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changed
    for key in ("head_dim", "num_key_value_heads"):  # the family's defaults
        config.pop(key, None)
    path.write_text(json.dumps(config))


def check(path):
    files = find_model(path)
    check_checkpoint(files, read_model_spec(files, KNOWN), KNOWN)


def test_its_logits_are_those_of_transformers(pebble):
    hf, folder = pebble
    check(folder)
    ids = random_ids(40)
    run = DenseRun(load(folder, families=KNOWN), MAX_LEN, 1)
    ours = torch.cat([run.step({0: ids[:30]}), *(run.step({0: [token]}) for token in ids[30:])])
    torch.testing.assert_close(ours, hf_logits(hf, ids), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "missing", ["layers.0.ln_attn.weight", "layers.2.self_attn.key_ln.weight", "layers.1.self_attn.o_proj.bias"]
)
def test_its_checkpoint_is_checked_without_its_model(pebble, missing):
    _, folder = pebble
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.{missing}"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"'model.{missing}' is missing"):
        check(folder)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"act": "gelu"}, "'act' is 'gelu'; PebbleForCausalLM computes 'silu'"),
        ({"router_bias": True}, "'router_bias' is True, which is not computed"),
        ({"layer_types": ["sliding_attention"] * 3}, "layers, which PebbleForCausalLM does not have"),
    ],
)
def test_its_configuration_is_checked(pebble, changed, match):
    _, folder = pebble
    rewrite(folder, **changed)
    with pytest.raises(ModelLoadError, match=match):
        read_model_spec(find_model(folder), KNOWN)


@pytest.mark.parametrize("plus_one", [False, True])
def test_its_gguf_file_is_read(tmp_path, plus_one):
    """Rows of q and k are permuted back, and a norm by 1 + weight is stored as the sum, whatever its name is."""
    family = dataclasses.replace(PEBBLE, norm_plus_one=plus_one)
    known, path, metadata = Families(family), tmp_path / "x.gguf", tiny_metadata("pebble")
    tiny_gguf(path, metadata, {"token_embd.weight": np.ones((16, 32)), "blk.0.attn_q.bias": np.ones(32)})
    spec = read_model_spec(find_model(path), known)
    assert (spec.architecture, spec.attention_bias, spec.attention_out_bias) == ("PebbleForCausalLM", True, False)
    names = gguf_tensor_names(family, spec.num_layers)
    stored = {
        name: np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in expected_tensors(spec, family).items()
    }
    tiny_gguf(path, metadata, {names[name]: values for name, values in stored.items()})
    check_checkpoint(find_model(path), spec, known)
    tensors, layer = GGUFTensors(path, known), "model.layers.1"
    assert list(tensors.read(f"{layer}.self_attn.q_proj.bias", 0, 8)) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert list(tensors.read(f"{layer}.self_attn.v_proj.bias", 0, 8)) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert names[f"{layer}.ln_mlp.weight"] == "blk.1.ffn_norm.weight"
    for norm in ("ln_mlp", "self_attn.key_ln"):
        expected = stored[f"{layer}.{norm}.weight"] - plus_one
        np.testing.assert_array_equal(tensors.read(f"{layer}.{norm}.weight"), expected)


def test_only_the_table_that_has_it_knows_it(pebble):
    _, folder = pebble
    with pytest.raises(ModelLoadError, match="'PebbleForCausalLM' has no native model; known: Gemma3ForCausalLM, Ll"):
        read_model_spec(find_model(folder), FAMILIES, "native")
