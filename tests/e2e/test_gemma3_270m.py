"""Gemma-3-270m from its GGUF file, where that is given: by the native class and by transformers' modules."""

from __future__ import annotations

import pytest
from engine import generate, make_core, tokens
from reference import differences, load

from ringcore import SamplingParams

pytestmark = [pytest.mark.opt_in_model, pytest.mark.timeout(900)]


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_prompts_of_up_to_two_windows(gemma3_gguf, model_impl):
    entries = load("gemma-3-270m")
    options = {"dtype": "float32", "max_model_len": 2048, "kv_cache_bytes": 1 << 29, "model_impl": model_impl}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with make_core(gemma3_gguf, executor="uniproc", **options) as core:
        for _ in range(2):  # the prefix cache is cold, then warm
            outputs = generate(core, [entry.prompt_token_ids for entry in entries], params)
            assert differences(entries, tokens(outputs)) == []
