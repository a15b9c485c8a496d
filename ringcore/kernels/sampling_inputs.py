"""Sampling parameters on the device: all columns in one piece of memory, written by one copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

__all__ = ["DeviceSamplingInputs", "HostSamplingInputs"]


class HostSamplingInputs(Protocol):
    """The columns of the sampler's `SamplingInputs` that the kernels need; they are explained there."""

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


# In the order in which they lie in memory. Each begins at a multiple of 16 bytes, whatever the number of rows: a kernel
# is compiled anew for pointers that are aligned otherwise.
_ALIGNMENT = 16
_COLUMNS = {
    "seed": torch.int64,
    "position": torch.int64,
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "bar_start": torch.int32,
    "bar_end": torch.int32,
    "bar_ids": torch.int32,
}


@dataclass(frozen=True, slots=True)
class DeviceSamplingInputs:
    """Sampling parameters of max_rows rows and their barred tokens, which lie side by side; views of `buffer`."""

    seed: torch.Tensor  # [max_rows] int64
    position: torch.Tensor  # [max_rows] int64
    temperature: torch.Tensor  # [max_rows] float32
    top_k: torch.Tensor  # [max_rows] int32
    top_p: torch.Tensor  # [max_rows] float32
    min_p: torch.Tensor  # [max_rows] float32
    bar_start: torch.Tensor  # [max_rows] int32: row i may not sample bar_ids[bar_start[i]:bar_end[i]]
    bar_end: torch.Tensor  # [max_rows] int32
    bar_ids: torch.Tensor  # [max_bars] int32
    buffer: torch.Tensor  # uint8: all of them

    @classmethod
    def allocate(cls, max_rows: int, max_bars: int, device: torch.device) -> DeviceSamplingInputs:
        """Room that `from_host` can fill again and again, for a graph; until then the values are arbitrary."""
        buffer = torch.empty(_num_bytes(max_rows, max_bars), dtype=torch.uint8, device=device)
        return cls(**_views(buffer, max_rows, max_bars), buffer=buffer)

    @classmethod
    def from_host(
        cls, inputs: HostSamplingInputs, device: torch.device, out: DeviceSamplingInputs | None = None
    ) -> DeviceSamplingInputs:
        """`inputs` on the device, by one copy from pinned memory that nobody waits for; in `out` where it is given.

        Rows of `out` behind those of `inputs` become greedy rows without bars. `out` must have room for them all.
        """
        n, num_bars = len(inputs.temperature), len(inputs.masked_rows)
        max_rows = n if out is None else len(out.temperature)
        max_bars = num_bars if out is None else len(out.bar_ids)
        assert n <= max_rows, (n, max_rows)
        assert num_bars <= max_bars, (num_bars, max_bars)
        # A buffer of its own for every call: torch's cache of pinned memory hands it out again only when it was copied.
        staging = torch.empty(_num_bytes(max_rows, max_bars), dtype=torch.uint8, pin_memory=device.type == "cuda")
        _fill({name: view.numpy() for name, view in _views(staging, max_rows, max_bars).items()}, inputs)
        if out is not None:
            out.buffer.copy_(staging, non_blocking=True)
            return out
        buffer = staging.to(device, non_blocking=True)
        views = _views(buffer, max_rows, max_bars)
        return cls(**views, buffer=buffer)


def _fill(columns: dict[str, np.ndarray], inputs: HostSamplingInputs) -> None:
    n, num_bars = len(inputs.temperature), len(inputs.masked_rows)
    for name in ("seed", "position", "temperature", "top_k", "top_p", "min_p"):
        columns[name][:n] = getattr(inputs, name)
        columns[name][n:] = 0
    columns["bar_start"][:] = columns["bar_end"][:] = 0
    columns["bar_ids"][:] = 0
    if num_bars:
        order = np.argsort(inputs.masked_rows, kind="stable")
        columns["bar_ids"][:num_bars] = inputs.masked_ids[order]
        edges = np.searchsorted(inputs.masked_rows[order], np.arange(n + 1))
        columns["bar_start"][:n], columns["bar_end"][:n] = edges[:-1], edges[1:]


def _lengths(max_rows: int, max_bars: int) -> dict[str, int]:
    """`bar_ids` has one element at least, so that it has an address."""
    return dict.fromkeys(_COLUMNS, max_rows) | {"bar_ids": max(1, max_bars)}


def _num_bytes(max_rows: int, max_bars: int) -> int:
    return sum(_aligned(_COLUMNS[name].itemsize * length) for name, length in _lengths(max_rows, max_bars).items())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _views(buffer: torch.Tensor, max_rows: int, max_bars: int) -> dict[str, torch.Tensor]:
    views, start = {}, 0
    for name, length in _lengths(max_rows, max_bars).items():
        num_bytes = _COLUMNS[name].itemsize * length
        views[name] = buffer[start : start + num_bytes].view(_COLUMNS[name])
        start += _aligned(num_bytes)
    return views
