"""Builds a `ModelRunnerOutput` from the sampled tokens of one or more steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress
from typing import NamedTuple

import numpy as np

from ringcore.protocol.codec import int_array
from ringcore.protocol.requests import TokenLogprobs
from ringcore.protocol.row_spans import RowSpans
from ringcore.protocol.steps import ModelRunnerOutput, RowError
from ringcore.worker.logits.pooled_prompts import LaunchedPooledPrompt
from ringcore.worker.logits.prompt_logprobs import LaunchedPromptLogprobs

__all__ = ["SampledRows", "make_output"]


class SampledRows(NamedTuple):
    """The rows of a step that sampled, and their tokens."""

    rows: np.ndarray  # [n] int32
    token_ids: np.ndarray  # [num_tokens] int32: row-major; one of each row unless `num_gained` says otherwise
    logprobs: list[TokenLogprobs | None] | None  # [num_tokens]
    prompt_logprobs: Sequence[LaunchedPromptLogprobs] = ()  # of prompts whose last chunk this step computed
    pooled: Sequence[LaunchedPooledPrompt] = ()  # likewise
    num_gained: np.ndarray | None = None  # [n]: tokens of each row; None: one each
    num_drafts: np.ndarray | None = None  # [n]: drafts that the model verified; None: none


def make_output(
    step: int, num_scheduled: int, steps: Sequence[SampledRows], errors: dict[int, RowError]
) -> ModelRunnerOutput:
    """The output of the steps of one message, which share their rows; rows with an error are left out."""
    if not steps:
        return ModelRunnerOutput(step, None, int_array())
    rows = steps[0].rows
    assert all(len(other.rows) == len(rows) for other in steps), "a row did not sample in each step of its message"
    assert len(steps) == 1 or steps[0].num_gained is None, "several steps, and several tokens in one of them"
    spans, num_drafts = RowSpans(len(steps), steps[0].num_gained), steps[0].num_drafts
    token_ids = np.stack([sampled.token_ids for sampled in steps], axis=1).reshape(-1)
    logprobs: list[TokenLogprobs | None] | None = None
    if any(sampled.logprobs for sampled in steps):
        logprobs = [*chain.from_iterable(zip(*(sampled.logprobs or [] for sampled in steps), strict=True))]
    is_whole = len(rows) == num_scheduled and not errors
    if errors:
        good = ~np.isin(rows, list(errors))
        is_good = spans.repeat(good)
        rows, token_ids, spans = rows[good], token_ids[is_good], spans.kept(good)
        num_drafts = None if num_drafts is None else num_drafts[good]
        logprobs = logprobs and [*compress(logprobs, is_good)]
    return ModelRunnerOutput(
        step,
        None if is_whole else rows,
        token_ids,
        logprobs,
        list(errors.values()),
        [one.result() for sampled in steps for one in sampled.prompt_logprobs if one.row not in errors],
        None if spans.counts is None else int_array(spans.counts),
        [one.result() for sampled in steps for one in sampled.pooled if one.row not in errors],
        None if num_drafts is None else int_array(num_drafts),
    )
