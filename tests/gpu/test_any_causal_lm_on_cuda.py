"""Models without a class here on a GPU, in CUDA graphs and float32: the tokens of transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from engine import generate, make_core, tokens
from reference import differences
from transformers_models import MODELS, NEW_TOKENS, PROMPTS, saved

from ringcore import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
OPTIONS = {
    "device": "cuda",
    "dtype": "float32",
    "model_impl": "transformers",
    "executor": "uniproc",
    "steps_in_flight": 2,
    "max_model_len": 96,
    "kv_cache_bytes": 1 << 24,
    "max_num_seqs": 16,
}


@pytest.mark.parametrize("model_type", MODELS)
def test_tokens_are_those_of_transformers_whole_and_in_chunks_cold_and_warm(model_type, tmp_path):
    path, entries = saved(model_type, tmp_path)
    for max_num_batched_tokens in (16, 96):
        with make_core(path, max_num_batched_tokens=max_num_batched_tokens, **OPTIONS) as core:
            assert differences(entries, tokens(generate(core, PROMPTS, GREEDY))) == [], "cold"
            assert differences(entries, tokens(generate(core, PROMPTS, GREEDY))) == [], "warm"
