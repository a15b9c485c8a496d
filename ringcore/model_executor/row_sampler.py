"""Sampling whose draw of a row does not depend on the other rows: each by itself."""

from __future__ import annotations

import numpy as np
import torch

from ringcore.model_executor.sampler import Sampled, SamplingInputs, sample

__all__ = ["sample_by_row"]


def sample_by_row(logits: torch.Tensor, inputs: SamplingInputs) -> Sampled:
    """As `sample`. Greedy rows are one call: a maximum has no order of sums."""
    drawn = np.flatnonzero(inputs.parameters["temperature"] > 0)
    if not len(drawn):
        return sample(logits, inputs)
    greedy = np.flatnonzero(inputs.parameters["temperature"] <= 0)
    token_ids, ok = torch.empty(len(logits), dtype=torch.int64), np.empty(len(logits), dtype=bool)
    for rows in (*([greedy] if len(greedy) else []), *drawn[:, None]):
        found = sample(logits[torch.from_numpy(rows)], _of_rows(inputs, rows))
        token_ids[torch.from_numpy(rows)], ok[rows] = found.token_ids, found.ok
    return Sampled(token_ids, ok)


def _of_rows(inputs: SamplingInputs, rows: np.ndarray) -> SamplingInputs:
    """Of rows [n], ascending."""
    is_here = np.isin(inputs.masked_rows, rows)
    places = np.searchsorted(rows, inputs.masked_rows[is_here])
    return SamplingInputs(inputs.parameters[rows], inputs.position[rows], places, inputs.masked_ids[is_here])
