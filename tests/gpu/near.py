"""How far the log-probabilities of 16 bits are from the reference's."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from reference import Entry

from ringcore.protocol.requests import EngineCoreOutput


class _Error(NamedTuple):
    size: float
    num_prompt_tokens: int
    step: int
    logprob: float  # the reference's

    def __str__(self) -> str:
        return f"{self.size:.4f} at step {self.step} of {self.num_prompt_tokens} prompt tokens, of {self.logprob:.3f}"


def assert_near(
    entries: list[Entry], outputs: list[list[EngineCoreOutput]], *, mean: float, p95: float, p99: float
) -> None:
    """Of the reference's own tokens, as long as a continuation is the same text; the mean and two quantiles."""
    errors = []
    for entry, one in zip(entries, outputs, strict=True):
        for index, output in enumerate(one):
            if output.new_token_ids[0] != entry.token_ids[index]:
                break
            expected = entry.logprobs[index]
            size = abs(output.logprobs[0].logprobs[0] - expected)
            errors.append(_Error(size, len(entry.prompt_token_ids), index, expected))
    assert len(errors) > 10 * len(entries), f"{len(errors)} tokens of {len(entries)} entries are the reference's"
    sizes = [error.size for error in errors]
    found = {"mean": np.mean(sizes), "p95": np.quantile(sizes, 0.95), "p99": np.quantile(sizes, 0.99)}
    bounds = {"mean": mean, "p95": p95, "p99": p99}
    above = [f"{name} {found[name]:.5f}, bound {bounds[name]}" for name in bounds if not found[name] < bounds[name]]
    rest = [f"{name} {value:.5f}" for name, value in found.items()]
    largest = [str(error) for error in sorted(errors, reverse=True)[:8]]
    assert not above, "\n".join([*above, f"of {len(errors)} errors: {', '.join(rest)}; the largest:", *largest])


def logprob_errors(
    outputs: list[list[EngineCoreOutput]], expected: list[list[EngineCoreOutput]]
) -> npt.NDArray[np.float64]:
    """How far apart the log-probabilities are of the tokens that both chose, up to the first other one of each row."""
    found = []
    for got, wanted in zip(outputs, expected, strict=True):
        for one, other in zip(got, wanted, strict=True):
            if one.new_token_ids != other.new_token_ids:
                break
            found.append(abs(one.logprobs[0].logprobs[0] - other.logprobs[0].logprobs[0]))
    return np.array(found)
