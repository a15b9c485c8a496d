"""The sampling parameters of generation_config.json."""

from __future__ import annotations

import json

import pytest
from fake_engine import make_model_folder

from ringcore import EngineConfig
from ringcore.errors import ConfigError, ModelLoadError

GIVEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "min_p": None, "max_new_tokens": 2048, "do_sample": True}
READ = {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "max_tokens": 2048}


def defaults_of(folder, **options) -> dict:
    return EngineConfig.from_options(model=folder, load_format="dummy", **options).model.sampling_defaults


def test_they_are_read_unless_they_are_not_wanted(tmp_path):
    folder = make_model_folder(tmp_path)
    assert defaults_of(folder) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(GIVEN))
    assert defaults_of(folder) == READ
    assert defaults_of(folder, generation_config="ringcore") == {}
    with pytest.raises(ConfigError, match="generation_config='vllm': vLLM's 'vllm' is 'ringcore' here"):
        defaults_of(folder, generation_config="vllm")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"temperature": "hot"}', r"field 'temperature' is no sampling parameter: temperature='hot'"),
        ('{"top_p": 2}', "field 'top_p' is no sampling parameter.*generation_config='ringcore'"),
        ('{"max_new_tokens": 0}', "field 'max_new_tokens'"),
        ("[]", "generation_config.json: holds a JSON list"),
        ('{"top_k": ', "not valid JSON"),
    ],
)
def test_what_is_malformed_is_named(tmp_path, text, says):
    folder = make_model_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=says):
        defaults_of(folder)
