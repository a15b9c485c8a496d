"""SmolLM2-135M through the whole engine in float32: the tokens of transformers, whatever the engine's shape."""

from __future__ import annotations

import pytest
from engine import generate, make_core, tokens
from reference import differences, load

from ringcore import SamplingParams

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]

OPTIONS = {"dtype": "float32", "max_model_len": 2048, "kv_cache_bytes": 1 << 30}
NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)

ENTRIES = load("smollm2-135m-lengths")
SHORT = [entry for entry in ENTRIES if len(entry.prompt_token_ids) <= 300]
# At the edges of blocks and of budgets, up to one more than two budgets of 64.
AT_EDGES = [e for e in SHORT if len(e.prompt_token_ids) % 16 in (15, 0, 1) and len(e.prompt_token_ids) <= 129]
SHORT_FORM = (1, 2, 7, 15, 16, 17, 31, 33, 64, 65, 150)


def check(core, entries, **kwargs):
    outputs = generate(core, [entry.prompt_token_ids for entry in entries], GREEDY, **kwargs)
    assert differences(entries, tokens(outputs)) == []
    return outputs


@pytest.fixture(scope="module")
def core(smollm2):
    with make_core(smollm2, executor="uniproc", **OPTIONS) as engine:
        yield engine


def test_prompts_of_many_lengths(core, is_long):
    """All at once, so that each is among many others; and their log-probabilities, to a thousandth."""
    # Most of the time is for the longest ones, of which the short form takes one.
    entries = [entry for entry in ENTRIES if is_long or len(entry.prompt_token_ids) in SHORT_FORM]
    assert len(entries) == (len(ENTRIES) if is_long else len(SHORT_FORM))
    outputs = check(core, entries)
    for entry, one in zip(entries, outputs, strict=True):
        got = [row.logprobs[0] for output in one for row in output.logprobs]
        n = entry.num_decisive
        assert got[:n] == pytest.approx(entry.logprobs[:n], abs=1e-3)


@pytest.mark.long_form
def test_each_prompt_alone(core):
    for entry in SHORT[::8]:
        check(core, [entry], salt="alone")


def test_prefix_cache_cold_then_warm(core, is_long):
    entries = AT_EDGES if is_long else AT_EDGES[:7]
    check(core, entries, salt="warm")
    outputs = check(core, entries, salt="warm")
    for entry, one in zip(entries, outputs, strict=True):
        prompt = len(entry.prompt_token_ids)
        assert one[-1].num_cached_tokens == min(prompt // 16 * 16, prompt - 1)


# Of tiny models, chunks and preemptions are in `test_any_causal_lm` and `test_sliding_window_models`, every time.


@pytest.mark.long_form
@pytest.mark.parametrize("budget", [16, 64])
def test_chunked_prefill(smollm2, budget):
    options = OPTIONS | {"max_num_batched_tokens": budget, "enable_prefix_caching": False}
    with make_core(smollm2, executor="uniproc", **options) as core:
        check(core, AT_EDGES[:: 2 if budget == 16 else 1])


@pytest.mark.long_form
def test_preemption_in_a_small_pool(smollm2):
    """With two steps in flight; with one, `test_seeded_sampling` has it."""
    entries = [entry for entry in SHORT if len(entry.prompt_token_ids) <= 100]
    options = OPTIONS | {"max_model_len": 160, "block_size": 8, "num_blocks_override": 42, "steps_in_flight": 2}
    with make_core(smollm2, executor="uniproc", **options) as core:
        outputs = check(core, entries)
    assert sum(one[-1].num_preemptions for one in outputs) > 0


@pytest.mark.long_form
def test_depth_one_and_other_block_size(smollm2):
    options = OPTIONS | {"steps_in_flight": 1, "block_size": 32, "enable_prefix_caching": False}
    with make_core(smollm2, executor="uniproc", **options) as core:
        check(core, AT_EDGES)
