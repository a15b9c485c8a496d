"""Builds a `ModelRunnerOutput` from the sampled tokens of one or more steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ringcore.protocol.codec import int_array
from ringcore.protocol.requests import TokenLogprobs
from ringcore.protocol.steps import ModelRunnerOutput, RowError
from ringcore.worker.logits.prompt_logprobs import LaunchedPromptLogprobs

__all__ = ["SampledRows", "make_output"]


class SampledRows(NamedTuple):
    """The rows of a step that sampled, and their tokens."""

    rows: np.ndarray  # [n] int32
    token_ids: np.ndarray  # [n] int32
    logprobs: list[TokenLogprobs | None] | None  # [n]
    prompt_logprobs: Sequence[LaunchedPromptLogprobs] = ()  # of prompts whose last chunk this step computed


def make_output(
    step: int, num_scheduled: int, steps: Sequence[SampledRows], errors: dict[int, RowError]
) -> ModelRunnerOutput:
    """The output of the steps of one message, which share their rows; rows with an error are left out."""
    if not steps:
        return ModelRunnerOutput(step, None, int_array())
    rows = steps[0].rows
    assert all(len(other.rows) == len(rows) for other in steps), "a row did not sample in each step of its message"
    token_ids = np.stack([sampled.token_ids for sampled in steps], axis=1)  # [n, num_steps]
    logprobs: list[TokenLogprobs | None] | None = None
    good = ~np.isin(rows, list(errors)) if errors else np.ones(len(rows), dtype=bool)
    if any(sampled.logprobs for sampled in steps):
        of_rows = zip(*(sampled.logprobs or [] for sampled in steps), strict=True)
        logprobs = [entry for entries, keep in zip(of_rows, good, strict=True) if keep for entry in entries]
    is_whole = len(rows) == num_scheduled and not errors
    prompts = [one.result() for sampled in steps for one in sampled.prompt_logprobs if one.row not in errors]
    return ModelRunnerOutput(
        step, None if is_whole else rows[good], token_ids[good].reshape(-1), logprobs, list(errors.values()), prompts
    )
