"""One layer's attention by backend: how fast decoding reads the KV cache, and how fast prompts are multiplied."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from benchmarks.driver import BenchmarkError, Driver
from benchmarks.gpu import measure_ceilings
from benchmarks.gpu_ceilings import Ceilings
from benchmarks.gpu_options import Deadline, add_place_arguments
from benchmarks.harness import Benchmark, Plan, interleave, note, numbers
from benchmarks.peers.attention_backends import APART
from benchmarks.result import FAILED, Check, Findings, Limit, Measurement
from benchmarks.turns import measurements_from_rows
from ringcore.config.options import ATTENTION_BACKENDS

__all__ = ["GpuAttention"]

TIMEOUT_S = 120.0
HEAD_SIZE = 128
BLOCK_SIZE = 16  # rows of it do not say so
KINDS = ("decode", "prefill")
KV_DTYPES = ("auto", "fp8")  # of `kv_cache_dtype`
FP8_NAME = ", KV in FP8"


@dataclass(frozen=True)
class Case:
    """Sequences of `low` to `high` tokens."""

    kind: str
    num_seqs: int
    low: int
    high: int
    num_heads: int
    num_kv_heads: int = 8
    shared: int = 0  # of the tokens: the first, which all sequences have in common

    @property
    def shown(self) -> str:
        tokens = f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"
        heads = f"{self.num_heads} query and {self.num_kv_heads} KV heads"
        shared = f", the first {self.shared:,} shared" if self.shared else ""
        return f"{self.kind}, {self.num_seqs} x {tokens} tokens{shared}, {heads}"

    def shape(self, dtype: str, is_fp8: bool = False, block_size: int = BLOCK_SIZE) -> dict[str, Any]:
        draw = random.Random(self.num_seqs)
        lens = [draw.randint(self.low, self.high) for _ in range(self.num_seqs)]
        heads = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_size": HEAD_SIZE}
        shape = {"lens": lens, **heads, "block_size": block_size, "dtype": dtype, "is_fp8": is_fp8}
        return shape | ({"shared": self.shared} if self.shared else {})


CASES = (
    Case("decode", 256, 1000, 1000, 16),
    Case("decode", 256, 1000, 1000, 32),
    Case("decode", 256, 500, 1500, 16),
    Case("decode", 32, 1024, 1280, 32),
    Case("decode", 8, 32768, 32768, 32),
    Case("decode", 1, 32768, 32768, 16),
    Case("decode", 1, 640, 640, 16),
    Case("decode", 256, 1020, 1300, 16, shared=992),
    Case("decode", 256, 1020, 1300, 32, shared=992),
    Case("decode", 64, 1020, 1300, 32, shared=992),
    Case("decode", 16, 1020, 1300, 32, shared=992),
    Case("decode", 8, 16400, 16700, 32, shared=16384),
    Case("prefill", 16, 1024, 1024, 16),
    Case("prefill", 4, 4096, 4096, 32),
)


class GpuAttention(Benchmark):
    """GB/s of KV cache read and TFLOP/s of prompts by attention backend; needs no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 7

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_place_arguments(parser)
        names = [name for name in ATTENTION_BACKENDS if name != "auto"]
        parser.add_argument("--backends", default=",".join(names), help=f"some of {','.join(names)} (default: all)")
        parser.add_argument("--what", default=",".join(KINDS), help=f"some of {','.join(KINDS)} (default: both)")
        parser.add_argument(
            "--kv-cache-dtypes", default=",".join(KV_DTYPES), help=f"some of {','.join(KV_DTYPES)} (default: both)"
        )
        parser.add_argument("--block-sizes", default=str(BLOCK_SIZE), help=f"of the KV cache (default: {BLOCK_SIZE})")
        Deadline.add_arguments(parser)

    def run(self, plan: Plan) -> Findings:
        options = plan.options
        block_sizes = numbers("--block-sizes", options.block_sizes)
        kinds, names = options.what.split(","), options.backends.split(",")
        _check_known("--what", kinds, KINDS)
        _check_known("--backends", names, ATTENTION_BACKENDS[1:])
        _check_known("--kv-cache-dtypes", stored := options.kv_cache_dtypes.split(","), KV_DTYPES)
        ceilings, deadline = measure_ceilings(options.device, options.dtype), Deadline(options.seconds)
        with Driver("attention", (sys.executable, "-m", "benchmarks.peers.attention_backends")) as driver:
            session = _Session(driver, driver.call("load", TIMEOUT_S, device=options.device), names)
            for case, kv_dtype, block_size in itertools.product(CASES, stored, block_sizes):
                if case.kind in kinds and deadline.allows(case.shown):
                    shape = case.shape(options.dtype, kv_dtype == "fp8", block_size)
                    session.measure(case, shape, plan.rounds, ceilings)
                    if session.has_measured:
                        plan.keep(session.findings(options.dtype))
        return session.findings(options.dtype)


