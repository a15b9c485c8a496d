"""The operations that all layers share, in plain torch, and which kernels a device has instead.

On a CPU an operation costs 1 to 4 us however small it is, and a model of 30 layers decodes a token in some 12 ms: so
these use few operations, and where reshaping the weights saves one, the weights are prepared when they are bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F  # noqa: N812

from ringcore.kernels.native.row_kernels import RowKernels, row_kernels
from ringcore.kernels.partials import Partials

__all__ = [
    "add_partials",
    "apply_rotary",
    "cpu_kernels",
    "gather_rows",
    "gelu_tanh_and_mul",
    "has_kernels",
    "linear",
    "rms_norm",
    "rms_norm_by_gain",
    "rms_norm_floor",
    "rms_norm_gain",
    "rows_by",
    "silu_and_mul",
    "without_cpu_kernels",
]

_has_cpu_kernels = ContextVar("has_cpu_kernels", default=True)  # of this thread


def has_kernels(device: torch.device) -> bool:
    """Whether layers bound on `device` use `ringcore.kernels`. The kernels need Triton, so nothing else imports
    them."""
    return device.type == "cuda"


def cpu_kernels(device: torch.device) -> RowKernels | None:
    """The kernels in C of layers bound on `device`; None on another device than a CPU, and without a C compiler."""
    return row_kernels() if device.type == "cpu" and _has_cpu_kernels.get() else None


@contextmanager
def without_cpu_kernels() -> Iterator[None]:
    """Layers that this thread binds within it are plain torch's: a trial is not worth their compilation."""
    token = _has_cpu_kernels.set(False)
    try:
        yield
    finally:
        _has_cpu_kernels.reset(token)


def add_partials(x: torch.Tensor, partials: Partials, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [n, size] += their sum, or its norm, in place -> x, or its numbers in another dtype."""
    if has_kernels(x.device):
        from ringcore.kernels import add_partials, rms_norm

        if partials.norm is not None:
            return rms_norm.add_normed(x, partials, dtype)
        add_partials.add_partials(x, partials)
    else:
        x.add_(partials.total())
    return x if dtype is None else x.to(dtype)


def gather_rows(
    table: torch.Tensor,
    index: torch.Tensor,
    *,
    first: int | None = None,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
    is_dependent: bool = False,
) -> torch.Tensor:
    """Row index[i] - first of table [num_rows, size], times `scale`, as row i of a new tensor [n, size] of dtype; zeros
    where there is no such row. first: None: 0, and every index [n] int64 has a row. is_dependent: see the kernel."""
    if has_kernels(table.device):
        from ringcore.kernels import gather_rows as kernels

        return kernels.gather_rows(table, index, first=first or 0, scale=scale, dtype=dtype, is_dependent=is_dependent)
    return rows_by(lambda found: F.embedding(found, table), len(table), index, first, scale, dtype)


def rows_by(
    gather: Callable[[torch.Tensor], torch.Tensor],
    num_rows: int,
    index: torch.Tensor,
    first: int | None,
    scale: float | None,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """As `gather_rows`, of a table of which `gather` returns the rows at indices, as a new tensor."""
    if first is None:
        rows = gather(index)
    else:
        index = index - first
        elsewhere = (index < 0) | (index >= num_rows)
        rows = gather(index.masked_fill_(elsewhere, 0)).masked_fill_(elsewhere.unsqueeze(-1), 0)
    if scale is not None:
        rows.mul_(scale)
    return rows if dtype is None else rows.to(dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: [n, in], weight: [out, in], bias: [out] -> [n, out]."""
    return F.linear(x, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, the mean in float32 whatever the dtype.

    x: [..., size] with weight [size], or [n, heads, size] with weight [heads, size].
    """
    if weight.ndim == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape[-1:], None, eps) * weight


def rms_norm_gain(weight: torch.Tensor) -> torch.Tensor:
    """The gain for `rms_norm_by_gain`, of the shape of its weight [..., size]."""
    return weight * math.sqrt(weight.shape[-1])


def rms_norm_floor(weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The floor for `rms_norm_by_gain`, [1], of its weight's dtype and device."""
    return torch.tensor([math.sqrt(weight.shape[-1] * eps)], dtype=weight.dtype, device=weight.device)


def rms_norm_by_gain(x: torch.Tensor, gain: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """`rms_norm` for float32 on a CPU, with weight and eps prepared by `rms_norm_gain` and `rms_norm_floor`.

    sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(size * eps)) / sqrt(size). Four operations where torch's own has six: 3.5 us
    against 7.9 for [1, 576], 6.1 against 10.4 for [16, 576], 13 against 20 for [64, 576].
    """
    norm: torch.Tensor = torch.linalg.vector_norm(x, 2, -1, True)
    return (x / norm.hypot_(floor)).mul_(gain)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: [n, 2 * size], gate then up -> silu(gate) * up: [n, size]."""
    size = x.shape[-1] // 2
    gate, up = torch.split_with_sizes(x, (size, size), -1)  # chunk() goes through four more operations
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: [n, 2 * size], gate then up -> gelu(gate) * up: [n, size], with the tanh form of gelu."""
    size = x.shape[-1] // 2
    gate, up = torch.split_with_sizes(x, (size, size), -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def apply_rotary(x: torch.Tensor, rotation: torch.Tensor) -> None:
    """Rotates x in place (RoPE): [n, heads, head_size] with interleaved pairs (0, 1), (2, 3), ...

    rotation: [n, 1, head_size / 2] complex64, see `layers.rotary`. As one complex product it takes 3.8 us for [1, 12,
    64] and 13 for [64, 12, 64]; the form with two halves and a concatenation takes 11 and 33 at best.
    """
    pairs = x.view(*x.shape[:-1], -1, 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotation)
    else:  # no complex numbers of 16 bits
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(rotation)))
