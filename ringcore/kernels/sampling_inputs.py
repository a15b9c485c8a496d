"""Sampling parameters on the device: all columns in one buffer, filled by one H2D copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

__all__ = ["DeviceSamplingInputs", "HostSamplingInputs"]


class HostSamplingInputs(Protocol):
    """The columns of the sampler's `SamplingInputs` that the kernels need; documented there."""

    @property
    def temperature(self) -> np.ndarray: ...
    @property
    def top_k(self) -> np.ndarray: ...
    @property
    def top_p(self) -> np.ndarray: ...
    @property
    def min_p(self) -> np.ndarray: ...
    @property
    def seed(self) -> np.ndarray: ...
    @property
    def position(self) -> np.ndarray: ...
    @property
    def masked_rows(self) -> np.ndarray: ...
    @property
    def masked_ids(self) -> np.ndarray: ...


# In memory order. Each column is aligned to 16 bytes, whatever the number of rows: Triton recompiles a kernel where the
# alignment of a pointer changes.
_ALIGNMENT = 16
_COLUMNS = {
    "seed": torch.int64,
    "position": torch.int64,
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "masked_start": torch.int32,
    "masked_end": torch.int32,
    "masked_token_ids": torch.int32,
}


@dataclass(frozen=True, slots=True)
class DeviceSamplingInputs:
    """Sampling parameters of max_rows rows and their masked tokens, as contiguous columns; views of `buffer`."""

    seed: torch.Tensor  # [max_rows] int64
    position: torch.Tensor  # [max_rows] int64
    temperature: torch.Tensor  # [max_rows] float32
    top_k: torch.Tensor  # [max_rows] int32
    top_p: torch.Tensor  # [max_rows] float32
    min_p: torch.Tensor  # [max_rows] float32
    masked_start: torch.Tensor  # [max_rows] int32: row i may not sample masked_token_ids[masked_start[i]:masked_end[i]]
    masked_end: torch.Tensor  # [max_rows] int32
    masked_token_ids: torch.Tensor  # [max_masked] int32
    buffer: torch.Tensor  # uint8: all of them

    @classmethod
    def allocate(cls, max_rows: int, max_masked: int, device: torch.device) -> DeviceSamplingInputs:
        """Buffers that `from_host` can refill, for a CUDA graph; uninitialised until then."""
        buffer = torch.empty(_num_bytes(max_rows, max_masked), dtype=torch.uint8, device=device)
        return cls(**_views(buffer, max_rows, max_masked), buffer=buffer)

    @classmethod
    def from_host(
        cls, inputs: HostSamplingInputs, device: torch.device, out: DeviceSamplingInputs | None = None
    ) -> DeviceSamplingInputs:
        """Copies `inputs` to the device, by one asynchronous H2D copy from pinned memory; into `out` where given.

        Rows of `out` after those of `inputs` become greedy rows without masked tokens. `out` must be large enough.
        """
        n, num_masked = len(inputs.temperature), len(inputs.masked_rows)
        max_rows = n if out is None else len(out.temperature)
        max_masked = num_masked if out is None else len(out.masked_token_ids)
        assert n <= max_rows, (n, max_rows)
        assert num_masked <= max_masked, (num_masked, max_masked)
        # A new buffer per call: torch's pinned memory pool reuses it only after the copy has ended.
        staging = torch.empty(_num_bytes(max_rows, max_masked), dtype=torch.uint8, pin_memory=device.type == "cuda")
        _fill({name: view.numpy() for name, view in _views(staging, max_rows, max_masked).items()}, inputs)
        if out is not None:
            out.buffer.copy_(staging, non_blocking=True)
            return out
        buffer = staging.to(device, non_blocking=True)
        views = _views(buffer, max_rows, max_masked)
        return cls(**views, buffer=buffer)


def _fill(columns: dict[str, np.ndarray], inputs: HostSamplingInputs) -> None:
    n, num_masked = len(inputs.temperature), len(inputs.masked_rows)
    for name in ("seed", "position", "temperature", "top_k", "top_p", "min_p"):
        columns[name][:n] = getattr(inputs, name)
        columns[name][n:] = 0
    columns["masked_start"][:] = columns["masked_end"][:] = 0
    columns["masked_token_ids"][:] = 0
    if num_masked:
        order = np.argsort(inputs.masked_rows, kind="stable")
        columns["masked_token_ids"][:num_masked] = inputs.masked_ids[order]
        edges = np.searchsorted(inputs.masked_rows[order], np.arange(n + 1))
        columns["masked_start"][:n], columns["masked_end"][:n] = edges[:-1], edges[1:]


def _lengths(max_rows: int, max_masked: int) -> dict[str, int]:
    """`masked_token_ids` has at least one element, so that it has an address."""
    return dict.fromkeys(_COLUMNS, max_rows) | {"masked_token_ids": max(1, max_masked)}


def _num_bytes(max_rows: int, max_masked: int) -> int:
    return sum(_aligned(_COLUMNS[name].itemsize * length) for name, length in _lengths(max_rows, max_masked).items())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _views(buffer: torch.Tensor, max_rows: int, max_masked: int) -> dict[str, torch.Tensor]:
    views, start = {}, 0
    for name, length in _lengths(max_rows, max_masked).items():
        num_bytes = _COLUMNS[name].itemsize * length
        views[name] = buffer[start : start + num_bytes].view(_COLUMNS[name])
        start += _aligned(num_bytes)
    return views
