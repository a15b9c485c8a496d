"""Requests that ask for all that may depend on a batch, run one by one in one engine, and at random times in others."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

from engine import generate, make_core
from tiny_checkpoints import VOCAB_SIZE

from ringcore import EngineCore, SamplingParams
from ringcore.protocol.requests import EngineCoreRequest

OPTIONS: dict[str, Any] = {
    "executor": "uniproc",
    "device": "cpu",
    "dtype": "float32",
    "deterministic": True,
    "max_model_len": 128,
    "block_size": 4,
    "num_blocks_override": 400,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "steps_in_flight": 1,
}
ALONE = {"enable_prefix_caching": False}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 5, "max_num_seqs": 5},
    {"max_num_batched_tokens": 33, "steps_in_flight": 2},
    {"num_blocks_override": 44},  # fewer than the requests need together
    {"block_size": 16, "max_num_batched_tokens": 17},
]

Request = tuple[list[int], SamplingParams]
Got = tuple[list[int], list[Any], list[Any]]  # tokens, their log-probabilities, those of the prompt


def random_requests(count: int, seed: int, vocab_size: int = VOCAB_SIZE, times: int = 1) -> list[Request]:
    """Some begin alike, so that a warm prefix cache has blocks for them. times: as long as short ones."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, vocab_size) for _ in range(40 * times)]
    requests = []
    for i in range(count):
        own = [draw.randrange(3, vocab_size) for _ in range(times * draw.choice((1, 2, 7, 18, 45)))]
        params = SamplingParams(
            max_tokens=draw.randint(3, 12),
            ignore_eos=True,
            temperature=0.0 if i % 2 else 0.9,
            seed=seed + i,
            top_p=draw.choice((1.0, 0.8)),
            top_k=draw.choice((0, 20)),
            presence_penalty=draw.choice((0.0, 0.7)),
            repetition_penalty=draw.choice((1.0, 1.3)),
            logprobs=draw.choice((0, 3)),
            prompt_logprobs=2 if i % 3 == 0 else None,
        )
        requests.append(((shared[: times * draw.choice((0, 21, 40))] + own)[: 100 * times], params))
    return requests


def got(outputs: list[Any]) -> Got:
    told = [one.prompt_logprobs for one in outputs if one.prompt_logprobs is not None]
    of_prompt = [(p.token_ids.tolist(), p.logprobs.tolist(), p.ranks.tolist()) for p in told]
    tokens = [token for one in outputs for token in one.new_token_ids]
    return tokens, [entry for one in outputs for entry in one.logprobs or []], of_prompt


def one_by_one(core: EngineCore, requests: list[Request]) -> list[Got]:
    return [got(generate(core, [prompt], params)[0]) for prompt, params in requests]


def at_random_times(core: EngineCore, requests: list[Request], seed: int) -> tuple[list[Got], int]:
    """-> what each got, and how often one was preempted."""
    draw, waiting, found = random.Random(seed), list(enumerate(requests)), defaultdict(list)
    draw.shuffle(waiting)
    preemptions = 0
    while waiting or core.has_unfinished:
        for _ in range(min(len(waiting), draw.choice((0, 1, 2, 8)))):
            i, (prompt, params) = waiting.pop()
            core.add_request(EngineCoreRequest(f"{seed}-{i}", prompt, params, 0.0))
        if core.has_unfinished:
            for output in core.step().outputs:
                found[int(output.request_id.split("-")[1])].append(output)
                preemptions = max(preemptions, output.num_preemptions)
    return [got(found[i]) for i in range(len(requests))], preemptions


def assert_deterministic(
    path: str, variants: list[dict[str, Any]], seeds: range, times: int = 1, **options: Any
) -> int:
    """-> how often a request was preempted."""
    requests, preemptions = random_requests(12, seed=7, times=times), 0
    with make_core(path, **OPTIONS | ALONE | options) as core:
        expected = one_by_one(core, requests)
    for variant in variants:
        with make_core(path, **OPTIONS | variant | options) as core:
            for seed in seeds:  # from the second on its prefix cache is warm
                found, seen = at_random_times(core, requests, seed)
                preemptions += seen
                for request, one, other in zip(requests, expected, found, strict=True):
                    assert other == one, (variant, seed, len(request[0]))
    return preemptions
