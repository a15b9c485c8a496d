"""Qwen2.5-Coder-0.5B (biases, an untied head, heads that two ranks divide), where its folder is given."""

from __future__ import annotations

import pytest
from engine import generate, make_core, tokens
from reference import differences, load

from ringcore import SamplingParams

pytestmark = [pytest.mark.opt_in_model, pytest.mark.timeout(900)]

OPTIONS = {"dtype": "float32", "max_model_len": 2048, "kv_cache_bytes": 1 << 29}
LENGTHS = load("qwen2.5-coder-0.5b-lengths")
SHORT = [entry for entry in LENGTHS if len(entry.prompt_token_ids) <= 130][::2]

SHAPES = {
    "whole": ({}, LENGTHS),
    "two ranks": ({"tensor_parallel_size": 2}, LENGTHS),
    "budget 16": ({"max_num_batched_tokens": 16}, SHORT),
    "budget 64, depth 1": ({"max_num_batched_tokens": 64, "steps_in_flight": 1}, LENGTHS[:30]),
    "small pool": ({"max_model_len": 192, "block_size": 8, "num_blocks_override": 50}, SHORT),
    "transformers' modules": ({"model_impl": "transformers"}, LENGTHS),
    "uniproc": ({"executor": "uniproc", "block_size": 64}, SHORT),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_of_1_to_1500_tokens(qwen2, shape):
    options, entries = SHAPES[shape]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    with make_core(qwen2, **(OPTIONS | options)) as core:
        for _ in range(2):  # the prefix cache is cold, then warm
            outputs = generate(core, [entry.prompt_token_ids for entry in entries], params)
            assert differences(entries, tokens(outputs)) == []
            for entry, one in zip(entries, outputs, strict=True):
                got = [row.logprobs[0] for output in one for row in output.logprobs]
                n = entry.num_decisive
                assert got[:n] == pytest.approx(entry.logprobs[:n], abs=1e-3)
    if shape == "small pool":
        assert sum(one[-1].num_preemptions for one in outputs) > 0


@pytest.mark.parametrize("size", [1, 2])
def test_the_reference_prompts(qwen2, size):
    entries = load("qwen2.5-coder-0.5b")
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with make_core(qwen2, tensor_parallel_size=size, **OPTIONS) as core:
        outputs = generate(core, [entry.prompt_token_ids for entry in entries], params)
    assert differences(entries, tokens(outputs)) == []
