"""ringcore's service beside its peer's, under the same requests: what they take, and how long an answer takes."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.driver import BenchmarkError, Driver
from benchmarks.gpu_options import add_place_arguments, without_cpu_settings
from benchmarks.harness import Benchmark, EngineSpec, Fleet, Plan, child_specs, interleave, note
from benchmarks.made_tokenizer import write_tokenizer
from benchmarks.models import find_published
from benchmarks.prompts import PromptStream
from benchmarks.result import Check, Findings, Measurement
from benchmarks.stats import summarize
from benchmarks.turns import measurements_from_rows
from ringcore.checkpoint.tokenizer import Tokenizer, load_tokenizer

__all__ = ["SHARES", "Range", "ServiceLoad", "make_loads", "the_same_rate"]

SHARES = (0.3, 0.6, 0.9)  # of a service's own saturation
SAME_SHARE = 0.6  # of the slower one's
SEED = 7
MAX_ROUNDS = 99  # numbers have four digits
SLACK_S = 240.0  # of a turn, beyond the last arrival
SATURATE_TIMEOUT_S = 570.0
MAX_MODEL_LEN = 4096
BESIDE_SHARE, ALONE_SHARE = 0.4, 0.9  # of a GPU's memory, for each service
Range = tuple[int, int]
Reply = dict[str, Any]


class ServiceLoad(Benchmark):
    """requests/s, time to first token and between tokens of a service over HTTP, under Poisson arrivals"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 2

    # Of the options; a subclass for another kind of machine has others.
    defaults: ClassVar[dict[str, Any]] = {
        "device": "cpu",
        "dtype": "float32",
        "shapes": None,
        "requests": 32,
        "saturating_requests": 72,
        "concurrency": 24,
        "prompt_tokens": "32-128",
        "new_tokens": "16-96",
    }

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_place_arguments(parser)
        parser.add_argument("--shapes", help="a model of these published shapes with random weights, for --model")
        parser.add_argument("--requests", type=int, help="that arrive at each rate")
        parser.add_argument("--saturating-requests", type=int, help="in all, to find the saturation")
        parser.add_argument("--concurrency", type=int, help="that are under way in saturation")
        parser.add_argument("--prompt-tokens", help="from-to, about")
        parser.add_argument("--new-tokens", help="from-to")
        parser.set_defaults(**cls.defaults)
        parser.epilog = "Defaults: " + ", ".join(f"{name} {value}" for name, value in cls.defaults.items() if value)

    def run(self, plan: Plan) -> Findings:
        options = plan.options
        lengths = _range("--prompt-tokens", options.prompt_tokens), _range("--new-tokens", options.new_tokens)
        if options.saturating_requests < 2 * options.concurrency:
            raise BenchmarkError(
                f"--saturating-requests {options.saturating_requests}: give at least twice --concurrency "
                f"{options.concurrency}, so that all places are taken for a while"
            )
        specs = _specs(plan)
        with _model(plan) as model:
            tokenizer = load_tokenizer(model)
            load_generator = (sys.executable, "-m", "benchmarks.peers.load_generator")
            served = replace(plan, specs=specs, model=model)
            with Driver("load generator", load_generator) as clients, Fleet(served) as fleet:
                session = _Session(served, fleet, clients, lambda num: make_loads(tokenizer, num, *lengths))
                measurements = session.measure()
        return Findings(
            measurements=measurements,
            engines=fleet.facts,
            conditions=_conditions(plan, model.name, specs),
            checks=session.checks(),
        )


def _specs(plan: Plan) -> list[EngineSpec]:
    options = plan.options
    engine: dict[str, Any] = {"dtype": options.dtype, "max_model_len": MAX_MODEL_LEN}
    if options.shapes:
        engine["load_format"] = "dummy"
    if options.device == "cuda":
        engine["gpu_memory_utilization"] = BESIDE_SHARE if len(plan.specs) > 1 else ALONE_SHARE
    mode = next((spec.settings["mode"] for spec in plan.specs if "mode" in spec.settings), "eager")
    settings = {"engine": engine | {"device": options.device}, "mode": mode}
    specs = child_specs(plan.specs, "service", "service", settings)
    return [without_cpu_settings(spec) for spec in specs] if options.device == "cuda" else specs


