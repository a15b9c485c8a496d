"""Speculative decoding: edits, quotes and free text of a real model; or, of random weights on a GPU, what a step with
drafts costs, what drafts of a given quality bring, and what text without drafts loses. By suffixes, or by a head."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from benchmarks.driver import BenchmarkError
from benchmarks.harness import Benchmark, Plan, interleave, note, numbers
from benchmarks.heads import write_head
from benchmarks.models import find_published
from benchmarks.peers.rows import facts
from benchmarks.peers.suffix_loops import microseconds
from benchmarks.result import Check, Findings, Measurement
from benchmarks.speculation_texts import Load, forced_load, free_load, real_loads
from ringcore.checkpoint import find_model
from ringcore.checkpoint.tokenizer import load_tokenizer
from ringcore.config import EngineConfig
from ringcore.engine_core.core import EngineCore
from ringcore.metrics.draft_log import DraftStats
from ringcore.protocol.requests import EngineCoreRequest

__all__ = ["Speculation"]

ON, OFF, KNOWN, HEAD = "ringcore", "without drafts", "known text", "a head"
KNOWN_HEAD = "a head of known text"
BATCHES, SHAPES_BATCHES = "1,4,16", "1,8,32"
TOKENS = 96
SPECULATIVE: Mapping[str, Any] = {
    ON: {"method": "suffix"},
    OFF: None,
    KNOWN: {"method": "benchmarks.peers.known_text:KnownText"},
    HEAD: {"method": "eagle3"},
    KNOWN_HEAD: {"method": "benchmarks.peers.known_text:KnownHead"},
}
RANDOM = "random"


class Speculation(Benchmark):
    """tokens/s with speculative decoding and without, of edits, quotes and free text; --shapes needs no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 3

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--batches", help=f"requests at once (default: {BATCHES}, of --shapes {SHAPES_BATCHES})", default=None
        )
        parser.add_argument("--tokens", type=int, default=TOKENS, help=f"tokens of a request (default: {TOKENS})")
        parser.add_argument("--device", default="cpu", help="of the engines (default: cpu)")
        parser.add_argument("--shapes", metavar="MODEL", help="a published model with random weights, for a GPU")
        parser.add_argument("--chances", default="0,70,100", help="percent of known drafts that are right, of --shapes")
        parser.add_argument(
            "--drafts", type=int, default=4, help="of a row and step, of known drafts or a head's (default: 4)"
        )
        parser.add_argument(
            "--head", metavar="FOLDER", help=f"of an EAGLE-3 head, in place of suffixes; {RANDOM!r}: random weights"
        )

    def run(self, plan: Plan) -> Findings:
        options, measurements, checks = plan.options, [], []
        with _model(plan) as folder, _head(options, folder) as options.head:
            names: tuple[str, ...] = (_subject(options), OFF)
            if options.shapes:
                names = (*names, KNOWN_HEAD if options.head else KNOWN)
            engines = {name: _Engine(folder, options, name) for name in names}
            try:
                for name, load in _loads(options, engines[OFF]):
                    note(f"{load.case}: {plan.rounds} rounds")
                    taken, before = (name, OFF), engines[name].drafts()
                    samples = interleave(list(taken), plan.rounds, partial(_rate, engines, load))
                    measurements.append(
                        Measurement(name=load.case, unit="tokens/s", higher_is_better=True, samples=samples)
                    )
                    checks += _checks(load.case, samples, name, before, engines[name].drafts())
            finally:
                for engine in engines.values():
                    engine.core.shutdown()
        if not options.head:
            checks.append(_cost_of_drafts())
        engine_facts = {**facts(("ringcore",)), "env": {}}
        named = dict.fromkeys(engines, engine_facts)
        return Findings(measurements=measurements, engines=named, conditions=_conditions(options), checks=checks)


@contextmanager
def _head(options: argparse.Namespace, model: Path) -> Iterator[str | None]:
    """The folder of the head."""
    if options.head != RANDOM:
        yield options.head
        return
    with tempfile.TemporaryDirectory(prefix="head-") as folder:
        write_head(model, Path(folder))
        yield folder


def _subject(options: argparse.Namespace) -> str:
    """The engine that is compared with the one without drafts."""
    return HEAD if options.head else ON


@contextmanager
def _model(plan: Plan) -> Iterator[Path]:
    """The folder of the model."""
    if plan.options.shapes is None:
        if not plan.model.is_dir():
            raise BenchmarkError(f"--model {plan.model}: no such folder; `make setup` makes the default one")
        yield plan.model
        return
    (shapes,) = find_published(plan.options.shapes)
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        yield shapes.write(Path(folder))


def _loads(options: argparse.Namespace, engine: _Engine) -> Iterator[tuple[str, Load]]:
    """Each with the engine that is compared with the one without drafts."""
    batches = numbers("--batches", options.batches or (SHAPES_BATCHES if options.shapes else BATCHES))
    if options.shapes is None:
        tokenizer = load_tokenizer(find_model(str(engine.folder), "auto"))
        by_batch = [real_loads(tokenizer, batch, options.tokens) for batch in batches]
        yield from ((_subject(options), load) for loads in zip(*by_batch, strict=True) for load in loads)
        return
    vocab_size = engine.core.config.model.spec.vocab_size
    yield from ((_subject(options), free_load(batch, options.tokens, vocab_size)) for batch in batches)
    yield from ((_subject(options), forced_load(batch, options.tokens, vocab_size, None)) for batch in batches)
    known = KNOWN_HEAD if options.head else KNOWN
    for percent in options.chances.split(","):
        for batch in batches:
            yield known, forced_load(batch, options.tokens, vocab_size, int(percent) / 100)


