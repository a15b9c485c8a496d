"""A seeded request draws the same tokens alone, among 32, after a preemption, with one or two steps in flight, on one
rank or two, by each front end; whatever it asks of the logits."""

from __future__ import annotations

import asyncio
import random

import pytest
from engine import generate, make_core, tokens
from fake_engine import make_model_folder

from ringcore import LLM, AsyncEngine, SamplingParams

pytestmark = pytest.mark.timeout(300)

NUM_REQUESTS, NUM_TOKENS = 32, 16
FILTERS = {
    "none": {},
    "hot": {"temperature": 1.6},
    "top_k": {"temperature": 0.9, "top_k": 20},
    "top_p": {"temperature": 0.8, "top_p": 0.85},
    "min_p": {"temperature": 1.3, "min_p": 0.05},
    "all": {"temperature": 1.1, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": list(range(1, 320, 5)), "ignore_eos": False},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.8, "top_k": 60},
    "bias": {"logit_bias": {7: 4.0, 8: 3.0, 9: -100.0}, "top_p": 0.9},
    "allowed": {"allowed_token_ids": list(range(40, 200, 3))},
    "bad_words": {"logit_bias": {97: 9.0, 98: 9.0, 99: 9.0}, "bad_words": ["ab", "bca", "cc"]},
    "greedy": {"temperature": 0, "frequency_penalty": 0.5},
}
KINDS = [list(FILTERS)[i % len(FILTERS)] for i in range(NUM_REQUESTS)]
OPTIONS = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 128}
BLOCK_BYTES = 16 * 4 * 2 * 2 * 16 * 4  # of the tiny model: tokens, layers, keys and values, heads, head size, float32
ROOMY, NARROW = 400, 30  # blocks; the requests need about 100 at their longest
LATER = [(NARROW, 1, 1), (ROOMY, 2, 1)]


def prompts(vocab_size: int, max_len: int) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(3, vocab_size) for _ in range(3 + 7 * i % (max_len - 2))] for i in range(NUM_REQUESTS)]


