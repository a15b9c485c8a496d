"""config.json of a Gemma 3, as transformers 5 writes it and as it was published before."""

from __future__ import annotations

import json

import pytest
from raw_files import model_folder

from ringcore.checkpoint import RopeSpec, find_model, read_model_spec
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES

LINEAR = {"rope_type": "linear", "factor": 8.0}


def spec_of(folder):
    return read_model_spec(find_model(folder, "dummy"), FAMILIES)


def read(tmp_path, **fields):
    return spec_of(model_folder(tmp_path / "m", architectures=["Gemma3ForCausalLM"], **fields))


@pytest.mark.parametrize("form", ["5", "older"])
def test_agrees_with_transformers(tmp_path, form):
    """The same facts from the file that transformers 5 writes, and from the one that was published before it."""
    from transformers import Gemma3TextConfig

    older = {"rope_theta": 5e5, "rope_local_base_freq": 3e4, "rope_scaling": LINEAR, "sliding_window_pattern": 3}
    own = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "max_position_embeddings": 128,
        "query_pre_attn_scalar": 168,
        "sliding_window": 24,
        "eos_token_id": [1, 7],
        "attention_bias": True,
    }
    config = Gemma3TextConfig(**own, **older, architectures=["Gemma3ForCausalLM"], dtype="bfloat16")
    if form == "5":
        config.save_pretrained(tmp_path)
        assert "rope_theta" not in json.loads((tmp_path / "config.json").read_text())
    else:
        folded = own | older | {"architectures": ["Gemma3ForCausalLM"], "torch_dtype": "bfloat16"}
        (tmp_path / "config.json").write_text(json.dumps(folded))
    spec = spec_of(tmp_path)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (5, 6, 2, 20)
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (96, 48, 80)
    assert spec.sliding_windows == {0: 24, 1: 24, 3: 24, 4: 24}
    assert config.layer_types[2] == "full_attention"
    full, sliding = config.rope_parameters["full_attention"], config.rope_parameters["sliding_attention"]
    assert spec.rope == RopeSpec(theta=full["rope_theta"], kind="linear", factor=full["factor"])
    assert spec.sliding_rope == RopeSpec(theta=sliding["rope_theta"])
    assert spec.query_pre_attn_scalar == 168
    assert spec.eos_token_ids == [1, 7]
    assert (spec.attention_bias, spec.attention_out_bias, spec.mlp_bias) == (True, True, False)
    assert spec.tie_word_embeddings
    assert spec.dtype == "bfloat16"


def test_the_defaults_are_those_of_transformers(tmp_path):
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig()
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sparse = {key: getattr(config, key) for key in (*required, "max_position_embeddings")}
    (tmp_path / "config.json").write_text(json.dumps(sparse | {"architectures": ["Gemma3ForCausalLM"]}))
    spec = spec_of(tmp_path)
    assert (spec.head_dim, spec.num_kv_heads) == (config.head_dim, config.num_key_value_heads)
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.tie_word_embeddings == config.tie_word_embeddings
    assert spec.query_pre_attn_scalar == config.query_pre_attn_scalar
    assert (spec.bos_token_id, spec.eos_token_ids) == (config.bos_token_id, [config.eos_token_id])
    assert set(spec.sliding_windows.values()) == {config.sliding_window}
    assert spec.rope == RopeSpec(theta=config.rope_parameters["full_attention"]["rope_theta"])
    assert spec.sliding_rope == RopeSpec(theta=config.rope_parameters["sliding_attention"]["rope_theta"])


@pytest.mark.parametrize(
    ("fields", "full", "sliding"),
    [
        ({}, RopeSpec(1e6), RopeSpec(1e4)),
        ({"rope_scaling": LINEAR}, RopeSpec(1e6, "linear", 8.0), RopeSpec(1e4)),
        ({"rope_theta": 5.0, "rope_local_base_freq": 3.0}, RopeSpec(5.0), RopeSpec(3.0)),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, RopeSpec(5.0), RopeSpec(1e4)),
        (
            {"rope_parameters": {"sliding_attention": {**LINEAR, "rope_theta": 3.0}}},
            RopeSpec(1e6),
            RopeSpec(3.0, "linear", 8.0),
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}, "rope_scaling": LINEAR},
            RopeSpec(5.0, "linear", 8.0),
            RopeSpec(1e4),
        ),
    ],
)
def test_two_rotary_embeddings(tmp_path, fields, full, sliding):
    spec = read(tmp_path, **fields)
    assert (spec.rope, spec.sliding_rope) == (full, sliding)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {"hidden_activation": "gelu"},
            "'hidden_activation' is 'gelu'; Gemma3ForCausalLM computes 'gelu_pytorch_tanh'",
        ),
        ({"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0, which is not computed"),
        ({"final_logit_softcapping": 30.0}, "'final_logit_softcapping' is 30.0, which is not computed"),
        ({"use_bidirectional_attention": True}, "'use_bidirectional_attention' is True, which is not computed"),
        ({"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' is 0, it must be above 0"),
        ({"query_pre_attn_scalar": None}, "'query_pre_attn_scalar' is missing"),
        ({"rope_local_base_freq": "1e4"}, "'rope_local_base_freq' is '1e4', a number is needed"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "'rope_parameters.rope_theta' is not known; Gemma 3 has parameters"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "su"}}},
            "'rope_parameters.sliding_attention.rope_type' is 'su'",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "'rope_scaling.factor' is missing"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, fields, match):
    with pytest.raises(ModelLoadError, match=match):
        read(tmp_path, **fields)


def test_what_the_code_of_gemma3_does_not_read_is_not_refused(tmp_path):
    spec = read(tmp_path, hidden_act="gelu", attn_logit_softcapping=None, use_bidirectional_attention=False)
    assert spec.architecture == "Gemma3ForCausalLM"
