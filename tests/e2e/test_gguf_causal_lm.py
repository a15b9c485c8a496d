"""GGUF files of models that transformers computes, through the whole engine in float32."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine import generate, make_core, tokens
from gguf_models import loaded_by_transformers, write_gguf
from reference import differences
from test_any_causal_lm import GREEDY, OPTIONS
from transformers_models import NEW_TOKENS, PROMPTS, continued, random_model, write_config

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.errors import InvalidRequestError
from ringcore.families import FAMILIES

_EXPERTS = {"num_experts_per_tok": 2}
# general.architecture: (model_type, what differs from the tiny configuration of `transformers_models`).
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "phi3": (
        "phi3",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 4096,
        },
    ),
    "starcoder2": ("starcoder2", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),  # of heads of 16, as GGML has it
    "gpt2": ("gpt2", {"n_inner": 96}),
    "qwen2moe": ("qwen2_moe", {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "minimax-m2": ("minimax_m2", {**_EXPERTS, "num_local_experts": 4, "head_dim": 16, "intermediate_size": 32}),
    "gpt-oss": ("gpt_oss", {}),
}


# transformers maps the fields of gpt-oss, but reads other tensors than its files have.
UNREAD_BY_TRANSFORMERS = ("gpt-oss",)
# Fields of a configuration that say nothing of what is computed.
INCIDENTAL = ("architectures", "dtype", "_name_or_path", "transformers_version", "pad_token_id", "eos_token_id")


def random_file(folder, architecture: str, kind: str = "F32") -> tuple[str, Any]:
    model_type, changes = ARCHITECTURES[architecture]
    model = random_model(write_config(model_type, folder / "configuration", **changes))
    return write_gguf(folder, architecture, model, kind), model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_configuration_and_tokens_are_those_of_transformers(architecture, tmp_path):
    is_read = architecture not in UNREAD_BY_TRANSFORMERS
    path, model = random_file(tmp_path, architecture, "Q8_0" if is_read else "F32")
    spec = read_model_spec(find_model(path), FAMILIES, "transformers")
    kind, theirs = type(model.config), model.config.to_dict()
    ours = kind.from_dict(json.loads(spec.config)).to_dict()
    fields = {*kind().to_dict()} - {*INCIDENTAL}
    assert {field: (ours[field], theirs[field]) for field in fields if ours[field] != theirs[field]} == {}
    model = loaded_by_transformers(path, model) if is_read else model
    entries = [continued(model, prompt) for prompt in PROMPTS]
    assert sum(entry.num_decisive for entry in entries) > 0.8 * NEW_TOKENS * len(PROMPTS)
    with make_core(path, steps_in_flight=2, **OPTIONS) as core:
        for _ in range(2):  # the prefix cache is cold, then warm
            assert differences(entries, tokens(generate(core, PROMPTS, GREEDY))) == []


def test_awake_again_and_updated_by_the_names_of_the_folder(tmp_path):
    """The file holds fewer bits than the folder, so the two answer differently."""
    path, model = random_file(tmp_path, "qwen3moe", "Q4_0")
    exact = [continued(model, prompt) for prompt in PROMPTS]
    entries = [continued(loaded_by_transformers(path, model), prompt) for prompt in PROMPTS]
    with make_core(path, enable_sleep_mode=True, gguf_weights="expanded", **OPTIONS) as core:
        core.sleep()
        core.wake_up()
        assert differences(entries, tokens(generate(core, PROMPTS, GREEDY))) == []
        core.reload_weights(str(tmp_path))
        assert differences(exact, tokens(generate(core, PROMPTS, GREEDY))) == []
    assert differences(exact, [entry.token_ids for entry in entries]) != []


def test_packed_experts_awake_again_and_updated_by_a_file_of_the_same_types(tmp_path):
    path, model = random_file(tmp_path, "qwen3moe", "Q4_0")
    entries = [continued(loaded_by_transformers(path, model), prompt) for prompt in PROMPTS]
    other = random_model(write_config("qwen3_moe", tmp_path / "other", norm_topk_prob=True), seed=3)
    new = write_gguf(tmp_path / "new", "qwen3moe", other, "Q4_0")
    updated = [continued(loaded_by_transformers(new, other), prompt) for prompt in PROMPTS]
    with make_core(path, enable_sleep_mode=True, gguf_weights="packed", **OPTIONS) as core:
        core.sleep()
        core.wake_up()
        assert differences(entries, tokens(generate(core, PROMPTS, GREEDY))) == []
        with pytest.raises(InvalidRequestError, match="is held as Q4_0 of a GGUF file, and comes as numbers"):
            core.reload_weights(str(tmp_path))
        core.reload_weights(new)
        assert differences(updated, tokens(generate(core, PROMPTS, GREEDY))) == []


def test_random_weights_are_those_of_the_folder(tmp_path):
    path, _ = random_file(tmp_path, "qwen2moe")
    found = []
    for model in (path, str(tmp_path)):
        with make_core(model, load_format="dummy", **OPTIONS | {"model_impl": "auto"}) as core:
            found.append(tokens(generate(core, PROMPTS, GREEDY)))
    assert found[0] == found[1]
    assert len({tuple(one) for one in found[0]}) > 1
