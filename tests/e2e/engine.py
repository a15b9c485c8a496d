"""Driving an EngineCore in this process to the end of its requests."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.protocol.requests import EngineCoreOutput, EngineCoreRequest


def generate(
    core: EngineCore,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    salt: str | None = None,
    bad_words: Callable[[SamplingParams], list[list[int]]] = lambda _: [],
) -> list[list[EngineCoreOutput]]:
    """All outputs of each prompt, in order. Every prompt is added before the first step.

    bad_words: the tokens of a request's bad words.
    """
    each = params if isinstance(params, list) else [params] * len(prompts)
    stamp = time.monotonic_ns()
    ids = [f"{stamp}-{i}" for i in range(len(prompts))]
    for request_id, prompt, one in zip(ids, prompts, each, strict=True):
        core.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling_params=one,
                arrival_s=time.monotonic(),
                cache_salt=salt,
                bad_words_token_ids=bad_words(one),
            )
        )
    collected: dict[str, list[EngineCoreOutput]] = defaultdict(list)
    while core.has_unfinished:
        for output in core.step().outputs:
            collected[output.request_id].append(output)
    return [collected[request_id] for request_id in ids]


def tokens(outputs: list[list[EngineCoreOutput]]) -> list[list[int]]:
    return [[token for output in one for token in output.new_token_ids] for one in outputs]


def make_core(model: str, *, steps_in_flight: int = 2, **options) -> EngineCore:
    """As many steps in flight as on a GPU."""
    return EngineCore(EngineConfig.from_options(model=model, steps_in_flight=steps_in_flight, **options))