@contextmanager
def _model(plan: Plan) -> Any:
    """The folder of what is served."""
    if plan.options.shapes is None:
        if not plan.model.is_dir():
            raise BenchmarkError(f"--model {plan.model}: no such folder; `make setup` makes the default one")
        yield plan.model
        return
    (shapes,) = find_published(plan.options.shapes)
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        path = shapes.write(Path(folder))
        write_tokenizer(path, dict(shapes.config))
        yield path


def _range(option: str, text: str) -> Range:
    low, dash, high = text.partition("-")
    values = [int(value) if value.isdecimal() else 0 for value in (low, high if dash else low)]
    if not 1 <= values[0] <= values[1]:
        raise BenchmarkError(f"{option} {text}: give two numbers of at least 1, as in 32-128")
    return values[0], values[1]


def make_loads(tokenizer: Tokenizer, num: int, prompt_tokens: Range, new_tokens: Range) -> list[dict[str, Any]]:
    """Requests of lengths that are even over both ranges: the same ones at every call, the first ones of any number."""
    lengths, texts = random.Random(SEED), PromptStream(SEED)
    loads = []
    for _ in range(num):
        num_prompt, num_new = lengths.randint(*prompt_tokens), lengths.randint(*new_tokens)
        ids: list[int] = []
        while len(ids) < num_prompt:
            ids += tokenizer.encode(f"{texts.take(1)[0]}. ", add_special_tokens=False)
        loads.append({"prompt": tokenizer.decode(ids[:num_prompt]), "max_tokens": num_new})
    return loads


