"""What a token costs in front of the model: ringcore's front end and service, where the workers cost nothing."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.driver import ROOT, BenchmarkError, Driver
from benchmarks.harness import Benchmark, EngineSpec, Plan, load_engine, note, numbers
from benchmarks.peers.front_end_ringcore import split_processes
from benchmarks.peers.queue_loops import cpu_s
from benchmarks.peers.text_executor import PACED_STEP_S, TEXT_FILE
from benchmarks.prompts import PromptStream
from benchmarks.result import Check, Findings, Limit, Measurement
from benchmarks.turns import measurements_from_rows
from ringcore.checkpoint.tokenizer import load_tokenizer

__all__ = ["Case", "FrontEnd", "make_cases", "token_rows"]

STREAMS = "1,64,256"
FLAT_OUT_TOKENS, MIN_TOKENS, MAX_TOKENS = 1 << 15, 128, 4096  # new ones: of all streams, and of one
PACED_TOKENS = 100  # of one stream
SHORT_REQUESTS = 256
TEXT_TOKENS = 4096
TIMEOUT_S = 120.0
MAX_MODEL_LEN = 8192
PLACES = {"AsyncEngine": "front_end", "service": "service"}  # -> the child's module
EXECUTORS = {"flat out": "FlatOutExecutor", "paced": "PacedExecutor"}


@dataclass(frozen=True)
class Case:
    """Requests that come together: as fast as it goes, or at the pace of steps."""

    num_streams: int
    new_tokens: int  # of each
    pace: str

    @property
    def shown(self) -> str:
        if self.new_tokens == 1:
            return f"{self.num_streams} requests of one token"
        return f"{self.num_streams} stream{'s' * (self.num_streams > 1)}, {self.pace}"


class FrontEnd(Benchmark):
    """µs of CPU a token in front of the model: tokenizer, AsyncEngine, service; with workers that cost nothing"""

    default_rounds: ClassVar[int] = 3

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--streams", default=STREAMS, help=f"how many at once (default: {STREAMS})")

    def run(self, plan: Plan) -> Findings:
        if len(plan.specs) > 1:
            raise BenchmarkError("--peer: the front end is measured alone; leave it out")
        cases = make_cases(numbers("--streams", plan.options.streams))
        with tempfile.TemporaryDirectory(prefix="model-") as folder, ExitStack() as stack:
            model = Path(folder)
            token_ids = write_model(plan.model, model)
            session = _Session(stack, replace(plan, model=model), token_ids)
            measurements = [one for place in PLACES for case in cases for one in session.measure(place, case)]
        return Findings(
            measurements=measurements, engines=session.facts, conditions=_conditions(), checks=session.checks()
        )


def make_cases(sizes: Sequence[int]) -> list[Case]:
    flat_out = [Case(n, min(max(FLAT_OUT_TOKENS // n, MIN_TOKENS), MAX_TOKENS), "flat out") for n in sizes]
    return [*(Case(n, PACED_TOKENS, "paced") for n in sizes), *flat_out, Case(SHORT_REQUESTS, 1, "flat out")]


def write_model(source: Path, folder: Path) -> list[int]:
    """The tokenizer and the shapes of a model without its weights, and a text in its tokens, which is returned."""
    for file in source.glob("*.json"):
        if "safetensors" not in file.name:
            (folder / file.name).symlink_to(file.resolve())
    texts, tokenizer = PromptStream(), load_tokenizer(source)
    token_ids: list[int] = []
    while len(token_ids) < TEXT_TOKENS:
        token_ids += tokenizer.encode(f" {texts.take(1)[0]}.", add_special_tokens=False)
    (folder / TEXT_FILE).write_text(str(token_ids[:TEXT_TOKENS]))
    return token_ids[:TEXT_TOKENS]


class _Session:
    """Every place at every pace is loaded, and idle unless it is its turn."""

    def __init__(self, stack: ExitStack, plan: Plan, token_ids: list[int]) -> None:
        self._plan = plan
        self._engines: dict[tuple[str, str], Driver] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        for place, module in PLACES.items():
            for pace, executor in EXECUTORS.items():
                spec = _spec(place, module, executor)
                driver = stack.enter_context(spec.start())
                self.facts["ringcore"] = load_engine(driver, spec, plan.model).facts | {"settings": {}}
                self._engines[place, pace] = driver
        self._clients = stack.enter_context(
            Driver("load generator", (sys.executable, "-m", "benchmarks.peers.load_generator"))
        )
        ask = self._engines["AsyncEngine", "paced"].call
        self._alone = ask("alone", TIMEOUT_S, model=str(plan.model), token_ids=token_ids)
        self._num_turns = 0

    def measure(self, place: str, case: Case) -> list[Measurement]:
        shown = f"{place}, {case.shown}"
        rounds = []
        for round_ in range(self._plan.rounds + 1):
            rows = self._turn(place, case)
            note(
                f"{shown}, round {round_} of {self._plan.rounds}: " + ", ".join(f"{n} {v:.4g} {u}" for n, u, v in rows)
            )
            rounds.append(rows)
        return measurements_from_rows({"ringcore": rounds[1:]}, self._limits(place, case), prefix=f"{shown}, ")

    def _turn(self, place: str, case: Case) -> list[Any]:
        driver = self._engines[place, case.pace]
        front_end = driver.call("pid", TIMEOUT_S)
        processes = split_processes(front_end)
        loads = [{"prompt": self._prompt(i), "max_tokens": case.new_tokens} for i in range(case.num_streams)]
        self._num_turns += 1
        before_s = [sum(map(cpu_s, pids)) for pids in processes]
        reply = self._play(place, driver, loads)
        front_end_us, engine_us = (
            1e6 * (sum(map(cpu_s, pids)) - was_s) for pids, was_s in zip(processes, before_s, strict=True)
        )
        return token_rows(reply, front_end_us, engine_us, case.num_streams)

    def _prompt(self, number: int) -> str:
        return f"{self._num_turns:04}. Of request {number:04} this is the prompt, of some twenty tokens, all in all."

    def _play(self, place: str, driver: Driver, loads: list[dict[str, Any]]) -> Mapping[str, Any]:
        if place == "AsyncEngine":
            reply: Mapping[str, Any] = driver.call("stream", 2 * TIMEOUT_S, loads=loads, limit_s=TIMEOUT_S)
            return reply
        at_once = {"target": driver.call("target", TIMEOUT_S), "loads": loads, "rate": 1e9, "seed": 0}
        arrived: Mapping[str, Any] = self._clients.call("arrive", 2 * TIMEOUT_S, limit_s=TIMEOUT_S, **at_once)
        return arrived

    def _limits(self, place: str, case: Case) -> dict[str, Limit]:
        if case.new_tokens == 1:
            return {}
        decode_us, write_us = self._alone["decode_us"], self._alone["write_us"]
        if place == "service" and case.pace == "paced":
            statement = f"decoding, and one write of {self._alone['event_bytes']} bytes to a TCP connection, alone"
            return {
                "front end": Limit(value=decode_us + write_us, statement=f"{statement}: {decode_us + write_us:.2f} µs")
            }
        return {"front end": Limit(value=decode_us, statement=f"decoding alone: {decode_us:.2f} µs")}

    def checks(self) -> list[Check]:
        shown = "{encode_us:.2f} µs of CPU to encode, {decode_us:.2f} to decode; {write_us:.2f} to write an event"
        return [Check(name="alone, a token", value=shown.format(**self._alone), data=self._alone)]


def token_rows(reply: Mapping[str, Any], front_end_us: float, engine_us: float, num_requests: int) -> list[Any]:
    """By token; of requests of one token, by request."""
    num_tokens, num_outputs = reply["completion_tokens"], reply["num_events"]
    if num_tokens == num_requests:
        seconds = num_tokens / {name: value for name, _, value in reply["rows"]}["output"]
        unit, rows = "µs of CPU a request", [("rate", "requests/s", num_requests / seconds)]
    else:
        unit, rows = "µs of CPU a token", [(*row,) for row in reply["rows"] if row[0] == "output"]
    rows += [("front end", unit, front_end_us / num_tokens), ("engine", unit, engine_us / num_tokens)]
    if num_tokens > num_requests:
        rows.append(("an output has", "tokens", num_tokens / num_outputs))
    return rows


def _spec(place: str, module: str, executor: str) -> EngineSpec:
    engine = {
        "load_format": "dummy",
        "executor": f"benchmarks.peers.text_executor:{executor}",
        "max_model_len": MAX_MODEL_LEN,
    }
    command = (sys.executable, "-m", f"benchmarks.peers.{module}_ringcore")
    return EngineSpec(place, command, "", settings={"engine": engine}, env={"PYTHONPATH": str(ROOT)})


def _conditions() -> list[str]:
    return [
        "A real tokenizer, and in place of the workers an executor in the engine's process that says a text, every "
        f"stream from another place on. Paced: a step takes {1e3 * PACED_STEP_S:.0f} ms, {PACED_TOKENS} steps. "
        f"Flat out: as fast as the engine asks, {MAX_TOKENS:,} to {MIN_TOKENS} tokens a stream, the more the fewer.",
        "All requests come at once: prompts of some twenty tokens, greedy, deltas. AsyncEngine: a task of the same "
        "loop reads each stream. Service: `ringcore serve` to a client in another process, server-sent events.",
        "The CPU time of a process with all its threads, from before the first request to after the last token, over "
        "the tokens. Front end: the process that has the tokenizer, the event loop and, of a service, HTTP.",
        "An output has several tokens where a reader was slower than the engine: tokens that wait are merged, which "
        "costs less than giving each out.",
    ]