def _check_known(option: str, given: list[str], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise BenchmarkError(f"{option}: no {name!r}; there are: {', '.join(known)}", name=name)


class _Session:
    """A backend that refuses a shape, or fails at it, is out of that case, and a check says why."""

    def __init__(self, driver: Driver, facts: dict[str, Any], names: list[str]) -> None:
        self._driver, self._names = driver, names
        self._facts = {"python": facts["python"], "packages": facts["packages"], "settings": {}, "env": {}}
        self._measurements: list[Measurement] = []
        self._reasons: dict[str, str] = {}  # check -> why

    def measure(self, case: Case, shape: dict[str, Any], rounds: int, ceilings: Ceilings) -> None:
        """shape: of the case."""
        shown = case.shown + (FP8_NAME if shape["is_fp8"] else "")
        if shape["block_size"] != BLOCK_SIZE:
            shown += f", blocks of {shape['block_size']}"
        able = [name for name in self._names_of(case) if self._accepts(name, shape)]

        def turn(name: str, round_: int) -> list[Any]:
            if name not in able:
                return []
            try:
                rows: list[Any] = self._driver.call("measure", TIMEOUT_S, backend=name, kind=case.kind, shape=shape)
            except BenchmarkError as error:
                able.remove(name)
                self._reasons[f"{name}{FAILED}{shown}"] = error.message.splitlines()[0]
                return []
            note(f"{shown}, round {round_} of {rounds}: {name} {rows[0][2]:,.1f} {rows[0][1]}")
            return rows

        taken = interleave(list(able), rounds, turn)
        limits = _limits(case.kind, ceilings)
        whole = {name: samples for name, samples in taken.items() if name in able}
        self._measurements += measurements_from_rows(whole, limits, prefix=f"{shown}, ")

    def _names_of(self, case: Case) -> list[str]:
        """The backend that reads a shared prefix once is also measured without that."""
        return [*self._names, *(name + APART for name in self._names if case.shared and name == "triton")]

    @property
    def has_measured(self) -> bool:
        return bool(self._measurements)

    def _accepts(self, name: str, shape: dict[str, Any]) -> bool:
        reason = self._driver.call("refusal", TIMEOUT_S, backend=name, shape=shape)
        if reason is not None:
            self._reasons[f"{name} refuses{FP8_NAME if shape['is_fp8'] else ''}"] = reason
        return reason is None

    def findings(self, dtype: str) -> Findings:
        if not self._measurements:
            raise BenchmarkError(f"nothing was measured: {self._reasons or 'no time'}")
        checks = [Check(name=name, value=reason) for name, reason in self._reasons.items()]
        took_part = {name for measurement in self._measurements for name in measurement.samples}
        return Findings(
            measurements=self._measurements,
            engines=dict.fromkeys(sorted(took_part, key=self._place), self._facts),
            conditions=_conditions(dtype),
            checks=checks,
        )

    def _place(self, name: str) -> tuple[int, str]:
        return self._names.index(name.removesuffix(APART)), name


def _limits(kind: str, ceilings: Ceilings) -> dict[str, Limit]:
    if kind == "decode":
        rate = ceilings.read_bytes_per_s / 1e9
        return {"KV cache read": Limit(value=rate, statement=f"a kernel that only reads, {rate:,.0f} GB/s")}
    rate = ceilings.gemm_flops_per_s / 1e12
    return {"products": Limit(value=rate, statement=f"a large matrix product, {rate:,.0f} TFLOP/s")}


def _conditions(dtype: str) -> list[str]:
    return [
        f"One layer in {dtype}, heads of {HEAD_SIZE}, blocks of {BLOCK_SIZE} where not said, in random order; random "
        "keys, values and queries. Each result is compared with attention in float32 before it is timed.",
        "Decode: one token of each sequence, in a CUDA graph, over caches that together do not fit the L2; what all "
        "layers of a step share is planned before, and the new tokens' keys are in the cache where the backend can "
        "be told so. Prefill: whole prompts that share nothing, their keys written on the way; products of the causal "
        "half. KV in FP8: as kv_cache_dtype='fp8' stores it; the bytes read are codes and scales. Shared: the first "
        "blocks of all sequences are the same, and count once among the bytes read.",
    ]
