"""Reading config.json of models that transformers computes, and refusing what no transformers has."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ringcore.checkpoint import AnySpec, ModelSpec, TransformersSpec, find_model, read_model_spec, transformers_spec
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES
from ringcore.protocol.codec import decoder, encoder

OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "dtype": "bfloat16",
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 100,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "dtype": "float32",
}
TEXT = {
    "vocab_size": 90,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
    "layer_types": ["full_attention"] * 3,
}
LLAMA = OLMO2 | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 1e4}


def read(folder, config, model_impl="auto") -> AnySpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_spec(find_model(folder, "dummy"), FAMILIES, model_impl)


def test_what_the_engine_needs_to_know_is_read(tmp_path):
    spec = read(tmp_path, OLMO2)
    assert isinstance(spec, TransformersSpec)
    assert (spec.architecture, spec.model_type, spec.dtype) == ("Olmo2ForCausalLM", "olmo2", "bfloat16")
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.max_position_embeddings) == (100, 32, 4, 64)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, [2, 3])
    assert json.loads(spec.config) == OLMO2


def test_older_names_of_the_sizes(tmp_path):
    spec = read(tmp_path, GPT2)
    assert (spec.hidden_size, spec.num_layers, spec.max_position_embeddings) == (32, 3, 64)


def test_the_text_model_of_several_parts(tmp_path):
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": 7}
    spec = read(tmp_path, whole | {"text_config": TEXT | {"eos_token_id": 8, "dtype": "float16"}})
    assert isinstance(spec, TransformersSpec)
    assert (spec.architecture, spec.is_part) == ("Gemma3ForConditionalGeneration", True)
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.max_position_embeddings) == (90, 64, 3, 48)
    assert (spec.dtype, spec.eos_token_ids) == ("float16", [7])
    few = json.loads(spec.first_layers(1).config)
    assert (few["text_config"]["num_hidden_layers"], few["text_config"]["layer_types"]) == (1, ["full_attention"])
    assert few["model_type"] == "gemma3"


def test_what_the_text_model_leaves_out_is_asked_of_a_program(tmp_path, monkeypatch):
    """That it is transformers' default is seen in `tests/model_executor/models/test_text_parts.py`."""
    monkeypatch.setattr(transformers_spec, "_DEFAULTS", "given_defaults")
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    config = {"architectures": ["X"], "model_type": "gemma3", "text_config": {"num_hidden_layers": 2}}
    spec = read(tmp_path, config)
    assert (spec.num_layers, spec.vocab_size, spec.hidden_size, spec.max_position_embeddings) == (2, 50, 60, 70)
    config["text_config"] = {"num_hidden_layers": "many"}
    with pytest.raises(ModelLoadError, match="'text_config' is not read by transformers: ValueError: many layers"):
        read(tmp_path, config)


@pytest.mark.parametrize("config", [OLMO2, LLAMA])
def test_either_kind_of_spec_reaches_the_worker(tmp_path, config):
    spec = read(tmp_path, config)
    assert decoder(AnySpec).decode(encoder().encode(spec)) == spec


def test_model_impl_chooses(tmp_path):
    assert isinstance(read(tmp_path, LLAMA), ModelSpec)
    assert isinstance(read(tmp_path, LLAMA, "native"), ModelSpec)
    assert isinstance(read(tmp_path, LLAMA, "transformers"), TransformersSpec)
    with pytest.raises(
        ModelLoadError, match=r"'Olmo2ForCausalLM' has no native model; known: Gemma3.*model_impl='auto'"
    ):
        read(tmp_path, OLMO2, "native")


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"model_type": "olmo22"}, "config.json: the model_type 'olmo22' is not one that .* did you mean 'olmo2'"),
        ({"model_type": None}, "'model_type' is missing"),
        (
            {"model_type": "theirs", "auto_map": {"AutoModelForCausalLM": "modeling_theirs.Theirs"}},
            "'auto_map' names code of the folder for 'theirs'. There is no trust_remote_code: no code",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "'quantization_config.bits' is None; known: 4"),
        ({"text_config": TEXT | {"num_hidden_layers": "4"}}, "'text_config.num_hidden_layers' is '4'"),
        ({"text_config": TEXT | {"quantization_config": {}}}, "'text_config.quantization_config' is empty"),
        ({"is_encoder_decoder": True}, "'is_encoder_decoder' is true: of 'olmo2', no encoder is computed"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"num_hidden_layers": None}, "'num_hidden_layers' is missing"),
        ({"num_hidden_layers": "4"}, "'num_hidden_layers' is '4', an integer is needed"),
        ({"max_position_embeddings": None}, "'max_position_embeddings' is missing"),
        ({"eos_token_id": 100}, "eos_token_id 100 is outside the vocabulary of 100"),
        ({"dtype": "float8"}, "'dtype' is 'float8'"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, changed, match):
    with pytest.raises(ModelLoadError, match=match) as caught:
        read(tmp_path, OLMO2 | changed)
    assert caught.value.details["path"] == str(tmp_path / "config.json")


def test_code_of_the_folder_is_not_needed_where_transformers_has_the_type(tmp_path):
    assert read(tmp_path, OLMO2 | {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}).model_type == "olmo2"


def test_fields_by_layer_of_the_first_layers_are_as_long_as_they_are(tmp_path):
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    few = read(tmp_path, OLMO2 | {"layer_types": kinds, "eos_token_id": 2}).first_layers(2)
    config = json.loads(few.config)
    assert (few.num_layers, config["num_hidden_layers"], config["layer_types"]) == (2, 2, kinds[:2])
    by_layer = {"00": {"head_dim": 8}, "3": {"head_dim": 4}}
    few = read(tmp_path, OLMO2 | {"per_layer_config": by_layer, "id2label": {"0": "a", "1": "b"}}).first_layers(1)
    config = json.loads(few.config)
    assert (few.num_layers, config["per_layer_config"], len(config["id2label"])) == (1, {"00": {"head_dim": 8}}, 2)
    assert json.loads(read(tmp_path, GPT2).first_layers(1).config)["n_layer"] == 1


def test_reading_imports_no_torch(tmp_path):
    read(tmp_path, OLMO2)
    code = f"""
import sys
from ringcore import EngineConfig
config = EngineConfig.from_options(model={str(tmp_path)!r}, load_format="dummy")
assert config.model.spec.model_type == "olmo2" and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_types_are_those_of_transformers_which_is_not_imported_for_them():
    code = (
        "import sys; from ringcore.checkpoint.transformers_spec import _known_types; names = _known_types()\n"
        "assert 'transformers' not in sys.modules, 'it takes seconds'\n"
        "from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES; assert names == CONFIG_MAPPING_NAMES"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
