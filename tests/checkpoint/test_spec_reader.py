import json

import numpy as np
import pytest
from raw_files import LLAMA_CONFIG, model_folder, tiny_gguf, tiny_metadata

from ringcore.checkpoint import Families, ModelSpec, RopeSpec, find_model, read_model_spec
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES
from ringcore.families.llama import LLAMA
from ringcore.families.qwen2 import QWEN2
from ringcore.protocol.codec import decoder, encoder

ROPES = {
    "none": None,
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e6},
    "yarn_all": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.25,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "truncate": False,
    },
}
FAMILY_NAMES = ["Llama", "Qwen2", "Qwen3", "Mistral"]
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
    "bos_token_id": 3,
}


def spec_of(folder, load_format="dummy"):
    return read_model_spec(find_model(folder, load_format), FAMILIES)


def read(tmp_path, **changed):
    return spec_of(model_folder(tmp_path / "m", **changed))


def refused(tmp_path, match, **changed):
    with pytest.raises(ModelLoadError, match=match) as caught:
        read(tmp_path, **changed)
    assert "config.json" in caught.value.details["path"]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_agrees_with_transformers(tmp_path, name, rope):
    """The same facts as transformers reads, from the file that it writes."""
    import transformers

    extra = {"head_dim": 16} if name == "Qwen3" else {}
    tie = rope in ("linear", "yarn")
    if ROPES[rope] is not None:
        extra["rope_parameters"] = dict(ROPES[rope])
    config = getattr(transformers, f"{name}Config")(**SIZES, **extra, tie_word_embeddings=tie, dtype="bfloat16")
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = spec_of(tmp_path)
    for key, value in SIZES.items():
        ours = {
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "num_key_value_heads": "num_kv_heads",
        }
        assert getattr(spec, ours.get(key, key.replace("eos_token_id", "eos_token_ids"))) in (value, [value])
    assert spec.head_dim == (16 if name == "Qwen3" else 8)
    assert spec.tie_word_embeddings is tie
    assert spec.dtype == "bfloat16"
    theirs = config.rope_parameters
    assert spec.rope.theta == theirs["rope_theta"]
    assert spec.rope.kind == theirs["rope_type"]
    for key in set(theirs) - {"rope_theta", "rope_type"}:
        assert getattr(spec.rope, key) == theirs[key], key


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_biases_are_those_of_the_model_classes(tmp_path, name, bias):
    import transformers

    own = {"attention_bias": bias} if name != "Qwen2" else {}
    own |= {"mlp_bias": bias} if name == "Llama" else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, **own)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = spec_of(tmp_path)
    names = set(model.state_dict())
    for part in ("q", "k", "v"):
        assert spec.attention_bias == (f"model.layers.0.self_attn.{part}_proj.bias" in names)
    assert spec.attention_out_bias == ("model.layers.0.self_attn.o_proj.bias" in names)
    for part in ("gate", "up", "down"):
        assert spec.mlp_bias == (f"model.layers.0.mlp.{part}_proj.bias" in names)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_the_defaults_are_those_of_transformers(tmp_path, name):
    import transformers

    config = getattr(transformers, f"{name}Config")()
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sparse = {key: getattr(config, key) for key in (*required, "num_key_value_heads", "max_position_embeddings")}
    (tmp_path / "config.json").write_text(json.dumps(sparse | {"architectures": [f"{name}ForCausalLM"]}))
    spec = spec_of(tmp_path)
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.tie_word_embeddings == config.tie_word_embeddings
    assert spec.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    assert spec.rope == RopeSpec(theta=config.rope_parameters["rope_theta"])
    assert spec.bos_token_id == config.bos_token_id
    assert spec.eos_token_ids == ([] if config.eos_token_id is None else [config.eos_token_id])


def test_the_older_words(tmp_path):
    scaling = {"type": "linear", "factor": 2}
    spec = read(tmp_path, rope_theta=7000, rope_scaling=scaling, torch_dtype="torch.float16", num_key_value_heads=None)
    assert spec.rope == RopeSpec(theta=7000.0, kind="linear", factor=2.0)
    assert spec.dtype == "float16"
    assert spec.num_kv_heads == spec.num_heads == 4
    scaling = {"rope_type": "yarn", "factor": 4.0}
    assert read(tmp_path, rope_scaling=scaling).rope.original_max_position_embeddings == 64
    assert (
        read(tmp_path, rope_scaling=scaling, original_max_position_embeddings=16).rope.original_max_position_embeddings
        == 16
    )
    assert read(tmp_path, rope_scaling={"rope_type": "yarn"}, original_max_position_embeddings=16).rope.factor == 4.0


def test_qwen2_has_its_bias_whatever_the_file_says(tmp_path):
    for said in (True, False):
        spec = read(tmp_path, architectures=["Qwen2ForCausalLM"], attention_bias=said, mlp_bias=said)
        assert (spec.attention_bias, spec.attention_out_bias, spec.mlp_bias) == (True, False, False)


def test_a_spec_travels(tmp_path):
    spec = read(tmp_path, rope_scaling=ROPES["llama3"])
    assert decoder(ModelSpec).decode(encoder().encode(spec)) == spec