def params(max_tokens: int) -> list[SamplingParams]:
    """Every fourth has the seed of the one before."""
    defaults = {"max_tokens": max_tokens, "ignore_eos": True}
    return [
        SamplingParams(**defaults | {"seed": 1000 + i - i % 4 // 3} | FILTERS[kind]) for i, kind in enumerate(KINDS)
    ]


def bad_words(one: SamplingParams) -> list[list[int]]:
    """Of text whose tokens are its bytes: each word as it is, and after a space."""
    return [list(text.encode()) for word in one.bad_words or [] for text in (word, f" {word}")]


TINY_PROMPTS, TINY_PARAMS = prompts(319, 40), params(NUM_TOKENS)


def tiny_options(num_blocks: int, num_ranks: int = 1) -> dict:
    """The same number of blocks on any number of ranks, each of which has its part of the heads."""
    return OPTIONS | {"tensor_parallel_size": num_ranks, "kv_cache_bytes": num_blocks * BLOCK_BYTES // num_ranks}


def shuffled(num: int) -> list[int]:
    return random.Random(5).sample(range(num), num)


@pytest.fixture(scope="module")
def alone(tiny_qwen2) -> list[list[int]]:
    """What each draws where no other is in the engine's steps, nothing is found in the cache and no step goes ahead."""
    options = {"executor": "uniproc", "max_num_seqs": 1, "steps_in_flight": 1, "enable_prefix_caching": False}
    with make_core(tiny_qwen2, **tiny_options(ROOMY), **options) as core:
        drawn = tokens(generate(core, TINY_PROMPTS, TINY_PARAMS, bad_words=bad_words))
    assert len({tuple(one) for one in drawn}) == NUM_REQUESTS
    assert any(len(one) < NUM_TOKENS for one in drawn)  # some end by a stop token
    texts = [bytes(token % 256 for token in drawn[i]) for i, kind in enumerate(KINDS) if kind == "bad_words"]
    assert all(letter in text for letter in b"abc" for text in texts)
    assert not any(word in text for word in (b"ab", b"bca", b"cc") for text in texts)
    return drawn


@pytest.mark.parametrize(
    ("num_blocks", "num_ranks", "depth"),
    [(ROOMY, 1, 2), (NARROW, 2, 2), *(pytest.param(*one, marks=pytest.mark.long_form) for one in LATER)],
)
def test_the_same_tokens_as_alone(tiny_qwen2, alone, num_blocks, num_ranks, depth):
    """The long form has every two of the three in all their combinations."""
    options = tiny_options(num_blocks, num_ranks) | {"executor": "uniproc" if num_ranks == 1 else "multiproc"}
    with make_core(tiny_qwen2, max_num_seqs=NUM_REQUESTS, steps_in_flight=depth, **options) as core:
        order = shuffled(NUM_REQUESTS)
        outputs = generate(core, [TINY_PROMPTS[i] for i in order], [TINY_PARAMS[i] for i in order], bad_words=bad_words)
        assert tokens(outputs) == [alone[i] for i in order]
    was_preempted = any(output.num_preemptions for one in outputs for output in one)
    assert was_preempted == (num_blocks == NARROW)


@pytest.fixture(scope="module")
def front_end_options(tmp_path_factory) -> dict:
    tokenizer = make_model_folder(tmp_path_factory.mktemp("tokenizer"))
    return tiny_options(NARROW) | {"tokenizer": tokenizer, "max_num_seqs": NUM_REQUESTS}


@pytest.mark.long_form
def test_by_the_front_end_that_blocks(tiny_qwen2, alone, front_end_options):
    with LLM(tiny_qwen2, **front_end_options) as llm:
        outputs = llm.generate(TINY_PROMPTS, TINY_PARAMS, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == alone
        several = SamplingParams(n=4, seed=1000, max_tokens=NUM_TOKENS, ignore_eos=True)
        one_by_one = [SamplingParams(seed=1000 + i, max_tokens=NUM_TOKENS, ignore_eos=True) for i in range(4)]
        (together,) = llm.generate([TINY_PROMPTS[0]], several, use_tqdm=False)
        singles = llm.generate([TINY_PROMPTS[0]] * 4, one_by_one, use_tqdm=False)
        assert [one.token_ids for one in together.outputs] == [one.outputs[0].token_ids for one in singles]


async def _streamed(engine: AsyncEngine, number: int, gate: asyncio.Event) -> list[int]:
    await gate.wait()
    async for output in engine.generate(TINY_PROMPTS[number], TINY_PARAMS[number]):
        last = output
    return last.outputs[0].token_ids


def test_by_streams_that_come_one_after_the_other(tiny_qwen2, alone, front_end_options):
    """Half of the streams begin, then those that are left one each time that another has ended."""

    async def stream_all() -> list[list[int]]:
        gates = [asyncio.Event() for _ in TINY_PROMPTS]
        order = shuffled(NUM_REQUESTS)
        waiting = [gates[i] for i in order[NUM_REQUESTS // 2 :]]
        async with AsyncEngine(tiny_qwen2, **front_end_options) as engine, asyncio.TaskGroup() as group:
            tasks = [group.create_task(_streamed(engine, i, gate)) for i, gate in enumerate(gates)]
            for task in tasks:
                task.add_done_callback(lambda _: waiting.pop().set() if waiting else None)
            for i in order[: NUM_REQUESTS // 2]:
                gates[i].set()
        return [task.result() for task in tasks]

    assert asyncio.run(asyncio.wait_for(stream_all(), 120)) == alone


@pytest.mark.long_form
@pytest.mark.real_model
def test_a_real_model_draws_the_same_among_others(smollm2):
    """Four of them alone, then among all 32 in a cache so small that some are computed twice."""
    real_prompts, real_params = prompts(49_000, 12), params(6)
    chosen = [list(FILTERS).index(name) for name in ("none", "all", "penalties", "bad_words")]
    options = OPTIONS | {"kv_cache_bytes": 16 << 20, "max_num_seqs": NUM_REQUESTS, "block_size": 4}
    with make_core(smollm2, executor="uniproc", **options) as core:
        drawn = [tokens(generate(core, [real_prompts[i]], real_params[i], bad_words=bad_words))[0] for i in chosen]
        core.reset_prefix_cache()
        outputs = generate(core, real_prompts, real_params, bad_words=bad_words)
        assert [tokens(outputs)[i] for i in chosen] == drawn
    assert any(output.num_preemptions for one in outputs for output in one)
