"""Decode, offline batches and prefill of models of published shapes, on one GPU or several."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from benchmarks.driver import BenchmarkError, Driver
from benchmarks.gpu_ceilings import Ceilings
from benchmarks.gpu_floors import decode_floor, offline_floor, prefill_ceiling, shared_floor
from benchmarks.gpu_options import (
    MAX_MODEL_LEN,
    Deadline,
    add_engine_arguments,
    add_option_argument,
    add_prompt_argument,
    bytes_a_number,
    gpu_specs,
    max_model_len,
    prompt_lengths,
)
from benchmarks.harness import Benchmark, EngineSpec, Fleet, Plan, interleave, note
from benchmarks.models import PublishedModel, find_published
from benchmarks.peers.gpu_loops import SHARED_REQUESTS, SHARED_TOKENS
from benchmarks.result import FAILED, Check, Findings, Limit, Measurement
from benchmarks.turns import measurements_from_rows

__all__ = ["Gpu"]

TURN_TIMEOUT_S, CEILINGS_TIMEOUT_S = 180.0, 120.0
SETTLE_S = 4.0  # as any service has before its first request; ringcore captures rarer CUDA graphs meanwhile
OFFLINE_REQUESTS, PREFILL_PROMPTS, PREFILL_TOKENS = 256, 64, MAX_MODEL_LEN - 1
WARM_UP_TOKENS, WARM_UP_SHARE = 16, 8  # of the uncounted round: new tokens; one request in so many


@dataclass(frozen=True)
class DecodeLoad:
    batch: int
    prompt_tokens: int
    new_tokens: int


DECODE_LOADS = (
    DecodeLoad(1, 128, 512),
    DecodeLoad(8, 1024, 256),
    DecodeLoad(32, 1024, 256),
    DecodeLoad(64, 1024, 256),
    DecodeLoad(256, 512, 256),
)
WHAT = ("decode", "prefill", "offline", "shared")
_COMMON_PARTS = ("decode 1", "decode 8", "decode 32", "decode 64", "offline")
_MIXTURE_PARTS = ("decode 1", "decode 8", "decode 32", "decode 256", "prefill", "offline")
# What is measured of each model where nothing else is said; of the others `_COMMON_PARTS`.
PARTS = {
    "Llama-3.2-1B": ("decode 1",),
    "Qwen3-0.6B": ("decode 1", "decode 32", "decode 256", "offline", "shared"),
    "Qwen3-4B": (*_COMMON_PARTS, "shared"),
    "Qwen3-8B": ("decode 1", "decode 32", "decode 256", "prefill", "offline"),
    "Qwen3-8B-FP8": (*_COMMON_PARTS, "decode 256"),
    "Qwen3-8B-AWQ": (*_COMMON_PARTS, "decode 256"),
    "Qwen3-30B-A3B": _MIXTURE_PARTS,
    "Qwen3-30B-A3B-FP8": _MIXTURE_PARTS,
}


@dataclass(frozen=True)
class Case:
    """One thing to measure: how it is shown, what is sent in a round, and the limits of its rows."""

    shown: str
    command: str
    arguments: Callable[[int], dict[str, Any]]  # by the round; round 0 is short and not counted
    limits: dict[str, Limit]


class Gpu(Benchmark):
    """ms a step, tokens/s of offline batches and of prompts, tokens in and out; needs no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 3

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_engine_arguments(parser)
        parser.add_argument("--what", default=",".join(WHAT), help=f"some of {','.join(WHAT)} (default: all)")
        parser.add_argument("--batches", help="decode these batches alone, e.g. 1,32 (default: as fits the model)")
        add_prompt_argument(parser)
        parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices of each stage (default: 1)")
        parser.add_argument("--pipeline-parallel-size", type=int, default=1, help="stages of each engine (default: 1)")
        parser.add_argument(
            "--one-by-one",
            action="store_true",
            help="load one engine at a time: of models too large for two",
        )
        add_option_argument(parser)
        Deadline.add_arguments(parser)

    def run(self, plan: Plan) -> Findings:
        options = plan.options
        models = find_published(options.models)
        parts = {model.name: chosen_parts(model.name, options.what, options.batches) for model in models}
        deadline = Deadline(options.seconds)
        ceilings = measure_ceilings(options.device, options.dtype)
        session = _Session(plan, ceilings, deadline)
        with tempfile.TemporaryDirectory(prefix="models-") as folder:
            for model in models:
                if deadline.allows(model.name):
                    session.measure(model, Path(folder), parts[model.name])
        return session.findings()


def chosen_parts(model: str, what: str, batches: str | None) -> list[str]:
    """Of `PARTS`, those that `what` names; batches that are named are measured of every model. Raises `BenchmarkError`
    for what there is not."""
    names = what.split(",")
    if unknown := [name for name in names if name not in WHAT]:
        raise BenchmarkError(f"--what {what}: no {unknown[0]!r}; there are: {', '.join(WHAT)}", what=what)
    known = [str(load.batch) for load in DECODE_LOADS]
    wanted = batches.split(",") if batches else []
    if unknown := [batch for batch in wanted if batch not in known]:
        raise BenchmarkError(f"--batches {batches}: no {unknown[0]!r}; there are: {', '.join(known)}", batches=batches)
    of_model = [part for part in PARTS.get(model, _COMMON_PARTS) if part.split()[0] in names]
    if not wanted or "decode" not in names:
        return of_model
    decodes = [f"decode {batch}" for batch in known if batch in wanted]
    return decodes + [part for part in of_model if not part.startswith("decode")]