def test_ends_of_text_are_merged(tmp_path):
    folder = model_folder(tmp_path / "m", eos_token_id=[5, 6])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5]}))
    assert spec_of(folder).eos_token_ids == [9, 5, 6]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 4}))
    assert spec_of(folder).eos_token_ids == [4, 5, 6]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(ModelLoadError, match=r"generation_config.json: field 'eos_token_id' is 'x'"):
        spec_of(folder)


def test_the_dtype_of_the_files_where_the_config_is_silent(tmp_path):
    from safetensors.numpy import save_file

    folder = model_folder(tmp_path / "m", torch_dtype=None)
    save_file({"a": np.ones(3, np.float16), "b": np.ones(3, np.float16), "c": np.ones(9, np.float32)},
              folder / "model.safetensors")  # fmt: skip
    assert spec_of(folder, "auto").dtype == "float16"


@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
def test_a_missing_field_is_named(tmp_path, key):
    refused(tmp_path, f"config.json: field '{key}' is missing", **{key: None})


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"architectures": "LlamaForCausalLM"}, "'architectures' is 'LlamaForCausalLM', a list"),
        ({"hidden_size": "32"}, "'hidden_size' is '32', an integer is needed"),
        ({"hidden_size": 32.5}, "'hidden_size' is 32.5, an integer is needed"),
        ({"vocab_size": True}, "'vocab_size' is True, an integer"),
        ({"vocab_size": 0}, "'vocab_size' is 0, it must be from 1"),
        ({"num_hidden_layers": 1 << 30}, "'num_hidden_layers' is 1073741824, it must be from 1 to 1000;"),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' is 0, it must be above 0"),
        ({"rms_norm_eps": "1e-5"}, "'rms_norm_eps' is '1e-5', a number"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes', true or false"),
        ({"num_attention_heads": 5}, "'num_attention_heads' is 5, which does not divide hidden_size 32"),
        ({"num_key_value_heads": 3}, "3 key/value heads do not divide 4 attention heads"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"quantization_config": {"quant_method": "bitnet"}}, "quant_method' is 'bitnet'; known: 'awq', "),
        ({"quantization_config": {}}, "'quantization_config' is empty; remove it"),
        ({"torch_dtype": "int8"}, "'torch_dtype' is 'int8'"),
        ({"eos_token_id": 500}, "eos_token_id 500 is outside the vocabulary of 128"),
        ({"eos_token_id": [1, True]}, "a token id or a list"),
        ({"bos_token_id": "<s>"}, "'bos_token_id' is '<s>'"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_scaling.rope_type' is 'longrope'; known: def"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'rope_scaling.type' is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'rope_scaling.factor' is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "'rope_scaling.factor' is -1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "'rope_scaling.low_freq_factor' is missing"),
        ({"rope_scaling": ROPES["llama3"] | {"high_freq_factor": 1.0}}, "it must be above low_freq_factor"),
        ({"rope_scaling": [1]}, r"'rope_scaling' is \[1\], an object"),
        ({"rope_parameters": {"rope_type": "su"}}, "'rope_parameters.rope_type' is 'su'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "'rope_parameters.full_attention' is not known"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(tmp_path, changed, match):
    refused(tmp_path, match, **changed)


def test_a_null_is_no_silence(tmp_path):
    """transformers' default stands in for what is absent, not for null."""
    folder = model_folder(tmp_path / "m", bos_token_id=None, eos_token_id=None)
    assert (spec_of(folder).bos_token_id, spec_of(folder).eos_token_ids) == (None, [])
    assert (read(tmp_path).bos_token_id, read(tmp_path).eos_token_ids) == (1, [2])


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "holds a JSON list"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a": "' + b"x" * (1 << 20) + b'"}', "larger than 1048576 bytes"),
    ],
)
def test_a_broken_config(tmp_path, content, match):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=match):
        spec_of(tmp_path)


def test_the_architectures_are_those_given(tmp_path):
    files = find_model(model_folder(tmp_path / "m"))
    assert read_model_spec(files, Families(LLAMA)).architecture == "LlamaForCausalLM"
    with pytest.raises(ModelLoadError, match="known: Qwen2ForCausalLM"):
        read_model_spec(files, Families(QWEN2), "native")


def test_a_gguf_file_goes_the_same_way(tmp_path):
    file = tiny_gguf(tmp_path / "x.gguf", tiny_metadata(), {"token_embd.weight": np.ones((16, 32))})
    spec = spec_of(file, "auto")
    assert (spec.vocab_size, spec.num_layers) == (16, 2)
    bad = tiny_metadata(attention__head_count_kv=("u32", 3))
    with pytest.raises(ModelLoadError, match=r"x.gguf: 3 key/value heads do not divide 4"):
        spec_of(tiny_gguf(tmp_path / "x.gguf", bad, {"token_embd.weight": np.ones((16, 32))}), "auto")


def test_helper_config_is_accepted(tmp_path):
    assert read(tmp_path).hidden_size == LLAMA_CONFIG["hidden_size"]
