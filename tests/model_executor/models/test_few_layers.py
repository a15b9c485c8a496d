"""Few layers of a model, of every kind that its configuration names in whatever way."""

from __future__ import annotations

from typing import Any

import pytest

from ringcore.checkpoint import TransformersSpec
from ringcore.model_executor.models import few_layers
from ringcore.model_executor.models.transformers.known_types import default_configuration, spec_of

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8}
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"] * 2


def few_of(model_type: str, **fields: Any) -> TransformersSpec:
    spec = few_layers(spec_of(default_configuration(model_type) | SMALL | fields))
    assert isinstance(spec, TransformersSpec)
    return spec


@pytest.mark.parametrize(
    ("model_type", "fields", "num_layers"),
    [
        ("llama", {}, 1),
        ("olmo3", {"layer_types": WINDOWS}, 3),
        ("smollm3", {"layer_types": ["full_attention"] * 8, "no_rope_layers": [1, 1, 1, 0] * 2}, 4),
        ("ernie4_5_moe", {"moe_layer_start_index": 2}, 3),
        ("ernie4_5_moe", {"moe_layer_start_index": 1, "moe_layer_interval": 3}, 3),
        ("deepseek_v3", {"first_k_dense_replace": 3}, 4),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6}, 3),
        ("qwen3_moe", {"decoder_sparse_step": 4, "mlp_only_layers": []}, 4),
        ("qwen3_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [5]}, 6),
    ],
)
def test_the_first_layers_have_one_of_every_kind(model_type, fields, num_layers):
    assert few_of(model_type, **fields).num_layers == num_layers


def test_layers_that_are_others_in_a_smaller_model_are_not_cut():
    """The last layer of this type has a bias: one of its first layers alone would be another kind."""
    assert few_of("gpt_neox_japanese").num_layers == SMALL["num_hidden_layers"]


def test_a_model_that_cannot_be_built_stays_as_it_is():
    spec = spec_of(default_configuration("llama") | SMALL | {"hidden_act": "none such"})
    assert few_layers(spec) == spec