def measure_ceilings(device: str, dtype: str) -> Ceilings:
    """In a process that ends before any engine starts, and takes its memory with it."""
    note("ceilings of the device")
    with Driver("ceilings", (sys.executable, "-m", "benchmarks.gpu_ceilings")) as driver:
        ceilings = Ceilings.of(driver.call("measure", CEILINGS_TIMEOUT_S, device=device, dtype=dtype))
    note(f"{ceilings.read_bytes_per_s / 1e9:,.0f} GB/s read, {ceilings.gemm_flops_per_s / 1e12:,.1f} TFLOP/s")
    return ceilings


class _Session:
    """All models of one run, one after the other; an engine that fails is out of the rest of its model's cases."""

    def __init__(self, plan: Plan, ceilings: Ceilings, deadline: Deadline) -> None:
        self._plan, self._ceilings, self._deadline = plan, ceilings, deadline
        ranks, self._num_stages = plan.options.tensor_parallel_size, plan.options.pipeline_parallel_size
        self._size: int = ranks * self._num_stages
        with_option = plan.options.with_option
        together = not plan.options.one_by_one
        self._specs = gpu_specs(plan, "gpu", ranks, together, num_stages=self._num_stages, with_option=with_option)
        self._engines: dict[str, dict[str, Any]] = {}
        self._measurements: list[Measurement] = []
        self._failures: list[Check] = []

    def measure(self, model: PublishedModel, folder: Path, parts: Sequence[str]) -> None:
        if not parts:
            return
        plan = replace(self._plan, specs=self._specs, model=model.write(folder))
        number = bytes_a_number(self._plan.options.dtype)
        lengths = prompt_lengths(self._plan.options)
        cases = make_cases(model, self._shown(model), parts, self._ceilings, self._size, number, lengths)
        if not plan.options.one_by_one:
            self._measure_fleet(plan, model, cases)
            return
        for spec in self._specs:
            try:
                self._measure_fleet(replace(plan, specs=[spec]), model, cases)
            except BenchmarkError as error:
                if spec is self._specs[0]:
                    raise
                self._fail(spec.name, model.name, error.message)

    def _measure_fleet(self, plan: Plan, model: PublishedModel, cases: Sequence[Case]) -> None:
        with ExitStack() as stack:
            fleet = stack.enter_context(Fleet(plan, may_lose_peers=True, settle_s=SETTLE_S))
            self._engines |= fleet.facts
            for name, reason in fleet.lost.items():
                self._fail(name, model.name, reason)
            alive = list(fleet.facts)
            for case in cases:
                if self._deadline.allows(case.shown):
                    self._measurements += self._take(fleet, alive, case)
                    if self._measurements:
                        self._plan.keep(self.findings())

    def _shown(self, model: PublishedModel) -> str:
        shown = model.name
        if self._plan.options.model_impl == "both":
            shown += " by both implementations"
        if self._size > 1:
            shown += f" on {self._size} devices"
        if self._plan.options.expert_parallel:
            shown += ", expert-parallel"
        if self._plan.options.deterministic:
            shown += ", deterministic beside the default"
        return shown + (f" in {self._num_stages} stages" if self._num_stages > 1 else "")

    def _take(self, fleet: Fleet, alive: list[str], case: Case) -> list[Measurement]:
        """`alive` loses the engines that fail."""

        def turn(name: str, round_: int) -> list[Any]:
            if name not in alive:
                return []
            try:
                with fleet.turn(name) as driver:
                    rows: list[Any] = driver.call(case.command, TURN_TIMEOUT_S, **case.arguments(round_))
            except BenchmarkError as error:
                alive.remove(name)
                self._fail(name, case.shown, error.message)
                return []
            shown = ", ".join(f"{value:.4g} {unit} {label}" for label, unit, value in rows)
            note(f"{case.shown}, round {round_} of {self._plan.rounds}: {name} {shown}")
            return rows

        taken = interleave(list(alive), self._plan.rounds, turn)
        whole = {name: rounds for name, rounds in taken.items() if name in alive}
        return measurements_from_rows(whole, case.limits, prefix=f"{case.shown}, ")

    def _fail(self, name: str, what: str, reason: str) -> None:
        note(f"{name} failed, {what}: {reason}")
        first = reason.splitlines()[0]
        self._failures.append(Check(name=f"{name}{FAILED}{what}", value=first))

    def findings(self) -> Findings:
        names = [spec.name for spec in self._specs if spec.name in self._engines]
        if not self._measurements:
            raise BenchmarkError("nothing was measured: no model has the parts asked for, or all engines failed")
        return Findings(
            measurements=_joined(self._measurements),
            engines={name: self._engines[name] for name in names},
            conditions=_conditions(self._plan.options, self._specs),
            checks=self._failures,
        )


