"""kv_cache_dtype="fp8" through the whole engine, on a CPU: the tokens of transformers with a cache of rounded keys and
values, the same however a prompt is cut into steps, found in the prefix cache, preempted, stored or split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine import generate, make_core, tokens
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig, MistralForCausalLM

from ringcore import SamplingParams
from ringcore.errors import ConfigError
from ringcore.kernels.attention.fp8_rows import rounded

NEW_TOKENS = 12
PROMPTS = [[3 + (7 * i + j * j + j // 5) % 300 for j in range(n)] for i, n in enumerate([1, 9, 40, 64, 90])]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "executor": "uniproc",
    "max_model_len": 128,
    "block_size": 4,
    "kv_cache_bytes": 1 << 22,
    "kv_cache_dtype": "fp8",
}
# A number within rounding of a boundary between two codes may fall on either side of it.
MAX_ERROR, MIN_LOSS = 0.02, 0.05


class RoundedCache(DynamicCache):
    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("mistral"))
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        sliding_window=24,
        initializer_range=0.2,
    )
    MistralForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cold(model):
    """Every prompt computed in one step."""
    with make_core(model, **OPTIONS, enable_prefix_caching=False) as core:
        return generate(core, PROMPTS, GREEDY)


def logprobs(outputs) -> list[list[float]]:
    return [[one.logprobs[0] for output in each for one in output.logprobs] for each in outputs]


@torch.no_grad()
def test_tokens_have_the_probabilities_of_a_rounded_cache(model, cold):
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    errors, losses = [], []
    for prompt, own, found in zip(PROMPTS, tokens(cold), logprobs(cold), strict=True):
        ids = torch.tensor([[*prompt, *own[:-1]]])
        for cache, differences in ((RoundedCache(), errors), (DynamicCache(), losses)):
            logits = theirs(input_ids=ids, past_key_values=cache).logits[0, len(prompt) - 1 :]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(own)[:, None])[:, 0]
            differences.append((expected - torch.tensor(found)).abs().max().item())
    assert max(errors) < MAX_ERROR
    assert max(losses) > MIN_LOSS, "rounding would not be seen"


@pytest.mark.parametrize(
    "options",
    [
        {"long_prefill_token_threshold": 7},
        {"max_num_batched_tokens": 16, "steps_in_flight": 1},
        {"num_blocks_override": 40, "max_num_seqs": 3},  # too few for all: they are preempted, and computed again
        {"num_blocks_override": 40, "host_kv_cache_bytes": 1 << 20},
        {"enable_sleep_mode": True},
        pytest.param({"tensor_parallel_size": 2, "executor": "multiproc"}, marks=pytest.mark.long_form),
        pytest.param({"pipeline_parallel_size": 3, "executor": "multiproc"}, marks=pytest.mark.long_form),
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_token_sees_the_same_however_it_is_computed(model, cold, options):
    with make_core(model, **OPTIONS | options) as core:
        if core.config.device.enable_sleep_mode:
            core.sleep()
            core.wake_up()
        for _ in range(2):
            assert_same(generate(core, PROMPTS, GREEDY), cold)
        assert core.stats().num_prefix_hit_tokens


def assert_same(outputs, expected) -> None:
    """Sums are in another order, so what is rounded may be too."""
    assert tokens(outputs) == tokens(expected)
    for got, wanted in zip(logprobs(outputs), logprobs(expected), strict=True):
        assert max(abs(one - other) for one, other in zip(got, wanted, strict=True)) < MAX_ERROR


def test_blocks_in_a_directory_are_of_one_dtype(model, cold, tmp_path):
    options = OPTIONS | {"host_kv_cache_bytes": 1 << 20, "host_kv_cache_dir": str(tmp_path), "num_blocks_override": 40}
    for dtype, finds in (("auto", False), ("fp8", False), ("fp8", True)):
        with make_core(model, **options | {"kv_cache_dtype": dtype}) as core:
            outputs = [generate(core, [prompt], GREEDY)[0] for prompt in PROMPTS]
            assert bool(core.step_metrics().stored_kv.num_hit_tokens) == finds
        if dtype == "fp8":
            assert_same(outputs, cold)


def test_twice_the_tokens_of_16_bits(model):
    """Of heads of 16 numbers 17 bytes each; of 128, which models have, 129."""
    capacities = []
    for options in ({"dtype": "bfloat16", "kv_cache_dtype": "auto"}, {"dtype": "bfloat16"}):
        with make_core(model, **OPTIONS | options | {"max_model_len": 16}) as core:
            capacities.append(core.ready.num_blocks)
    assert capacities[1] / capacities[0] == pytest.approx(32 / 17, rel=0.01)


def test_latents_have_none(tmp_path):
    from transformers_models import write_config

    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp8': layers\.0\.attention caches latents"):
        make_core(write_config("deepseek_v3", tmp_path / "m"), **OPTIONS | {"load_format": "dummy"})