def _conditions(options: argparse.Namespace) -> list[str]:
    if options.head:
        return [
            f"{options.shapes or 'The model'} on {options.device}; {options.tokens} tokens of a request, from the "
            f"first token on. Drafts of an EAGLE-3 head, at most {options.drafts} of a row and step. With random "
            "weights they are wrong: the figures are what a head costs that is of no use. Where drafts are right by "
            "chance, known tokens are in the place of those that the head computed; how many there are follows from "
            "odds and costs.",
        ]
    if options.shapes:
        return [
            f"{options.shapes} with random weights on {options.device}; {options.tokens} tokens of a request, from the "
            "first token on. Free text is sampled at temperature 1. Else a bias has each request write one token: "
            "with drafts of suffixes and their defaults, which a step has where they pay; or with "
            f"{options.drafts} known drafts of each row in every step but one of some 33.",
            "The engines are on the device at once and take turns, each with its worker in a process of its own.",
        ]
    return [
        f"Greedy completions of {options.tokens} tokens, from the first token on; the prompts are those of the "
        'benchmark. With drafts: `speculative={"method": "suffix"}` and its defaults. The engines take turns in one '
        "process, with the workers in it.",
        "Each round has a cache_salt of its own: what a round wrote is not there for the next one to draft from.",
        "A draft costs: one row, and 64 rows, of 4,000 tokens that repeat themselves; and rows that had no drafts for "
        "long. Without a model.",
    ]


def _checks(
    case: str, samples: dict[str, list[float]], name: str, before: DraftStats, after: DraftStats
) -> list[Check]:
    ratio = median(on / off for on, off in zip(samples[name], samples[OFF], strict=True))
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    share = f"{accepted / drafted:.0%} of {drafted:,}" if drafted else "none were made"
    return [
        Check(name=f"{case}, times the tokens/s", value=f"{ratio:.2f}", data=ratio),
        Check(name=f"{case}, drafts accepted", value=share, data=[accepted, drafted]),
    ]


def _rate(engines: Mapping[str, _Engine], load: Load, name: str, round_: int) -> float:
    return engines[name].rate(load, f"{load.case} {round_}")


class _Engine:
    def __init__(self, folder: Path, options: argparse.Namespace, name: str) -> None:
        speculative = SPECULATIVE[name]
        if name != ON and speculative is not None:
            speculative = {**speculative, "num_drafts": options.drafts}
        if name in (HEAD, KNOWN_HEAD):
            speculative["model"] = options.head
        of_shapes: dict[str, Any] = {}
        if options.shapes:
            of_shapes = {"load_format": "dummy", "executor": "multiproc", "max_model_len": 1024}
            of_shapes |= {"kv_cache_bytes": 4 << 30, "dtype": "bfloat16"} if options.device == "cuda" else {}
        given = {"kv_cache_bytes": 1 << 28, "executor": "uniproc", "max_model_len": 2048} | of_shapes
        config = EngineConfig.from_options(model=str(folder), device=options.device, speculative=speculative, **given)
        self.core, self.folder = EngineCore(config), folder
        self._num_requests = 0
        vocab_size = config.model.spec.vocab_size
        warm_up = forced_load(2, 8, vocab_size, 1.0) if name in (KNOWN, KNOWN_HEAD) else free_load(2, 8, vocab_size)
        self.rate(warm_up, "warm-up")

    def drafts(self) -> DraftStats:
        return self.core.step_metrics().drafts or DraftStats(0, 0, [])

    def rate(self, load: Load, salt: str) -> float:
        """Tokens a second of all requests, from the step that computed the last prompt on."""
        for prompt in load.prompts:
            self._num_requests += 1
            request = EngineCoreRequest(
                request_id=str(self._num_requests),
                prompt_token_ids=prompt,
                sampling_params=load.params,
                arrival_s=time.monotonic(),
                cache_salt=salt,
            )
            self.core.add_request(request)
        began, left, num_written = 0.0, len(load.prompts), 0
        while self.core.has_unfinished:
            outputs = self.core.step().outputs
            new = sum(len(output.new_token_ids) for output in outputs)
            if left > 0:
                left -= len(outputs)
                began = time.perf_counter()
            else:
                num_written += new
        return num_written / (time.perf_counter() - began)


def _cost_of_drafts() -> Check:
    kinds = [(1, True), (64, True), (1, False), (64, False)]
    costs = {kind: microseconds(*kind) for kind in kinds}
    value = ", ".join(
        f"{cost:.0f} µs for {num_rows}{'' if repeats else ' idle'} row{'s' * (num_rows > 1)}"
        for (num_rows, repeats), cost in costs.items()
    )
    return Check(name="drafts of a step", value=value, data=[round(cost, 1) for cost in costs.values()])