class _Session:
    """All levels, one after the other, all services in turn at each.

    Every turn sends the same requests, but for a number that begins each prompt, the same for all services in a round:
    no turn finds an earlier one's in a cache.
    """

    def __init__(self, plan: Plan, fleet: Fleet, clients: Driver, make: Callable[[int], list[dict[str, Any]]]) -> None:
        self._plan, self._fleet, self._clients = plan, fleet, clients
        options = plan.options
        self._concurrency: int = options.concurrency
        self._saturating, self._arriving = make(options.saturating_requests), make(options.requests)
        self._names = list(fleet.facts)
        self._targets: dict[str, Any] = {}
        self._num_levels = 0
        self._core_share = self._latest_ms = 0.0
        self._rates: dict[str, dict[str, float]] = {}  # level -> service -> requests/s
        self._texts: dict[str, list[str]] = {}  # of the same rate
        self._saturation: dict[str, float] = {}

    def measure(self) -> list[Measurement]:
        replies = self._take("saturation", self._saturate)
        measurements = measurements_from_rows(replies, prefix="saturation, ")
        for share in SHARES:
            rates = {name: share * self._saturation[name] for name in self._names}
            measurements += self._measure_arrivals(f"{share:.0%} of its own saturation", rates)
        rates = dict.fromkeys(self._names, the_same_rate(self._saturation))
        return measurements + self._measure_arrivals("the same rate", rates)

    def _measure_arrivals(self, level: str, rates: Mapping[str, float]) -> list[Measurement]:
        self._rates[level] = dict(rates)

        def turn(name: str, round_: int) -> Reply | None:
            if round_ == 0:
                return None  # the saturation before has warmed everything up
            return self._ask(name, "arrive", round_, self._arriving, rates[name])

        return measurements_from_rows(self._take(level, turn), prefix=f"{level}, ")

    def _saturate(self, name: str, round_: int) -> Reply:
        if round_ == 0:
            self._ask(name, "saturate", MAX_ROUNDS, self._saturating[: 2 * self._concurrency])
        reply = self._ask(name, "saturate", round_, self._saturating)
        if round_ == 0:
            self._saturation[name] = {row: value for row, _, value in reply["rows"]}["requests"]
        return reply

    def _take(self, level: str, turn: Callable[[str, int], Reply | None]) -> dict[str, list[Any]]:
        self._num_levels += 1

        def noted(name: str, round_: int) -> list[Any]:
            reply = turn(name, round_)
            if reply is None:
                return []
            self._core_share = max(self._core_share, reply["core_share"])
            self._latest_ms = max(self._latest_ms, reply["latest_ms"])
            if level == "the same rate":
                self._texts.setdefault(name, reply["texts"])
            shown = ", ".join(f"{label} {value:.4g} {unit}" for label, unit, value in reply["rows"])
            note(f"{level}, round {round_} of {self._plan.rounds}: {name} {shown}")
            rows: list[Any] = reply["rows"]
            return rows

        return interleave(self._names, self._plan.rounds, noted)

    def _ask(
        self, name: str, command: str, round_: int, loads: Sequence[Mapping[str, Any]], rate: float | None = None
    ) -> Reply:
        number = (MAX_ROUNDS + 1) * (10 + self._num_levels) + round_
        numbered = [{**load, "prompt": f"{number}. {load['prompt']}"} for load in loads]
        timeout_s = SATURATE_TIMEOUT_S if rate is None else SLACK_S + 2 * len(loads) / rate
        how = {"concurrency": self._concurrency} if rate is None else {"rate": rate, "seed": SEED}
        with self._fleet.turn(name) as driver:
            if name not in self._targets:
                self._targets[name] = driver.call("target", SLACK_S)
            arguments = {"target": self._targets[name], "loads": numbered, "limit_s": timeout_s, **how}
            reply: Reply = self._clients.call(command, timeout_s + SLACK_S, **arguments)
        return reply

    def checks(self) -> list[Check]:
        rates = [
            Check(
                name=f"arrivals a second, {level}",
                value=", ".join(f"{name} {rate:.3g}" for name, rate in by_name.items()),
                data=by_name,
            )
            for level, by_name in self._rates.items()
        ]
        ours, *peers = self._names
        real = [] if self._plan.options.shapes else peers  # engines make random weights of their own
        pairs = {peer: list(zip(self._texts[ours], self._texts[peer], strict=True)) for peer in real}
        return [
            *rates,
            Check(name="the load generator's share of a core, at most", value=f"{self._core_share:.0%}"),
            Check(name="the latest that a request was sent after its time, ms", value=f"{self._latest_ms:.1f}"),
            *(
                Check(name=f"texts equal to those of {peer}", value=f"{sum(a == b for a, b in both)} of {len(both)}")
                for peer, both in pairs.items()
            ),
        ]


def the_same_rate(saturation: Mapping[str, float]) -> float:
    """Requests/s that every service can take."""
    return SAME_SHARE * summarize(list(saturation.values())).low


def _conditions(plan: Plan, model: str, specs: Sequence[EngineSpec]) -> list[str]:
    options = plan.options
    peer_mode = f"; vllm {specs[0].settings['mode']}" if len(specs) > 1 else ""
    weights = "random weights and a tokenizer of made-up merges" if options.shapes else "its weights"
    return [
        f"{model} with {weights} in {options.dtype}, max_model_len {MAX_MODEL_LEN:,}, all else each service's "
        f"default{peer_mode}.",
        f"Streamed completions, greedy, past any end of text; prompts of about {options.prompt_tokens} tokens of text "
        f"that no cache knows, answers of {options.new_tokens}, lengths drawn once; the same requests in every turn.",
        f"Saturation: {options.concurrency} requests always under way, {options.saturating_requests} in all; counted "
        "between the end of the first ones and the sending of the last. The uncounted round sets the rates.",
        f"Rates: {options.requests} requests at the times of a Poisson process, one pattern for all rates, stretched. "
        "At shares of its own saturation each service has its own load. The same rate: "
        f"{SAME_SHARE:.0%} of the slower one's saturation.",
        "Times are a client's, from the moment at which a request was due: to its first text, between its pieces of "
        "text, to its last. Requests/s and tokens/s of a rate are over all of it, its slow beginning and end too.",
        "The clients are one process of their own. Both services stay loaded; all but the one whose turn it is are "
        "stopped.",
    ]
