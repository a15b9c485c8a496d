"""The C functions of `product.c` for matrices in the blocks of a GGUF file."""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Literal

import torch

from ringcore.checkpoint.quantization import GgufFormat
from ringcore.kernels.native.compiled import NoLibrary, load_compiled
from ringcore.kernels.native.threads import num_threads, parallel
from ringcore.model_executor.weight import Arrangement

__all__ = ["BlockKernels", "BlocksArrangement", "KernelMatrix", "block_kernels"]

_log = logging.getLogger(__name__)

_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")  # in the order of the enum in C
_EPILOGUES = {"store": 0, "add": 1, "silu": 2}
LANES = 16  # outputs of a run
_pointer, _int64, _int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("weight", _pointer),
        ("num_outputs", _int64),
        ("num_inputs", _int64),
        ("row_bytes", _int64),
        ("bias", _pointer),
        ("kind", _int32),
        ("is_rounded", _int32),
    )


class BlockKernels:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.product = library.blocks_product
        self.product.argtypes = (
            *(_pointer, _pointer, _int64, _int64, _pointer, ctypes.c_float, _pointer, _int64, _int32),
            *(_pointer, _int32),
        )
        self.arrange = library.blocks_arrange
        self.arrange.argtypes = (_int32, _pointer, _int64, _int64, _int32)
        self.rows = library.blocks_rows
        self.rows.argtypes = (_pointer, _pointer, _int64, _pointer)
        self.parallel = parallel()


@functools.cache
def block_kernels() -> BlockKernels | None:
    """None where they cannot be compiled, which is logged once."""
    try:
        return BlockKernels(load_compiled("product.c"))
    except NoLibrary as reason:
        _log.warning("packed weights are expanded for each product, which is slow: %s", reason)
        return None


class BlocksArrangement(Arrangement):
    """Rows of blocks, [num_outputs, bytes of a row] uint8, interleaved by 16 where there are kernels for them."""

    def __init__(self, form: GgufFormat) -> None:
        self._kind = _KINDS.index(form.kind)

    def is_used_on(self, device: torch.device) -> bool:
        return device.type == "cpu" and block_kernels() is not None

    def arrange(self, tensor: torch.Tensor) -> None:
        self._run(tensor, is_restored=False)

    def restore(self, tensor: torch.Tensor) -> None:
        self._run(tensor, is_restored=True)

    def _run(self, tensor: torch.Tensor, is_restored: bool) -> None:
        kernels = block_kernels()
        assert kernels is not None
        assert tensor.is_contiguous()
        _check(kernels.arrange(self._kind, tensor.data_ptr(), *tensor.shape, is_restored))


class KernelMatrix:
    """A matrix of interleaved rows, and its bias."""

    def __init__(
        self, kernels: BlockKernels, rows: torch.Tensor, form: GgufFormat, bias: torch.Tensor | None = None
    ) -> None:
        """rows: [num_outputs, bytes of a row] uint8, interleaved; bias: [num_outputs]. Both are used as they are at
        each product."""
        numbers, num_bytes = form.block
        assert rows.is_contiguous()
        assert bias is None or bias.dtype == torch.float32
        self.num_outputs, self.num_inputs = len(rows), rows.shape[1] // num_bytes * numbers
        self._kernels, self._tensors = kernels, (rows, bias)
        self._matrix = _Matrix(
            rows.data_ptr(),
            self.num_outputs,
            self.num_inputs,
            rows.shape[1],
            None if bias is None else bias.data_ptr(),
            _KINDS.index(form.kind),
            form.rounds_inputs,
        )
        self._address = ctypes.addressof(self._matrix)

    def multiply(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        epilogue: Literal["store", "add", "silu"] = "store",
        gain: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """x: [n, num_inputs] float32 -> y: [n, num_outputs] float32, which is overwritten, or added to; with "silu",
        for which the outputs are gate and up, of whole runs of 16: [n, num_outputs / 2].

        gain: [num_inputs] float32; with it the rows of x are normalised first (RMSNorm).
        """
        assert x.dtype == y.dtype == torch.float32
        assert x.stride(1) == y.stride(1) == 1
        kernels = self._kernels
        _check(
            kernels.product(
                self._address,
                x.data_ptr(),
                x.stride(0),
                len(x),
                None if gain is None else gain.data_ptr(),
                eps,
                y.data_ptr(),
                y.stride(0),
                _EPILOGUES[epilogue],
                kernels.parallel,
                num_threads(),
            )
        )
        return y

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """index: [n] int64 -> the weights of these outputs: [n, num_inputs] float32, to the last bit."""
        index = index.contiguous()
        found = torch.empty(len(index), self.num_inputs)
        _check(self._kernels.rows(self._address, index.data_ptr(), len(index), found.data_ptr()))
        return found


def _check(status: int) -> None:
    if status:
        raise MemoryError("no memory for a product of packed weights")
