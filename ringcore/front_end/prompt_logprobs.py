"""Converts the log-probabilities of a prompt's tokens into the caller's form."""

from __future__ import annotations

from collections.abc import Callable

from ringcore.params.outputs import Logprob
from ringcore.protocol.requests import PromptLogprobs

__all__ = ["PromptPositions", "prompt_positions"]

PromptPositions = list[dict[int, Logprob] | None]  # one per prompt token; None for the first


def prompt_positions(columns: PromptLogprobs, token_text: Callable[[int], str]) -> PromptPositions:
    """The columns as a dict for each position, the prompt's own token first. token_text: of one token."""
    width = 1 + columns.count
    token_ids, ranks = columns.token_ids.tolist(), columns.ranks.tolist()
    # The same tokens recur at many positions, and decoding their texts dominates the cost.
    texts = {token_id: token_text(token_id) for token_id in set(token_ids)}
    logprobs = map(Logprob, columns.logprobs.tolist(), ranks, [texts[token_id] for token_id in token_ids])
    entries = list(zip(token_ids, logprobs, strict=True))
    return [None, *(dict(entries[begin : begin + width]) for begin in range(0, len(entries), width))]
