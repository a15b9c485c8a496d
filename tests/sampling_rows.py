"""Sampling inputs as the worker's rows give them, by the names of their parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringcore.model_executor.sampler import SamplingInputs
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.row_parameters import ROW_PARAMETERS
from ringcore.protocol.steps import NewRequest


def record(params: SamplingParams, seed: int = 0) -> np.ndarray:
    """[] of a request with these parameters."""
    request = NewRequest(0, int_array([0]), 1, 0, 0, [], params, seed, [])
    return np.array(ROW_PARAMETERS.record(request), dtype=ROW_PARAMETERS.dtype)


def inputs(n: int, **columns: Any) -> SamplingInputs:
    """n rows of temperature 1 without filters, seeds 0 .. n - 1; a column is one value for all or one a row."""
    parameters = np.full(n, record(SamplingParams()))
    given: dict[str, Any] = {"position": 5, "seed": np.arange(n)} | columns
    masked = {name: np.array(given.pop(name, []), dtype=np.int64) for name in ("masked_rows", "masked_ids")}
    position = np.broadcast_to(given.pop("position"), n).astype(np.int64)
    for name, values in given.items():
        parameters[name] = values
    return SamplingInputs(parameters, position, **masked)
