"""Which layers have a window, in the words of each family."""

from __future__ import annotations

import pytest
from raw_files import model_folder

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES

SLIDING, FULL = "sliding_attention", "full_attention"
WITHOUT = object()  # a key that the file does not have


def windows(tmp_path, family, num_layers=4, **fields):
    fields = {key: value for key, value in fields.items() if value is not WITHOUT}
    folder = model_folder(
        tmp_path / "m", architectures=[f"{family}ForCausalLM"], num_hidden_layers=num_layers, **fields
    )
    return read_model_spec(find_model(folder, "dummy"), FAMILIES).sliding_windows


def refused(tmp_path, match, family, **fields):
    with pytest.raises(ModelLoadError, match=match) as caught:
        windows(tmp_path, family, **fields)
    assert "config.json" in caught.value.details["path"]


@pytest.mark.parametrize(
    ("window", "expected"), [(12, {0: 12, 1: 12, 2: 12, 3: 12}), (1, dict.fromkeys(range(4), 1)), (None, {})]
)
def test_mistral_has_one_for_all_layers_or_none(tmp_path, window, expected):
    assert windows(tmp_path, "Mistral", sliding_window=window) == expected
    same = [FULL if window is None else SLIDING] * 4
    assert windows(tmp_path, "Mistral", sliding_window=window, layer_types=same) == expected


def test_mistral_has_transformers_default_where_the_file_is_silent(tmp_path):
    from transformers import MistralConfig

    assert windows(tmp_path, "Mistral") == dict.fromkeys(range(4), MistralConfig().sliding_window)


@pytest.mark.parametrize(("window", "kinds"), [(12, [FULL] * 4), (None, [SLIDING] * 4), (12, [FULL, SLIDING] * 2)])
def test_mistral_with_other_layer_types_is_refused(tmp_path, window, kinds):
    refused(tmp_path, "'layer_types' differs from sliding_window", "Mistral", sliding_window=window, layer_types=kinds)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_qwen_has_one_in_the_later_layers(tmp_path, family):
    used = {"sliding_window": 16, "use_sliding_window": True}
    assert windows(tmp_path, family, **used, max_window_layers=1) == {1: 16, 2: 16, 3: 16}
    assert windows(tmp_path, family, **used, max_window_layers=0) == dict.fromkeys(range(4), 16)
    assert windows(tmp_path, family, **used, max_window_layers=4) == {}  # published so
    assert windows(tmp_path, family, **used) == {}  # from layer 28 on
    assert windows(tmp_path, family, **used, max_window_layers=1, layer_types=[SLIDING, FULL, FULL, FULL]) == {0: 16}
    assert windows(tmp_path, family, **used, max_window_layers=1, layer_types=[FULL] * 4) == {}
    assert windows(tmp_path, family, sliding_window=16, use_sliding_window=False, max_window_layers=1) == {}
    assert windows(tmp_path, family, sliding_window=None, use_sliding_window=True, max_window_layers=1) == {}
    refused(tmp_path, "use_sliding_window is not true", family, sliding_window=16, layer_types=[SLIDING] * 4)


def test_llama_has_none(tmp_path):
    assert windows(tmp_path, "Llama", sliding_window=16, layer_types=[FULL] * 4) == {}
    refused(tmp_path, "'layer_types' asks for 'sliding_attention' layers", "Llama", layer_types=[FULL, SLIDING] * 2)
    used = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}
    refused(tmp_path, "'use_sliding_window' asks for .* which LlamaForCausalLM does not have", "Llama", **used)


@pytest.mark.parametrize(
    ("fields", "full_layers"),
    [
        ({}, [5, 11]),
        ({"sliding_window_pattern": 6}, [5, 11]),
        ({"sliding_window_pattern": 2}, [1, 3, 5, 7, 9, 11]),
        ({"_sliding_window_pattern": 3}, [2, 5, 8, 11]),
        ({"sliding_window_pattern": 1}, list(range(13))),
        ({"sliding_window_pattern": 40}, []),
        ({"layer_types": [FULL] + [SLIDING] * 12}, [0]),
        ({"layer_types": [FULL] + [SLIDING] * 12, "sliding_window_pattern": 2}, [0]),
        ({"layer_types": [FULL] * 13, "sliding_window": None}, list(range(13))),
    ],
)
def test_gemma3_has_one_between_full_layers(tmp_path, fields, full_layers):
    found = windows(tmp_path, "Gemma3", num_layers=13, **({"sliding_window": 32} | fields))
    assert found == {layer: 32 for layer in range(13) if layer not in full_layers}


@pytest.mark.parametrize("pattern", [None, 1, 2, 5, 6, 20])
def test_gemma3_layers_are_those_of_transformers(tmp_path, pattern):
    from transformers import Gemma3TextConfig

    given = {} if pattern is None else {"sliding_window_pattern": pattern}
    theirs = Gemma3TextConfig(num_hidden_layers=26, **given)
    expected = {i: theirs.sliding_window for i, kind in enumerate(theirs.layer_types) if kind == SLIDING}
    assert windows(tmp_path, "Gemma3", num_layers=26, **given) == expected


@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
@pytest.mark.parametrize(
    ("window", "match"),
    [
        (0, "'sliding_window' is 0, it must be from 1"),
        (-5, "'sliding_window' is -5, it must be from 1"),
        (16.5, "'sliding_window' is 16.5, an integer is needed"),
        (True, "'sliding_window' is True, an integer"),
    ],
)
def test_a_wrong_window_is_named(tmp_path, family, window, match):
    refused(tmp_path, match, family, sliding_window=window)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"sliding_window": None}, "'sliding_window' is missing"),
        ({"sliding_window_pattern": 0}, "'sliding_window_pattern' is 0, it must be from 1"),
        ({"_sliding_window_pattern": "6"}, "'_sliding_window_pattern' is '6', an integer"),
        ({"layer_types": "full_attention"}, "'layer_types' is 'full_attention', a list is needed"),
        ({"layer_types": [FULL, FULL, FULL, "chunked_attention"]}, "has 'chunked_attention' layers; known: full_att"),
        ({"layer_types": [FULL] * 3}, "'layer_types' has 3 entries for 4 layers"),
        ({"layer_types": []}, "'layer_types' has 0 entries for 4 layers"),
    ],
)
def test_wrong_layers_are_named(tmp_path, fields, match):
    refused(tmp_path, match, "Gemma3", **fields)
