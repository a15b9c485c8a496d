"""Models without a class here on a GPU, in CUDA graphs and float32: the tokens of transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from against_transformers import assert_equal, refusal
from engine import make_core
from transformers_models import MODELS, saved

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


@pytest.mark.types(*MODELS)
def test_tokens_are_those_of_transformers_whole_and_in_chunks_cold_and_warm(model_type, tmp_path, all_types, note):
    if all_types and (reason := refusal(model_type, tmp_path, enforce_eager=True, **OPTIONS)):
        note(refused=reason)
        pytest.skip("refused")
    model = saved(model_type, tmp_path)
    note(one_rank="failed", error=None, control=None)
    for max_num_batched_tokens in (16, 96):
        with make_core(model.path, max_num_batched_tokens=max_num_batched_tokens, **OPTIONS) as core:
            facts = assert_equal(model, core)
    note(one_rank="equal", **facts)
