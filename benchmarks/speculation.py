"""Speculative decoding by suffix matching: edits of code, quotes and free text, with drafts and without."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import ClassVar, NamedTuple

from benchmarks.harness import Benchmark, Plan, interleave, note, numbers
from benchmarks.peers.rows import facts
from benchmarks.peers.suffix_loops import microseconds
from benchmarks.result import Check, Findings, Measurement
from ringcore.checkpoint import find_model
from ringcore.checkpoint.tokenizer import load_tokenizer
from ringcore.config import EngineConfig
from ringcore.engine_core.core import EngineCore
from ringcore.metrics.draft_log import DraftStats
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.requests import EngineCoreRequest

__all__ = ["Speculation"]

ON, OFF = "ringcore", "without drafts"
BATCHES = "1,4,16"
TOKENS = 96

_CODE = '''def merge_intervals(intervals):
    """Merge overlapping intervals and return them sorted."""
    if not intervals:
        return []
    intervals = sorted(intervals, key=lambda pair: pair[0])
    merged = [intervals[0]]
    for start, end in intervals[1:]:
        last_start, last_end = merged[-1]
        if start <= last_end:
            merged[-1] = (last_start, max(last_end, end))
        else:
            merged.append((start, end))
    return merged
'''
_PASSAGE = (
    "The harbour of {0} lies behind two moles of granite, which were built after the flood. In winter the wind comes "
    "from the north-east and brings ice to the outer basin, so that the pilots wait at the lower quay. A keeper has "
    "lived in the lighthouse since the first lamp was lit, and he writes the hour of every ship into a large book: its "
    "name, its flag, what it carries, and how deep it lies in the water. In the summer of the great storm the book had "
    "no entry for three days, and nobody in {0} could say afterwards which ships had passed."
)
_PLACES = ("Arnholm", "Bellmar", "Corvik", "Dunmore", "Eskby", "Falren", "Grenna", "Hollis")
PROMPTS = {
    "code edit": f"Here is a Python function of the module {{0}}:\n\n```python\n{_CODE}```\n\nThe same function for "
    "the module {0}, with the docstring 'Join intervals.':\n\n```python\ndef merge_intervals(intervals):\n"
    '    """Join intervals."""\n',
    "quote": f"The text:\n\n{_PASSAGE}\n\nThe same text, word by word:\n\n{_PASSAGE[:150]}",
    "free text": "Write a long story about a journey to {0}.\n\nIt was",
}


class Speculation(Benchmark):
    """tokens/s with speculative decoding and without, of edits, quotes and free text"""

    default_rounds: ClassVar[int] = 3

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--batches", default=BATCHES, help=f"requests at once (default: {BATCHES})")
        parser.add_argument("--tokens", type=int, default=TOKENS, help=f"tokens of a request (default: {TOKENS})")
        parser.add_argument("--device", default="cpu", help="of the engines (default: cpu)")

    def run(self, plan: Plan) -> Findings:
        options, measurements, checks = plan.options, [], []
        engines = {name: _Engine(plan.model, options.device, name == ON) for name in (ON, OFF)}
        for kind, prompt in PROMPTS.items():
            for batch in numbers("--batches", options.batches):
                case = f"{kind}, {batch} request{'s' * (batch > 1)}"
                note(f"{case}: {plan.rounds} rounds")
                before, one = engines[ON].drafts(), _Load(prompt, batch, options.tokens, case)
                samples = interleave(list(engines), plan.rounds, partial(_rate, engines, one))
                measurements.append(Measurement(name=case, unit="tokens/s", higher_is_better=True, samples=samples))
                checks += _checks(case, samples, before, engines[ON].drafts())
        checks.append(_cost_of_drafts())
        for engine in engines.values():
            engine.core.shutdown()
        engine_facts = {**facts(("ringcore",)), "env": {}}
        named = dict.fromkeys(engines, engine_facts)
        return Findings(measurements=measurements, engines=named, conditions=_conditions(options), checks=checks)


def _conditions(options: argparse.Namespace) -> list[str]:
    return [
        f"Greedy completions of {options.tokens} tokens, from the first token on; the prompts are those of the "
        'benchmark. With drafts: `speculative={"method": "suffix"}` and its defaults. The engines take turns in one '
        "process, with the workers in it.",
        "Each round has a cache_salt of its own: what a round wrote is not there for the next one to draft from.",
        "A draft costs: one row, and 64 rows, of 4,000 tokens that repeat themselves, without a model.",
    ]


def _checks(case: str, samples: dict[str, list[float]], before: DraftStats, after: DraftStats) -> list[Check]:
    ratio = median(on / off for on, off in zip(samples[ON], samples[OFF], strict=True))
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    share = f"{accepted / drafted:.0%} of {drafted:,}" if drafted else "none were made"
    return [
        Check(name=f"{case}, times the tokens/s", value=f"{ratio:.2f}", data=ratio),
        Check(name=f"{case}, drafts accepted", value=share, data=[accepted, drafted]),
    ]


class _Load(NamedTuple):
    prompt: str
    batch: int
    num_tokens: int
    case: str


def _rate(engines: Mapping[str, _Engine], one: _Load, name: str, round_: int) -> float:
    return engines[name].rate(one, f"{one.case} {round_}")


class _Engine:
    def __init__(self, model: Path, device: str, has_drafts: bool) -> None:
        config = EngineConfig.from_options(
            model=str(model),
            device=device,
            max_model_len=2048,
            kv_cache_bytes=1 << 28,
            executor="uniproc",
            speculative={"method": "suffix"} if has_drafts else None,
        )
        self.core = EngineCore(config)
        self._tokenizer = load_tokenizer(find_model(str(model), "auto"))
        self._num_requests = 0
        self.rate(_Load(PROMPTS["free text"], 2, 8, "warm-up"), "warm-up")

    def drafts(self) -> DraftStats:
        return self.core.step_metrics().drafts or DraftStats(0, 0, [])

    def rate(self, one: _Load, salt: str) -> float:
        """Tokens a second of all requests, from the step that computed the last prompt on."""
        prompt, batch, num_tokens, _ = one
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        for index in range(batch):
            self._num_requests += 1
            place = _PLACES[index % len(_PLACES)] + str(index // len(_PLACES) or "")
            request = EngineCoreRequest(
                request_id=str(self._num_requests),
                prompt_token_ids=self._tokenizer.encode(prompt.format(place)),
                sampling_params=params,
                arrival_s=time.monotonic(),
                cache_salt=salt,
            )
            self.core.add_request(request)
        began, left, num_written = 0.0, batch, 0
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
    costs = {num_rows: microseconds(num_rows) for num_rows in (1, 64)}
    value = ", ".join(f"{cost:.0f} µs for {num_rows} row{'s' * (num_rows > 1)}" for num_rows, cost in costs.items())
    return Check(name="drafts of a step", value=value, data=[round(cost, 1) for cost in costs.values()])
