"""Qwen2.5-Coder-0.5B on a GPU (biases, an untied head, 14 heads over 2 KV heads), where its folder is given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from engine import generate, make_core, tokens
from near import assert_near
from reference import differences, load

from ringcore import SamplingParams

pytestmark = [pytest.mark.opt_in_model, pytest.mark.timeout(300)]

OPTIONS = {"device": "cuda", "max_model_len": 2048, "kv_cache_bytes": 1 << 30}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
LENGTHS = load("qwen2.5-coder-0.5b-lengths")
SHORT = [entry for entry in LENGTHS if len(entry.prompt_token_ids) <= 130]


def check(engine, entries):
    outputs = generate(engine, [entry.prompt_token_ids for entry in entries], GREEDY)
    assert differences(entries, tokens(outputs)) == []


def test_prompts_of_1_to_1500_tokens(qwen2):
    with make_core(qwen2, dtype="float32", **OPTIONS) as engine:
        for _ in range(2):  # the prefix cache is cold, then warm
            check(engine, LENGTHS)


def test_chunks_and_preemption(qwen2):
    options = OPTIONS | {"max_model_len": 192, "max_num_batched_tokens": 64, "num_blocks_override": 30}
    with make_core(qwen2, dtype="float32", **options) as engine:
        check(engine, SHORT)
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("size", [2])
def test_ranks(qwen2, size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"this machine has fewer than {size} GPUs")
    with make_core(qwen2, dtype="float32", executor="multiproc", tensor_parallel_size=size, **OPTIONS) as engine:
        check(engine, LENGTHS)


def test_bfloat16_is_near_the_reference(qwen2):
    """In the mean below 0.01, where transformers 5.23 itself has 0.0161 in bfloat16 with the same entries, and within
    its quantiles, 0.0474 and 0.0947. In a simulation of every rounding, done in six ways, these are 0.0084 to 0.0090,
    0.028 to 0.033 and 0.049 to 0.062, and 0.0073, 0.026 and 0.054 if nothing but queries and keys is rounded, as they
    stand in the cache: their biases make them large.
    """
    with make_core(qwen2, dtype="bfloat16", **OPTIONS) as engine:
        outputs = generate(engine, [entry.prompt_token_ids for entry in SHORT], GREEDY)
    assert_near(SHORT, outputs, mean=0.01, p95=0.0474, p99=0.0947)
