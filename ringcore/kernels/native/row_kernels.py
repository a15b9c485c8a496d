"""The C functions of `rows.c`: norms, gates and rotations of rows, each in one pass over memory."""

from __future__ import annotations

import ctypes
import functools
import logging

import torch

from ringcore.kernels.native.compiled import NoLibrary, load_compiled
from ringcore.kernels.native.threads import KINDS, RUN_ARGUMENTS, check, how_to_run

__all__ = ["RowKernels", "row_kernels"]

_log = logging.getLogger(__name__)
_pointer, _int64, _int32, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_SILU, _GELU_TANH = 0, 1


class RowKernels:
    """On a CPU, in float32, bfloat16 or float16; computed in float32 and rounded once."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._norm, self._gate, self._rotate = library.norm_rows, library.gate_rows, library.rotate_rows
        self._norm.argtypes = (
            *(_pointer, _int64, _int64, _int64, _pointer, _float, _pointer, _int64, _int32, _int32),
            *RUN_ARGUMENTS,
        )
        self._gate.argtypes = (_pointer, _int64, _int64, _int64, _int32, _pointer, _int32, *RUN_ARGUMENTS)
        of_heads = _int64, _int64, _int64
        self._rotate.argtypes = (
            _pointer,
            _int64,
            _int64,
            *of_heads,
            _pointer,
            _pointer,
            _float,
            _int32,
            *RUN_ARGUMENTS,
        )

    def rms_norm(self, x: torch.Tensor, gain: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        """x: [n, size] float32, gain: [size] float32 -> x / sqrt(mean(x^2) + eps) * gain: [n, size] of `dtype`."""
        n, size = x.shape
        out = torch.empty(n, size, dtype=dtype)
        at = x.data_ptr(), x.stride(0), n, size, gain.data_ptr(), eps, out.data_ptr(), size
        check(self._norm(*at, KINDS[dtype], False, *how_to_run()))
        return out

    def add_rms_norm(
        self, x: torch.Tensor, gain: torch.Tensor, eps: float, dtype: torch.dtype, to: torch.Tensor
    ) -> None:
        """to: [n, size] float32 += `rms_norm`, rounded to `dtype`, of x: [n, size] float32."""
        n, size = x.shape
        at = x.data_ptr(), x.stride(0), n, size, gain.data_ptr(), eps, to.data_ptr(), to.stride(0)
        check(self._norm(*at, KINDS[dtype], True, *how_to_run()))

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, 2 * size], gate then up -> silu(gate) * up: [n, size]."""
        return self._gated(x, _SILU)

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, 2 * size], gate then up -> gelu(gate) * up: [n, size], with the tanh form of gelu."""
        return self._gated(x, _GELU_TANH)

    def _gated(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        n, size = x.shape[0], x.shape[1] // 2
        out = torch.empty(n, size, dtype=x.dtype)
        at = x.data_ptr(), x.stride(0), n, size, activation, out.data_ptr()
        check(self._gate(*at, KINDS[x.dtype], *how_to_run()))
        return out

    def rotate(
        self,
        x: torch.Tensor,
        angles: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        gain: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Rotates the heads of q and then k in place, interleaved pairs (2i, 2i + 1); with a gain each is normalised
        first (QK norm).

        x: [n, heads, head_size] of any row stride, the heads of a row contiguous. angles: [n, 1, head_size / 2]
        complex64, contiguous. gain: [2, head_size] float32, of q's heads and of k's.
        """
        n, _, head_size = x.shape
        at = x.data_ptr(), x.stride(0), n, num_heads, num_kv_heads, head_size, angles.data_ptr()
        norm = None if gain is None else gain.data_ptr(), eps
        check(self._rotate(*at, *norm, KINDS[x.dtype], *how_to_run()))


@functools.cache
def row_kernels() -> RowKernels | None:
    """None where they cannot be compiled, which is logged once."""
    try:
        return RowKernels(load_compiled("rows.c"))
    except NoLibrary as reason:
        _log.info("norms, gates and rotations take several operations of torch each: %s", reason)
        return None
