"""Sampling inputs on the device: all of them in one buffer, filled by one H2D copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ringcore.kernels.logits.row_records import num_words

__all__ = ["DeviceSamplingInputs", "HostSamplingInputs"]


class HostSamplingInputs(Protocol):
    """What the kernels need of the sampler's `SamplingInputs`; documented there."""

    @property
    def parameters(self) -> np.ndarray: ...
    @property
    def position(self) -> np.ndarray: ...
    @property
    def masked_rows(self) -> np.ndarray: ...
    @property
    def masked_ids(self) -> np.ndarray: ...


# In memory order. Each array is aligned to 16 bytes, whatever the number of rows: Triton recompiles a kernel where the
# alignment of a pointer changes.
_ALIGNMENT = 16
_DTYPES = {
    "parameters": torch.int32,
    "position": torch.int64,
    "masked_start": torch.int32,
    "masked_end": torch.int32,
    "masked_token_ids": torch.int32,
}


@dataclass(frozen=True, slots=True)
class DeviceSamplingInputs:
    """Sampling parameters of max_rows rows and their masked tokens; views of `buffer`."""

    record: np.dtype  # of the words of a row's parameters: see `row_records`
    parameters: torch.Tensor  # [max_rows, num_words] int32
    position: torch.Tensor  # [max_rows] int64
    masked_start: torch.Tensor  # [max_rows] int32: row i may not sample masked_token_ids[masked_start[i]:masked_end[i]]
    masked_end: torch.Tensor  # [max_rows] int32
    masked_token_ids: torch.Tensor  # [max_masked] int32
    buffer: torch.Tensor  # uint8: all of them

    @classmethod
    def allocate(cls, record: np.dtype, max_rows: int, max_masked: int, device: torch.device) -> DeviceSamplingInputs:
        """Buffers that `from_host` can refill, for a CUDA graph; uninitialised until then."""
        num_bytes = _num_bytes(record, max_rows, max_masked)
        return cls._of(torch.empty(num_bytes, dtype=torch.uint8, device=device), record, max_rows, max_masked)

    @classmethod
    def from_host(
        cls, inputs: HostSamplingInputs, device: torch.device, out: DeviceSamplingInputs | None = None
    ) -> DeviceSamplingInputs:
        """Copies `inputs` to the device, by one asynchronous H2D copy from pinned memory; into `out` where given.

        Rows of `out` after those of `inputs` become greedy rows without masked tokens. `out` must be large enough.
        """
        record, n, num_masked = inputs.parameters.dtype, len(inputs.parameters), len(inputs.masked_rows)
        max_rows = n if out is None else len(out.parameters)
        max_masked = num_masked if out is None else len(out.masked_token_ids)
        assert out is None or out.record == record, (out.record, record)
        assert n <= max_rows, (n, max_rows)
        assert num_masked <= max_masked, (num_masked, max_masked)
        # A new buffer per call: torch's pinned memory pool reuses it only after the copy has ended.
        num_bytes = _num_bytes(record, max_rows, max_masked)
        staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        cls._of(staging, record, max_rows, max_masked)._fill(inputs)
        if out is not None:
            out.buffer.copy_(staging, non_blocking=True)
            return out
        return cls._of(staging.to(device, non_blocking=True), record, max_rows, max_masked)

    @classmethod
    def _of(cls, buffer: torch.Tensor, record: np.dtype, max_rows: int, max_masked: int) -> DeviceSamplingInputs:
        views, start = {}, 0
        for name, length in _lengths(record, max_rows, max_masked).items():
            num_bytes = _DTYPES[name].itemsize * length
            views[name] = buffer[start : start + num_bytes].view(_DTYPES[name])
            start += _aligned(num_bytes)
        parameters = views.pop("parameters").view(max_rows, num_words(record))
        return cls(record=record, parameters=parameters, **views, buffer=buffer)

    def _fill(self, inputs: HostSamplingInputs) -> None:
        """Of a buffer on the host; what comes after the rows of `inputs` becomes zeros."""
        n, num_masked = len(inputs.parameters), len(inputs.masked_rows)
        self.buffer.zero_()
        self.parameters.numpy()[:n] = inputs.parameters.view(np.int32).reshape(n, self.parameters.shape[1])
        self.position.numpy()[:n] = inputs.position
        if num_masked:
            order = np.argsort(inputs.masked_rows, kind="stable")
            self.masked_token_ids.numpy()[:num_masked] = inputs.masked_ids[order]
            edges = np.searchsorted(inputs.masked_rows[order], np.arange(n + 1))
            self.masked_start.numpy()[:n], self.masked_end.numpy()[:n] = edges[:-1], edges[1:]


def _lengths(record: np.dtype, max_rows: int, max_masked: int) -> dict[str, int]:
    """`masked_token_ids` has at least one element, so that it has an address."""
    lengths = dict.fromkeys(_DTYPES, max_rows)
    return lengths | {"parameters": max_rows * num_words(record), "masked_token_ids": max(1, max_masked)}


def _num_bytes(record: np.dtype, max_rows: int, max_masked: int) -> int:
    return sum(
        _aligned(_DTYPES[name].itemsize * length) for name, length in _lengths(record, max_rows, max_masked).items()
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
