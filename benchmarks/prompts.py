"""Short prompts in plain English, about eight tokens each, none given twice until thousands have been."""

from __future__ import annotations

import itertools
import random

__all__ = ["PromptStream"]

_OPENINGS = (
    "The history of", "A simple way to describe", "My favourite story about", "Three facts about", "The trouble with",
    "What people forget about", "In the old days,", "A letter concerning", "Scientists who study", "The price of",
    "Nobody understands", "Once upon a time,", "The best book about", "A short poem on",
)  # fmt: skip
_TOPICS = (
    "the sea", "mountain rivers", "a small village", "winter bread", "steam engines", "honey bees", "the night sky",
    "old maps", "wooden boats", "the railway station", "green tea", "a lost dog", "paper money", "deep caves",
    "chess players", "the first computers", "glass windows", "wild horses", "city gardens", "salt", "clocks",
    "lighthouses", "volcanoes", "the human heart",
)  # fmt: skip
_ENDINGS = (
    "", " begins with", " in the north", " and its people", " is that", " before the war", ", as told by",
    " for children", " was never", " in one sentence:", " that changed the world",
)  # fmt: skip


class PromptStream:
    """All combinations of the parts in one shuffled order; `take` hands out the next ones, and wraps at the end."""

    def __init__(self, seed: int = 0) -> None:
        prompts = [f"{a} {b}{c}" for a, b, c in itertools.product(_OPENINGS, _TOPICS, _ENDINGS)]
        random.Random(seed).shuffle(prompts)
        self._prompts = itertools.cycle(prompts)

    def take(self, count: int) -> list[str]:
        return list(itertools.islice(self._prompts, count))
