"""Linears of published models, the kernels that can compute them, and what was measured of these, as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.driver import BenchmarkError
from benchmarks.models import PublishedModel
from ringcore.kernels.linears.skinny_tiles import DotConfig, FmaConfig, TmaConfig
from ringcore.kernels.search.tile_candidates import Kernel, block_rows

__all__ = ["LinearCase", "Point", "Points", "cases_of", "footprint", "read_points"]

Role = Literal["after norm", "added", "plain"]
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
    kernel: str  # "fma", "dot", "tma" or "cublas"
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
    has_wgmma: bool = False


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
            row_tiles = -(-case.num_rows // block_rows(kernel, case))
            name, programs = "dot", -(-case.num_outputs // block_outputs) * kernel.splits * row_tiles
        case TmaConfig():
            items = -(-case.num_weights // kernel.block_weights) * kernel.splits
            resident = kernel.programs_per_sm * num_sms
            name, programs = "tma", resident if kernel.is_even else min(items, resident)
    return name, programs, -(-programs * kernel.num_warps // (_WARPS_AN_SM * num_sms))
