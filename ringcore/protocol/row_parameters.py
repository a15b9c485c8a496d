"""The parameters that a request brings to its row of the persistent batch, declared once.

Everything on the way from the wire to the sampler is derived from `ROW_PARAMETERS`: the host's columns
(`worker/rows/request_rows.py`), the device's records (`kernels/steps/step_state.py`), what a decode step gathers
(`kernels/steps/step.py`), what any other step uploads (`kernels/logits/sampling_inputs.py`) and the inputs of the
profile run.

A record is a row's parameters side by side. The host's rows are a structured numpy array of records, and the device
holds the same bytes as int32 words, so that none of these places knows how many parameters there are:

    request -> values -> | seed  seed | temperature | top_k | top_p | ... |   one record, 32- and 64-bit numbers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ringcore.params.field_checks import MAX_COUNT
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.steps import NewRequest

__all__ = ["EVERY_PARAMETER", "ROW_PARAMETERS", "RowParameter", "RowParameters"]


class RowParameter(NamedTuple):
    """A column of the persistent batch that is set when a row is admitted and constant from then on."""

    name: str
    dtype: str  # of numpy, of 32 or 64 bits
    value: Callable[[NewRequest], float]  # what the column holds; the default is that of the request's own field


class RowParameters:
    """Columns, and the records that they form. An unused row's record is zeros, which is a greedy row."""

    def __init__(self, columns: Sequence[RowParameter]) -> None:
        # The widest first: then no column needs padding before it, and every one is aligned to its size.
        self.columns = sorted(columns, key=lambda column: -np.dtype(column.dtype).itemsize)
        self.dtype = np.dtype([(column.name, column.dtype) for column in self.columns], align=True)
        assert all(np.dtype(column.dtype).itemsize in (4, 8) for column in self.columns), self.dtype
        self._values = [column.value for column in self.columns]

    def record(self, request: NewRequest) -> tuple[float, ...]:
        """The values of one request in the order of `dtype`: to be assigned to an element of a structured array."""
        return tuple([value(request) for value in self._values])


def _num_logprobs(request: NewRequest) -> int:
    requested = request.sampling_params.logprobs
    if requested is None:
        return -1
    return MAX_COUNT if requested < 0 else requested


ROW_PARAMETERS = RowParameters(
    [
        RowParameter("temperature", "float32", lambda request: request.sampling_params.temperature),  # 0: greedy
        RowParameter("top_k", "int32", lambda request: request.sampling_params.top_k),  # 0: all
        RowParameter("top_p", "float32", lambda request: request.sampling_params.top_p),
        RowParameter("min_p", "float32", lambda request: request.sampling_params.min_p),
        RowParameter("seed", "int64", lambda request: request.seed),
        RowParameter("min_tokens", "int32", lambda request: request.sampling_params.min_tokens),
        RowParameter("num_logprobs", "int32", _num_logprobs),  # -1: none; MAX_COUNT: the vocabulary
    ]
)

# Of dummy runs: no parameter has its default, so that no step of a real request needs more than they do.
EVERY_PARAMETER = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.1, min_tokens=1, logprobs=1)
