"""The C functions of `product.c`: matrices in blocks, those of a GGUF file or of codes whose scales are beside them."""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from typing import Literal, Self

import torch

from ringcore.checkpoint.quantization import GgufFormat
from ringcore.kernels.native.compiled import NoLibrary, load_compiled
from ringcore.kernels.native.threads import KINDS, RUN_ARGUMENTS, check, how_to_run, num_threads, parallel
from ringcore.model_executor.linear_schemes.codes import CodePlaces
from ringcore.model_executor.weight import Arrangement

__all__ = [
    "LANES",
    "BlockKernels",
    "BlockLayout",
    "BlocksArrangement",
    "KernelMatrix",
    "RunScales",
    "block_kernels",
    "exact_form",
]

_log = logging.getLogger(__name__)

_KINDS = (  # in the order of the enum in C
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"),
    *("NIBBLES", "BYTES", "E4M3", "E2M1", "EXPONENTS"),
)
_FORMS = {"floats": 0, "rounded": 1, "pairs": 2, "integers": 3}
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
        ("scales", _pointer),
        ("zeros", _pointer),
        ("run_scales", _int64),
        ("kind", _int32),
        ("form", _int32),
        ("shift", _int32),
        ("least_zero", _int32),
    )


class BlockKernels:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.product = library.blocks_product
        self.product.argtypes = (
            *(_pointer, _pointer, _int32, _int64, _int64, _pointer, ctypes.c_float),
            *(_pointer, _int32, _int64, _int32, *RUN_ARGUMENTS),
        )
        self.experts = library.blocks_experts
        self.experts.argtypes = (
            *(_pointer, _pointer, _int64, _pointer, _int32, _int64, _pointer, _int32, _int64),
            *(_pointer, _int32),
        )
        self.arrange = library.blocks_arrange
        self.arrange.argtypes = (_int32, _pointer, _int64, _int64, _int32, _pointer, _int32)
        self.rows = library.blocks_rows
        self.rows.argtypes = (_pointer, _pointer, _int64, _pointer)
        self._gather = library.blocks_gather
        self._gather.argtypes = (_pointer, _pointer, _pointer, _int64, _int64, _int32, _pointer, _pointer, _int32)
        self.parallel = parallel()
        self.have_pairs = bool(library.blocks_have_pairs())

    def interleave(self, kind: str, rows: torch.Tensor, is_restored: bool = False) -> None:
        """rows: [num_outputs, bytes of a row] uint8, contiguous: by 16, in place, or back."""
        assert rows.is_contiguous()
        threads = self.parallel, num_threads()
        check(self.arrange(_KINDS.index(kind), rows.data_ptr(), *rows.shape, is_restored, *threads))

    def gather(self, places: CodePlaces, bits: int, rows: torch.Tensor) -> None:
        """Fills rows, [num_outputs, num_inputs * bits / 8] uint8, with codes of 4 or 8 bits as NIBBLES or BYTES have
        them, not interleaved yet."""
        out_at, in_at = places.out_at.contiguous(), places.in_at.contiguous()
        assert out_at.dtype == in_at.dtype == torch.int64
        at = places.storage.data_ptr(), out_at.data_ptr(), in_at.data_ptr(), len(out_at), len(in_at)
        check(self._gather(*at, bits, rows.data_ptr(), self.parallel, num_threads()))


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
        self._kind = form.kind

    def is_used_on(self, device: torch.device) -> bool:
        return device.type == "cpu" and block_kernels() is not None

    def arrange(self, tensor: torch.Tensor) -> None:
        self._run(tensor, is_restored=False)

    def restore(self, tensor: torch.Tensor) -> None:
        self._run(tensor, is_restored=True)

    def _run(self, tensor: torch.Tensor, is_restored: bool) -> None:
        kernels = block_kernels()
        assert kernels is not None
        kernels.interleave(self._kind, tensor, is_restored)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """kind: of the blocks, of so many `numbers` in `num_bytes`. form: of the inputs in a product. "floats": as they
    are; "rounded": to 8 bits, with a scale for each 32; "pairs": as they are, of bfloat16 inputs alone; "integers": to
    8 bits with a scale for each row, by integers with one for each output."""

    kind: str
    numbers: int
    num_bytes: int
    form: Literal["floats", "rounded", "pairs", "integers"] = "floats"

    @classmethod
    def of_file(cls, form: GgufFormat, dtype: torch.dtype = torch.float32) -> Self:
        """dtype: of the inputs."""
        return cls(form.kind, *form.block, "rounded" if form.rounds_inputs else exact_form(dtype))


