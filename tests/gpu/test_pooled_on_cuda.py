"""Pooled prompts on a GPU: the hidden states of transformers, whole and in chunks, beside prompts that decode."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from engine import generate, make_core
from transformers_models import saved

from ringcore import SamplingParams

PROMPTS = [[5 + (7 * i + j) % 50 for j in range(length)] for i, length in enumerate((1, 2, 17, 40, 63))]


def hidden_states(path: Path, prompt: list[int]) -> np.ndarray:
    from transformers import AutoModel

    with torch.no_grad():
        return AutoModel.from_pretrained(path).eval()(torch.tensor([prompt])).last_hidden_state[0].numpy()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return saved("qwen3", tmp_path_factory.mktemp("models")).path


@pytest.mark.parametrize("max_num_batched_tokens", [16, 256])
def test_pooled_prompts_are_the_hidden_states_of_transformers(path, max_num_batched_tokens):
    expected = [hidden_states(path, prompt) for prompt in PROMPTS]
    pooled = [SamplingParams(pooling=pooling, max_tokens=2) for pooling in ("last", "mean") for _ in PROMPTS]
    params = pooled + [SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)] * len(PROMPTS)
    options = {"device": "cuda", "dtype": "float32", "max_model_len": 96, "kv_cache_bytes": 1 << 24}
    with make_core(path, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=8, **options) as core:
        for _ in range(2):  # the second time with cached blocks
            outputs = generate(core, PROMPTS * 3, params)
            values = [one.pooled.values for of_prompt in outputs for one in of_prompt if one.pooled is not None]
            wanted = [states[-1] for states in expected] + [states.mean(0) for states in expected]
            for got, want in zip(values, wanted, strict=True):
                assert np.asarray(got) == pytest.approx(want, abs=2e-4)
