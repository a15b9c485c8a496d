"""How far the log-probabilities of 16 bits are from the reference's."""

from __future__ import annotations

import numpy as np
from reference import Entry

from ringcore.protocol import EngineCoreOutput


def assert_near(entries: list[Entry], outputs: list[list[EngineCoreOutput]], mean: float, p99: float) -> None:
    """Of the reference's own tokens, as long as a continuation is the same text."""
    errors = []
    for entry, one in zip(entries, outputs, strict=True):
        for index, output in enumerate(one):
            if output.new_token_ids[0] != entry.token_ids[index]:
                break
            errors.append(abs(output.logprobs[0].logprobs[0] - entry.logprobs[index]))
    assert len(errors) > 10 * len(entries)
    assert np.mean(errors) < mean
    assert np.quantile(errors, 0.99) < p99
