"""Names of the beginnings of a prompt, by which prompts that share their first tokens meet in one prefix cache."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

__all__ = ["prefix_names"]

_FIRST = 64  # tokens; what is shared by fewer is computed again in a moment
_MAX_TOKENS = 16384  # that are named: 17 names, of a fraction of a millisecond


def prefix_names(token_ids: Sequence[int], cache_salt: str | None = None) -> list[str]:
    """The names of the first 64, 96, 128, 192, 256, ... tokens, from the shortest to the longest prefix that the prompt
    has. Each is at most half as long again as the one before, so that a conversation that goes on, or another one with
    the same system prompt, has most of what it shares under one name. Prompts of different salts share nothing.
    """
    limit = min(len(token_ids), _MAX_TOKENS)
    if limit < _FIRST:
        return []
    data = array("q", token_ids[:limit])
    hashed = hashlib.blake2b((cache_salt or "").encode(), digest_size=12)
    names, begin = [], 0
    for end in _lengths(limit):
        hashed.update(data[begin:end])
        names.append(hashed.hexdigest())
        begin = end
    return names


def _lengths(limit: int) -> Iterator[int]:
    power = _FIRST
    while power <= limit:
        yield power
        if (between := power + power // 2) <= limit:
            yield between
        power *= 2
