"""Linears of published models, the kernels that can compute them, and what was measured of these, as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.driver import BenchmarkError
from benchmarks.models import PublishedModel
from ringcore.kernels.skinny_configs import MAX_ROWS
from ringcore.kernels.skinny_tiles import Config, DotConfig, FmaConfig

__all__ = ["Kernel", "LinearCase", "Point", "Points", "cases_of", "first_kernels", "footprint", "near", "read_points"]

Role = Literal["after norm", "added", "plain"]
Kernel = Config | None  # None: cuBLAS
_MAX_FMA_ROWS = 4
_MAX_SHARED_BYTES = 200 << 10  # of a program's tiles in flight
_WARPS_AN_SM = 64
_BYTES = 2  # of a number: skinny linears are 16-bit


class LinearCase(msgspec.Struct, frozen=True):
    """x [num_rows, num_inputs] times a weight of num_outputs rows (gated: of twice as many). role: what comes before
    or after: a norm of the float32 stream, or that the result is added to it."""

    num_outputs: int
    num_inputs: int
    is_gated: bool
    role: Role
    num_rows: int

    @property
    def num_weights(self) -> int:
        return self.num_outputs * (2 if self.is_gated else 1)

    @property
    def weight_bytes(self) -> int:
        return self.num_weights * self.num_inputs * _BYTES

    @property
    def shown(self) -> str:
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows"
        gated = " gated" if self.is_gated else ""
        return f"{self.num_outputs:,}{gated} x {self.num_inputs:,} {self.role}, {rows}"


class Point(msgspec.Struct, frozen=True):
    """One kernel in one configuration. seconds: of a call among others in a CUDA graph, weights from memory; None: it
    cannot be launched, and `error` says why."""

    case: LinearCase
    kernel: str  # "fma", "dot" or "cublas"
    config: dict[str, int]
    num_bytes: int  # of the weights
    programs: int  # 0: not known
    waves: int
    seconds: float | None
    floor_share: float | None  # of the time that only reading the weights takes
    error: str = ""


class Points(msgspec.Struct, frozen=True):
    device: str
    num_sms: int
    read_bytes_per_s: float
    points: list[Point] = []


def read_points(path: Path) -> Points | None:
    """None where there is no such file yet. Raises `BenchmarkError` where it holds something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Points)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchmarkError(f"{path}: no points of linears ({error})", path=str(path)) from error


def cases_of(models: Iterable[PublishedModel], rows: Sequence[int]) -> list[LinearCase]:
    """Each once, however many models have it."""
    shapes = dict.fromkeys(shape for model in models for shape in _shapes(model))
    return [LinearCase(*shape, num_rows) for shape in shapes for num_rows in rows]


def _shapes(model: PublishedModel) -> Iterator[tuple[int, int, bool, Role]]:
    c = model.config
    hidden, heads = int(c["hidden_size"]), int(c["num_attention_heads"]) * model.head_dim
    kv_heads, inner = int(c["num_key_value_heads"]) * model.head_dim, int(c["intermediate_size"])
    yield heads + 2 * kv_heads, hidden, False, "after norm"
    yield hidden, heads, False, "added"
    yield inner, hidden, True, "after norm"
    yield hidden, inner, False, "added"
    yield int(c["vocab_size"]), hidden, False, "plain"


def first_kernels(case: LinearCase, chosen: Kernel) -> list[Kernel]:
    """Where the search begins. chosen: by the engine."""
    kernels: list[Kernel] = []
    if case.num_rows <= _MAX_FMA_ROWS:
        width = min(4096 if case.num_rows == 1 else 2048, 1 << (case.num_inputs - 1).bit_length())
        kernels.append(FmaConfig(2, width, 4))
    if 1 < case.num_rows <= MAX_ROWS:
        kernels.append(DotConfig(64, 128, 4, 3, 1))
    return list(dict.fromkeys([chosen, None, *(kernel for kernel in kernels if _can_run(kernel, case))]))


def near(kernel: Kernel, case: LinearCase) -> list[Kernel]:
    """Those that differ in one number, by a factor of 2."""
    found: list[Kernel] = []
    match kernel:
        case FmaConfig():
            found += [replace(kernel, block_outputs=n) for n in _around(kernel.block_outputs, 1, 16)]
            found += [replace(kernel, block_inputs=n) for n in _around(kernel.block_inputs, 256, 4096)]
            found += [replace(kernel, num_warps=n) for n in _around(kernel.num_warps, 1, 8)]
            found.append(replace(kernel, trigger_late=not kernel.trigger_late))
        case DotConfig():
            found += [replace(kernel, block_weights=n) for n in _around(kernel.block_weights, 32, 128)]
            found += [replace(kernel, block_inputs=n) for n in _around(kernel.block_inputs, 32, 512)]
            found += [replace(kernel, num_warps=n) for n in _around(kernel.num_warps, 4, 8)]
            found += [replace(kernel, num_stages=n) for n in (kernel.num_stages - 1, kernel.num_stages + 1) if n > 1]
            found += [replace(kernel, splits=n) for n in _around(kernel.splits, 1, 8)]
            found.append(replace(kernel, prefetched_inputs=0 if kernel.prefetched_inputs else 512))
            found += [replace(kernel, block_rows=n) for n in _around(kernel.block_rows, 16, 128)]
    return [one for one in found if _can_run(one, case)]


def _around(number: int, low: int, high: int) -> list[int]:
    return [n for n in (number // 2, number * 2) if low <= n <= high]


def _can_run(kernel: Kernel, case: LinearCase) -> bool:
    match kernel:
        case None:
            return True
        case FmaConfig():
            width = 1 << (case.num_inputs - 1).bit_length()
            return case.num_rows <= _MAX_FMA_ROWS and kernel.block_inputs <= max(width, 256)
        case DotConfig():
            block_outputs = kernel.block_weights // (2 if case.is_gated else 1)
            tiles = (kernel.block_weights + _block_rows(kernel, case)) * kernel.block_inputs * kernel.num_stages
            return (
                16 <= block_outputs <= 32 * kernel.num_warps
                and case.num_rows <= 4 * kernel.block_rows
                and kernel.block_inputs * kernel.splits <= case.num_inputs
                and tiles * _BYTES <= _MAX_SHARED_BYTES
            )


def _block_rows(kernel: DotConfig, case: LinearCase) -> int:
    rows = min(case.num_rows, kernel.block_rows)
    return max(16, 1 << (rows - 1).bit_length())


def footprint(kernel: Kernel, case: LinearCase, num_sms: int) -> tuple[str, int, int]:
    """(its name, its programs, the waves of programs if warps alone limit how many are resident). Those of cuBLAS are
    not known: 0."""
    match kernel:
        case None:
            return "cublas", 0, 0
        case FmaConfig():
            name, programs = "fma", -(-case.num_outputs // kernel.block_outputs)
        case DotConfig():
            block_outputs = kernel.block_weights // (2 if case.is_gated else 1)
            row_tiles = -(-case.num_rows // _block_rows(kernel, case))
            name, programs = "dot", -(-case.num_outputs // block_outputs) * kernel.splits * row_tiles
    return name, programs, -(-programs * kernel.num_warps // (_WARPS_AN_SM * num_sms))
