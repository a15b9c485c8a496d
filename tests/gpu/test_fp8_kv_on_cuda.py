"""kv_cache_dtype="fp8" through the whole engine on a GPU: the log-probabilities of the CPU's backend, which rounds by
`fp8_rows`. The kernels alone are compared in tests/kernels/test_fp8_kv.py, backends in tests/attention."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from engine import generate, make_core, tokens
from near import logprob_errors
from tiny_llama import save_tiny_llama

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
    return save_tiny_llama(str(tmp_path_factory.mktemp("llama")), num_layers=4, num_heads=8, num_kv_heads=2)


@pytest.fixture(scope="module")
def on_a_cpu(model):
    with make_core(model, **OPTIONS, device="cpu", dtype="float32") as core:
        return generate(core, PROMPTS, GREEDY)


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
        found = logprob_errors(cold, on_a_cpu)
        assert len(found) > 2 * len(PROMPTS)
        assert found.mean() < mean
        assert found.max() < largest
        warm = generate(core, PROMPTS, GREEDY)
        assert core.stats().num_prefix_hit_tokens
        assert logprob_errors(warm, cold).max() < largest


def test_the_same_whatever_the_batch(model):
    """A token's codes depend on nothing beside it: alone and among others it is stored alike."""
    with make_core(model, **OPTIONS, device="cuda", dtype="float32", enable_prefix_caching=False) as core:
        together = tokens(generate(core, PROMPTS, GREEDY))
        alone = [tokens(generate(core, [prompt], GREEDY))[0] for prompt in PROMPTS]
    assert sum(one == other for one, other in zip(together, alone, strict=True)) >= len(PROMPTS) - 1
