"""Engines with random options and random events give what each request gets alone in a plain one.

Requests ask for all that a sampler can do; the engines chunk, preempt, draft, cache prefixes on the device and in host
memory, launch two steps, sleep between steps, and lose requests and caches in the middle. Tokens are equal in float32.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from engine import make_core
from random_schedules import got
from transformers_models import VOCABULARY, saved

from ringcore import EngineCore, SamplingParams
from ringcore.protocol.requests import EngineCoreOutput, EngineCoreRequest

# Native, with windows, whole experts, and latents: a window and a chunk are cached beside full attention.
MODELS = ("llama", "gemma3_text", "qwen3_moe", "deepseek_v3")
NATIVE = ("llama", "gemma3_text", "qwen3_moe")
PLAIN: dict[str, Any] = {"executor": "uniproc", "device": "cpu", "dtype": "float32", "max_model_len": 128}
NUM_RUNS, NUM_LONG_RUNS = 4, 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root, folders = tmp_path_factory.mktemp("models"), {}

    def find(model_type: str) -> str:
        if model_type not in folders:
            folders[model_type] = saved(model_type, root).path
        return folders[model_type]

    return find


def token(draw: random.Random) -> int:
    return draw.randrange(3, VOCABULARY)


def random_requests(draw: random.Random, count: int) -> list[EngineCoreRequest]:
    shared = [token(draw) for _ in range(60)]
    requests = []
    for i in range(count):
        own = [token(draw) for _ in range(draw.choice((1, 2, 5, 16, 17, 31)))]
        if draw.random() < 0.3:  # something to draft from
            own = (own[:4] * 8)[:30]
        prompt = shared[: draw.choice((0, 0, 7, 16, 37, 60))] + own
        has_bad_words = draw.random() < 0.2
        bad_words = [[token(draw) for _ in range(draw.choice((1, 2)))] for _ in range(4)] if has_bad_words else []
        salt = draw.choice((None, None, "a", "b"))
        requests.append(EngineCoreRequest(str(i), prompt, random_params(draw), 0.0, draw.randrange(3), salt, bad_words))
    return requests


def random_params(draw: random.Random) -> SamplingParams:
    def sometimes(probability: float, value: Any) -> Any:
        return value if draw.random() < probability else None

    max_tokens = draw.randint(1, 20)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=sometimes(0.2, draw.randint(0, max_tokens)) or 0,
        ignore_eos=draw.random() < 0.5,
        stop_token_ids=sometimes(0.2, [token(draw) for _ in range(30)]),
        temperature=draw.choice((0.0, 0.0, 0.0, 0.3, 0.9, 2.0)),
        seed=draw.randrange(-5, 1 << 20),
        top_p=draw.choice((1.0, 0.9, 0.5)),
        top_k=draw.choice((0, 0, 3, 50)),
        min_p=draw.choice((0.0, 0.0, 0.05)),
        presence_penalty=draw.choice((0.0, 0.0, 0.9)),
        frequency_penalty=draw.choice((0.0, 0.0, 0.6)),
        repetition_penalty=draw.choice((1.0, 1.0, 1.4)),
        logit_bias=sometimes(0.2, {token(draw): draw.choice((-100.0, 5.0, 100.0)) for _ in range(3)}),
        allowed_token_ids=sometimes(0.15, sorted({token(draw) for _ in range(9)})),
        logprobs=draw.choice((None, 0, 2)),
        prompt_logprobs=sometimes(0.15, 2),
        detokenize=False,
    )


def random_options(draw: random.Random, is_native: bool) -> dict[str, Any]:
    block_size = draw.choice((4, 4, 8, 16))
    max_num_batched_tokens = draw.choice((5, 17, 64, 256))
    options = {
        "block_size": block_size,
        # At the least those of one request in two kinds of cache: others are preempted.
        "num_blocks_override": {4: 68, 8: 36, 16: 20}[block_size] + draw.choice((0, 0, 40, 300)),
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": min(max_num_batched_tokens, draw.choice((2, 5, 16))),
        "steps_in_flight": draw.choice((1, 2)),
        "enable_prefix_caching": draw.random() < 0.8,
        "scheduling_policy": draw.choice(("fcfs", "priority")),
        "max_skip_ahead": draw.choice((0, 16)),
        "long_prefill_token_threshold": draw.choice((None, None, 3, 16)),
        "speculative": draw.choice((None, {"method": "suffix"})),
        "enable_sleep_mode": draw.random() < 0.3,
        "deterministic": is_native and draw.random() < 0.2,
    }
    options["preempt_lower_priority"] = options["scheduling_policy"] == "priority" and draw.random() < 0.5
    if options["enable_prefix_caching"]:
        options["host_kv_cache_bytes"] = draw.choice((None, None, 1 << 16, 1 << 22))
    return options


def disturb(core: EngineCore, draw: random.Random, running: list[str]) -> list[EngineCoreOutput]:
    """Now and then: loses a request, or the prefix cache, or sleeps for a moment. -> the outputs of what it aborted."""
    match draw.randrange(60):
        case 0 | 1 if running:
            return core.abort([draw.choice(running)])
        case 2:
            core.reset_prefix_cache(draw.random() < 0.5)
        case 3 if core.config.device.enable_sleep_mode:
            core.sleep(mode=draw.choice(("keep", "wait")))
            core.wake_up()
    return []


def run(
    core: EngineCore, requests: list[EngineCoreRequest], draw: random.Random | None = None
) -> dict[str, list[EngineCoreOutput]]:
    """The outputs of each request: one after another, or by `draw` at random times and disturbed."""
    found, waiting = defaultdict(list), list(requests)
    if draw is not None:
        draw.shuffle(waiting)
    while waiting or core.has_unfinished:
        count = min(len(waiting), draw.choice((0, 1, 2, 8))) if draw else 0 if core.has_unfinished else 1
        for _ in range(count):
            core.add_request(waiting.pop(0))
        outputs = disturb(core, draw, [request.request_id for request in requests]) if draw else []
        if core.has_unfinished:
            outputs += core.step().outputs
        for output in outputs:
            found[output.request_id].append(output)
    return found


def assert_equal(found: list[EngineCoreOutput], expected: list[EngineCoreOutput]) -> None:
    tokens, logprobs, of_prompt = got(found)
    all_tokens, all_logprobs, of_whole_prompt = got(expected)
    if found[-1].finish_reason == "abort":
        assert tokens == all_tokens[: len(tokens)]
        return
    assert tokens == all_tokens
    ends = [(one[-1].finish_reason, one[-1].stop_reason, one[-1].error) for one in (found, expected)]
    assert ends[0] == ends[1]
    assert [entry.token_ids[0] for entry in logprobs] == [entry.token_ids[0] for entry in all_logprobs]
    for entry, other in zip(logprobs, all_logprobs, strict=True):
        assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    for (ids, values, _), (other_ids, others, _) in zip(of_prompt, of_whole_prompt, strict=True):
        assert ids[::3] == other_ids[::3]
        assert values == pytest.approx(others, abs=1e-3)


def test_what_each_request_gets_alone(folder: Callable[[str], str], is_long: bool) -> None:
    for seed in range(NUM_LONG_RUNS if is_long else NUM_RUNS):
        draw = random.Random(seed)
        model_type = MODELS[seed % len(MODELS)]
        requests = random_requests(draw, draw.choice((3, 8, 14)))
        options = random_options(draw, model_type in NATIVE)
        alone = {"enable_prefix_caching": False, "deterministic": options["deterministic"]}
        with make_core(folder(model_type), steps_in_flight=1, **PLAIN | alone) as core:
            expected = run(core, requests)
        with make_core(folder(model_type), **PLAIN | options) as core:
            for _ in range(2):  # from the second time on its prefix cache is warm
                found = run(core, requests, draw)
                for request in requests:
                    try:
                        assert_equal(found[request.request_id], expected[request.request_id])
                    except AssertionError as error:
                        raise AssertionError(f"seed {seed}: {model_type} with {options}: {request}") from error
