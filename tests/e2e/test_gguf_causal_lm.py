"""GGUF files of models that transformers computes, through the whole engine in float32."""

from __future__ import annotations

import json

import pytest
from engine import generate, make_core, tokens
from gguf_models import ARCHITECTURES, loaded_by_transformers, write
from reference import differences
from test_any_causal_lm import GREEDY, OPTIONS
from transformers_models import NEW_TOKENS, PROMPTS, continued

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.families import FAMILIES

# transformers maps the fields of gpt-oss, but reads other tensors than its files have.
UNREAD_BY_TRANSFORMERS = ("gpt-oss",)
# Fields of a configuration that say nothing of what is computed.
INCIDENTAL = ("architectures", "dtype", "transformers_version", "pad_token_id", "eos_token_id", "feed_forward_length")


def check_tokens(path: str, model, **options) -> None:
    entries = [continued(model, prompt) for prompt in PROMPTS]
    assert sum(entry.num_decisive for entry in entries) > 0.8 * NEW_TOKENS * len(PROMPTS)
    with make_core(path, steps_in_flight=2, **OPTIONS | options) as core:
        for _ in range(2):  # the prefix cache is cold, then warm
            assert differences(entries, tokens(generate(core, PROMPTS, GREEDY))) == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_configuration_and_tokens_are_those_of_transformers(architecture, tmp_path):
    is_read = architecture not in UNREAD_BY_TRANSFORMERS
    path, model = write(tmp_path, architecture, "Q8_0" if is_read else "F32")
    spec = read_model_spec(find_model(path), FAMILIES, "transformers")
    ours = type(model.config).from_dict(json.loads(spec.config)).to_dict()
    theirs = model.config.to_dict()
    fields = {*ours, *theirs} - {*INCIDENTAL}
    assert {name: (ours.get(name), theirs[name]) for name in fields & {*theirs} if ours.get(name) != theirs[name]} == {}
    model = loaded_by_transformers(path, model) if is_read else model
    check_tokens(path, model, executor="uniproc")


def test_each_rank_reads_its_slices(tmp_path):
    path, model = write(tmp_path, "qwen3moe", "Q8_0")
    check_tokens(path, loaded_by_transformers(path, model), tensor_parallel_size=2)


def test_random_weights_are_those_of_the_folder(tmp_path):
    path, _ = write(tmp_path, "qwen2moe")
    found = []
    for model in (path, str(tmp_path / "qwen2moe")):
        with make_core(model, executor="uniproc", load_format="dummy", **OPTIONS | {"model_impl": "auto"}) as core:
            found.append(tokens(generate(core, PROMPTS, GREEDY)))
    assert found[0] == found[1]
    assert len({tuple(one) for one in found[0]}) > 1
