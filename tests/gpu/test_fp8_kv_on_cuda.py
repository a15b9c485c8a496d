"""kv_cache_dtype="fp8" through the whole engine on a GPU: the log-probabilities of the CPU's backend, which rounds by
`fp8_rows`. The kernels alone are compared in tests/kernels/test_fp8_kv.py, backends in tests/attention."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from engine import generate, make_core, tokens

from ringcore import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
PROMPTS = [[3 + (7 * i + j * j + j // 5) % 300 for j in range(n)] for i, n in enumerate([1, 17, 64, 200, 333, 900])]
OPTIONS: dict[str, Any] = {
    "executor": "uniproc",
    "max_model_len": 1024,
    "kv_cache_bytes": 1 << 26,
    "kv_cache_dtype": "fp8",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("llama"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def on_a_cpu(model):
    with make_core(model, **OPTIONS, device="cpu", dtype="float32") as core:
        return generate(core, PROMPTS, GREEDY)


def errors(outputs, expected) -> np.ndarray:
    """Of the log-probabilities of the tokens that both chose, up to the first other one."""
    found = []
    for got, wanted in zip(outputs, expected, strict=True):
        for one, other in zip(got, wanted, strict=True):
            found.append(abs(one.logprobs[0].logprobs[0] - other.logprobs[0].logprobs[0]))
            if one.new_token_ids != other.new_token_ids:
                break
    return np.array(found)


@pytest.mark.parametrize(
    ("options", "mean", "largest"),
    [
        # Sums in another order, after which some number is rounded to the next code: 0.0035 on an H200.
        ({"dtype": "float32"}, 6e-3, 0.1),
        ({"dtype": "float32", "long_prefill_token_threshold": 50}, 6e-3, 0.1),
        ({"dtype": "float32", "enforce_eager": True, "steps_in_flight": 1}, 6e-3, 0.1),
        # Random weights: a CPU in bfloat16 is 0.12 away.
        ({"dtype": "bfloat16"}, 0.3, 2.0),
        ({"dtype": "bfloat16", "enable_sleep_mode": True}, 0.3, 2.0),
    ],
    ids=str,
)
def test_log_probabilities_are_those_of_the_cpu(model, on_a_cpu, options, mean, largest):
    with make_core(model, **OPTIONS | options, device="cuda") as core:
        if core.config.device.enable_sleep_mode:
            core.sleep()
            core.wake_up()
        cold = generate(core, PROMPTS, GREEDY)
        found = errors(cold, on_a_cpu)
        assert len(found) > 3 * len(PROMPTS)
        assert found.mean() < mean
        assert found.max() < largest
        warm = generate(core, PROMPTS, GREEDY)
        assert core.stats().num_prefix_hit_tokens
        assert errors(warm, cold).max() < largest


def test_the_same_whatever_the_batch(model):
    """A token's codes depend on nothing beside it: alone and among others it is stored alike."""
    with make_core(model, **OPTIONS, device="cuda", dtype="float32", enable_prefix_caching=False) as core:
        together = tokens(generate(core, PROMPTS, GREEDY))
        alone = [tokens(generate(core, [prompt], GREEDY))[0] for prompt in PROMPTS]
    assert sum(one == other for one, other in zip(together, alone, strict=True)) >= len(PROMPTS) - 1
