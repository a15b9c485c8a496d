"""What requests write in the benchmark of speculative decoding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from benchmarks.peers.known_text import KNOWN_TOKEN, first_token
from ringcore.checkpoint.tokenizer import Tokenizer
from ringcore.params.sampling_params import SamplingParams

__all__ = ["Load", "forced_load", "free_load", "real_loads"]

_CODE = '''def merge_intervals(intervals):
    """Merge overlapping intervals and return them sorted."""
    if not intervals:
        return []
    intervals = sorted(intervals, key=lambda pair: pair[0])
    merged = [intervals[0]]
    for start, end in intervals[1:]:
        last_start, last_end = merged[-1]
        if start <= last_end:
            merged[-1] = (last_start, max(last_end, end))
        else:
            merged.append((start, end))
    return merged
'''
_PASSAGE = (
    "The harbour of {0} lies behind two moles of granite, which were built after the flood. In winter the wind comes "
    "from the north-east and brings ice to the outer basin, so that the pilots wait at the lower quay. A keeper has "
    "lived in the lighthouse since the first lamp was lit, and he writes the hour of every ship into a large book: its "
    "name, its flag, what it carries, and how deep it lies in the water. In the summer of the great storm the book had "
    "no entry for three days, and nobody in {0} could say afterwards which ships had passed."
)
_PLACES = ("Arnholm", "Bellmar", "Corvik", "Dunmore", "Eskby", "Falren", "Grenna", "Hollis")
PROMPTS = {
    "code edit": f"Here is a Python function of the module {{0}}:\n\n```python\n{_CODE}```\n\nThe same function for "
    "the module {0}, with the docstring 'Join intervals.':\n\n```python\ndef merge_intervals(intervals):\n"
    '    """Join intervals."""\n',
    "quote": f"The text:\n\n{_PASSAGE}\n\nThe same text, word by word:\n\n{_PASSAGE[:150]}",
    "free text": "Write a long story about a journey to {0}.\n\nIt was",
}
_PROMPT_TOKENS = 64  # of a model without a tokenizer


class Load(NamedTuple):
    """Requests that run at once."""

    case: str
    prompts: list[list[int]]
    params: SamplingParams


def real_loads(tokenizer: Tokenizer, batch: int, num_tokens: int) -> list[Load]:
    """Of a model that writes text: an edit, a quote and a story, each greedy."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    places = [_PLACES[index % len(_PLACES)] + str(index // len(_PLACES) or "") for index in range(batch)]
    return [
        Load(_case(kind, batch), [tokenizer.encode(prompt.format(place)) for place in places], params)
        for kind, prompt in PROMPTS.items()
    ]


def free_load(batch: int, num_tokens: int, vocab_size: int) -> Load:
    """Of random weights: samples of what they find likely, which repeats nothing."""
    params = SamplingParams(temperature=1, max_tokens=num_tokens, ignore_eos=True)
    return Load(_case("free text", batch), _random_prompts(batch, vocab_size), params)


def forced_load(batch: int, num_tokens: int, vocab_size: int, chance: float | None) -> Load:
    """Of random weights: a bias has them write one token again and again. chance: that a draft of `KnownText` is right;
    None: the drafts are those of suffixes."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logit_bias={KNOWN_TOKEN: 100.0})
    prompts = _random_prompts(batch, vocab_size)
    if chance is None:
        return Load(_case("one token repeated", batch), prompts, params)
    for prompt in prompts:
        prompt[0] = first_token(chance)
    return Load(_case(f"drafts of which {chance:.0%} are right", batch), prompts, params)


def _case(kind: str, batch: int) -> str:
    return f"{kind}, {batch} request{'s' * (batch > 1)}"


def _random_prompts(batch: int, vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(batch)
    prompts: list[list[int]] = rng.integers(1000, vocab_size, (batch, _PROMPT_TOKENS)).tolist()
    return prompts