def _joined(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Those of one name, of engines loaded one at a time, as one."""
    found: dict[str, Measurement] = {}
    for one in measurements:
        before = found.get(one.name, one)
        found[one.name] = msgspec.structs.replace(before, samples=before.samples | one.samples)
    return [*found.values()]


def make_cases(
    model: PublishedModel,
    shown: str,
    parts: Sequence[str],
    ceilings: Ceilings,
    size: int,
    bytes_a_number: int,
    prompt_tokens: Sequence[int] = (),
) -> list[Case]:
    """In the order of `parts`. shown: how the cases name the model. size: devices, over all stages. prompt_tokens: of
    decodes, one after the other, in place of the batch's."""
    loads = {f"decode {load.batch}": load for load in DECODE_LOADS}
    cases = []
    for part in parts:
        if part in loads:
            for tokens in prompt_tokens or (loads[part].prompt_tokens,):
                load = replace(loads[part], prompt_tokens=tokens)
                cases.append(_decode_case(shown, model, load, ceilings, size, bytes_a_number))
        elif part == "prefill":
            limit = prefill_ceiling(model, ceilings, size, PREFILL_PROMPTS, PREFILL_TOKENS)
            label = f"{shown}, prefill of {PREFILL_PROMPTS} prompts of {PREFILL_TOKENS:,} tokens"
            cases.append(Case(label, "prefill", _prefill_arguments, {"prompts": limit}))
        elif part == "shared":
            floor = shared_floor(model, ceilings, size, bytes_a_number, SHARED_REQUESTS)
            label = f"{shown}, {SHARED_REQUESTS} requests that share {SHARED_TOKENS:,} tokens"
            cases.append(Case(label, "shared", _shared_arguments, {"all requests": floor}))
        else:
            floor = offline_floor(model, ceilings, size, bytes_a_number, OFFLINE_REQUESTS)
            label = f"{shown}, offline, {OFFLINE_REQUESTS} requests"
            cases.append(Case(label, "offline", _offline_arguments, {"all requests": floor}))
    return cases


def _decode_case(
    shown: str, model: PublishedModel, load: DecodeLoad, ceilings: Ceilings, size: int, bytes_a_number: int
) -> Case:
    context = load.prompt_tokens + load.new_tokens / 2
    floor = decode_floor(model, ceilings, size, bytes_a_number, load.batch, context)

    def arguments(round_: int) -> dict[str, Any]:
        new = load.new_tokens if round_ else WARM_UP_TOKENS
        return {"batch": load.batch, "prompt_tokens": load.prompt_tokens, "new_tokens": new}

    label = f"{shown}, batch {load.batch} ({load.prompt_tokens:,} in, {load.new_tokens} out)"
    return Case(label, "decode", arguments, {"a step": floor})


def _prefill_arguments(round_: int) -> dict[str, Any]:
    num_prompts = PREFILL_PROMPTS if round_ else PREFILL_PROMPTS // WARM_UP_SHARE
    return {"num_prompts": num_prompts, "prompt_tokens": PREFILL_TOKENS, "turn": round_}


def _offline_arguments(round_: int) -> dict[str, Any]:
    return {"num_requests": OFFLINE_REQUESTS if round_ else OFFLINE_REQUESTS // WARM_UP_SHARE, "turn": round_}


def _shared_arguments(round_: int) -> dict[str, Any]:
    return {"num_requests": SHARED_REQUESTS if round_ else SHARED_REQUESTS // WARM_UP_SHARE, "turn": round_}


def _conditions(options: argparse.Namespace, specs: Sequence[EngineSpec]) -> list[str]:
    share = specs[0].settings["memory_share"]
    loaded = (
        "loaded alone, one after the other: their rounds do not alternate"
        if options.one_by_one
        else "all are loaded at once, and all but the one whose turn it is are stopped, the first time "
        f"{SETTLE_S:.0f} s after it was loaded"
    )
    return [
        f"Models of the published shapes with random weights in {options.dtype}; tokens in, tokens out, past any end "
        f"of text; max_model_len {max_model_len(options):,}, {share:.0%} of the device's memory for each engine, all "
        "else its default.",
        "A step: greedy, prompts cached, (t(n tokens) - t(1 token)) / (n - 1) by the wall clock around the call. "
        "Offline: nano-vllm's benchmark, prompts and completions of 100 to 1,024 tokens, temperature 0.6. Prefill: one "
        "token each. Shared: greedy, all at once, 20 to 300 tokens of their own after the shared ones, 8 to 128 new. "
        "Before offline batches, prefill and shared the prefix cache is emptied.",
        "The limits count with the rates at which a kernel that only reads, and a product of 8192 x 8192 matrices that "
        "is repeated until the clocks settle, ran in the same run.",
        f"Every engine is a process of its own; {loaded}. The uncounted round is a short one.",
    ]