def exact_form(dtype: torch.dtype) -> Literal["floats", "pairs"]:
    """The faster form for inputs of `dtype` as they are: codes are bfloat16 numbers too."""
    kernels = block_kernels()
    return "pairs" if dtype == torch.bfloat16 and kernels is not None and kernels.have_pairs else "floats"


@dataclass(frozen=True, slots=True)
class RunScales:
    """scales: [runs of 16 outputs, scales of an output, 16] float32; zeros: likewise uint8. A scale is of 2^shift
    groups of 32 inputs. least_zero: 1 where zeros of BYTES are stored less 1. E2M1 has exponents in place of zeros, and
    no scales."""

    scales: torch.Tensor | None
    zeros: torch.Tensor
    shift: int
    least_zero: int = 0


class KernelMatrix:
    """A matrix of interleaved rows, and its bias."""

    def __init__(
        self,
        kernels: BlockKernels,
        rows: torch.Tensor,
        layout: BlockLayout,
        bias: torch.Tensor | None = None,
        scales: RunScales | None = None,
        num_inputs: int | None = None,
    ) -> None:
        """rows: [num_outputs, bytes of a row] uint8, interleaved; bias: [num_outputs]. All are used as they are at each
        product. num_inputs: where a row has more than its blocks."""
        assert rows.is_contiguous()
        assert bias is None or bias.dtype == torch.float32
        held = rows.shape[1] // layout.num_bytes * layout.numbers
        self.num_outputs, self.num_inputs = len(rows), held if num_inputs is None else num_inputs
        self._kernels, self._tensors, self._has_pairs = kernels, (rows, bias, scales), layout.form == "pairs"
        self._matrix = _Matrix(
            rows.data_ptr(),
            self.num_outputs,
            self.num_inputs,
            rows.shape[1],
            None if bias is None else bias.data_ptr(),
            None if scales is None or scales.scales is None else scales.scales.data_ptr(),
            None if scales is None else scales.zeros.data_ptr(),
            0 if scales is None else scales.zeros[0].numel(),
            _KINDS.index(layout.kind),
            _FORMS[layout.form],
            0 if scales is None else scales.shift,
            0 if scales is None else scales.least_zero,
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
        """x: [n, num_inputs] -> y: [n, num_outputs], of any of float32, bfloat16 and float16, which is overwritten, or
        in float32 added to; with "silu", for which the outputs are gate and up, of whole runs of 16: [n, num_outputs /
        2].

        gain: [num_inputs] float32; with it the rows of x are normalised first (RMSNorm).
        """
        assert x.stride(1) == y.stride(1) == 1
        assert x.dtype == torch.bfloat16 or not self._has_pairs
        assert y.dtype == torch.float32 or epilogue != "add"
        kernels = self._kernels
        check(
            kernels.product(
                self._address,
                x.data_ptr(),
                KINDS[x.dtype],
                x.stride(0),
                len(x),
                None if gain is None else gain.data_ptr(),
                eps,
                y.data_ptr(),
                KINDS[y.dtype],
                y.stride(0),
                _EPILOGUES[epilogue],
                *how_to_run(),
            )
        )
        return y

    def multiply_sorted(self, x: torch.Tensor, ends: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of a matrix whose outputs are those of experts, as many of each, in whole runs. x: [n, num_inputs] sorted by
        expert; ends: [num_experts] int32, where the rows of each end -> y: [n, num_outputs / num_experts], in one call
        that reads experts with rows alone, for up to 64 rows of an expert once."""
        assert x.stride(1) == y.stride(1) == 1
        assert x.dtype == torch.bfloat16 or not self._has_pairs
        assert ends.dtype == torch.int32
        assert ends.is_contiguous()
        of_rows = x.data_ptr(), KINDS[x.dtype], x.stride(0), y.data_ptr(), KINDS[y.dtype], y.stride(0)
        threads = self._kernels.parallel, num_threads()
        check(self._kernels.experts(self._address, ends.data_ptr(), len(ends), *of_rows, *threads))
        return y

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """index: [n] int64 -> the weights of these outputs: [n, num_inputs] float32, to the last bit."""
        index = index.contiguous()
        found = torch.empty(len(index), self.num_inputs)
        check(self._kernels.rows(self._address, index.data_ptr(), len(index), found.data_ptr()))
        return found
