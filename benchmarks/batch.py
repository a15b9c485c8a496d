"""What the batch runner costs: beside LLM.generate, when it resumes, and what its order saves."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.harness import Benchmark, Plan, note
from benchmarks.made_tokenizer import write_tokenizer
from benchmarks.result import Check, Findings, Measurement
from ringcore import LLM, EngineConfig, SamplingParams, batch
from ringcore.batch.job_files import JobFiles
from ringcore.batch.journal import Record
from ringcore.batch.lines import Outcome
from ringcore.batch.options import BatchOptions
from ringcore.testing.models import tiny_model_config, write_model_config

__all__ = ["BatchRunner"]

BATCH = "ringcore batch"
STEP_S = 0.01
EXECUTOR = "benchmarks.peers.batch_executor:PacedExecutor"
NUM_PREFIXES, NUM_SHARING = 64, 8


class BatchRunner(Benchmark):
    """the batch runner beside LLM.generate, its resumption, and its order's cache hits; needs no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 3

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--requests", type=int, default=2000, help="beside LLM.generate (default: 2000)")
        parser.add_argument("--new-tokens", type=int, default=64, help="of each (default: 64)")
        parser.add_argument("--done-lines", type=int, default=1_000_000, help="of the job that is resumed")
        parser.add_argument("--real", action="store_true", help="with the model of --model, not steps that take 10 ms")

    def run(self, plan: Plan) -> Findings:
        with tempfile.TemporaryDirectory(prefix="batch-") as folder:
            work = Path(folder)
            made = _fake_model(work / "model")
            engine = {"model": str(plan.model)} if plan.options.real else made
            measurements = [_beside_generate(plan, work, engine), _resumed(plan, work, made)]
            checks = [_hits(work, made, look_ahead) for look_ahead in (1, NUM_PREFIXES * NUM_SHARING)]
        packages = {name: version(name) for name in ("ringcore", "numpy", "msgspec", "tokenizers")}
        facts: dict[str, Any] = {"python": platform.python_version(), "packages": packages, "settings": {}, "env": {}}
        return Findings(
            measurements=measurements,
            engines={BATCH: facts, "LLM.generate": facts},
            conditions=_conditions(plan),
            checks=checks,
        )


def _fake_model(folder: Path) -> dict[str, Any]:
    """Engine options of a model without weights, whose steps take their time and cost nothing."""
    config = tiny_model_config(vocab_size=2000, bos_token_id=1998, eos_token_id=1999)
    write_model_config(folder, config)
    write_tokenizer(folder, config)
    return {"model": str(folder), "load_format": "dummy", "executor": EXECUTOR}


def _lines(num: int, new_tokens: int) -> list[dict[str, Any]]:
    sampling = {"temperature": 0, "max_tokens": new_tokens, "ignore_eos": True}
    return [{"prompt": f"request {i} asks for a text about {i * 7919 % 1000}", **sampling} for i in range(num)]


def _write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def _beside_generate(plan: Plan, work: Path, engine: dict[str, Any]) -> Measurement:
    """Wall time from engines that are ready to the last text, of the batch on the disk; the two take turns."""
    num, new_tokens = plan.options.requests, plan.options.new_tokens
    lines = _lines(num, new_tokens)
    source = _write(work / "in.jsonl", lines)
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    prompts = [line["prompt"] for line in lines]
    samples: dict[str, list[float]] = {BATCH: [], "LLM.generate": []}
    for round_ in range(plan.rounds):
        for name in sorted(samples, reverse=bool(round_ % 2)):
            if name == BATCH:
                seconds = batch.run(source, work / f"out-{round_}", use_tqdm=False, **engine).elapsed_s
            else:
                with LLM(**engine) as llm:
                    begun_s = time.perf_counter()
                    llm.generate(prompts, params, use_tqdm=False)
                    seconds = time.perf_counter() - begun_s
            note(f"{num} requests, round {round_ + 1} of {plan.rounds}, {name}: {seconds:.3f} s")
            samples[name].append(seconds)
    return Measurement(name=f"{num:,} requests", unit="s", higher_is_better=False, samples=samples)


def _resumed(plan: Plan, work: Path, engine: dict[str, Any]) -> Measurement:
    """From the call to its return: the input is identified, the journal read, and the one line left is answered."""
    num, out = plan.options.done_lines, work / "long-out.jsonl"
    source = _write(work / "long.jsonl", [{**line, "max_tokens": 1} for line in _lines(num + 1, 1)])
    files = JobFiles(source, out, EngineConfig.from_options(**engine), options=BatchOptions())
    results = files.checked(None, lambda: False)
    text = "x" * 200
    for line in range(1, num + 1):
        written = json.dumps({"custom_id": line, "outputs": [{"text": text}]}).encode() + b"\n"
        results.add(Outcome(Record(line, False, 10, 50), written))
    results.close()  # as after a kill: all of it is verified by its CRC
    samples = []
    for round_ in range(plan.rounds):
        kept = [(path, path.stat().st_size) for path in (out, Path(f"{out}.journal"))]
        begun_s = time.perf_counter()
        summary = batch.run(source, out, resume=True, use_tqdm=False, **engine)
        samples.append(time.perf_counter() - begun_s)
        assert summary.num_done == num + 1, asdict(summary)
        note(f"{num:,} done lines, round {round_ + 1} of {plan.rounds}: {samples[-1]:.2f} s")
        for path, size in kept:
            with path.open("r+b") as file:
                file.truncate(size)
    name = f"resumed with {num:,} done lines"
    return Measurement(name=name, unit="s", higher_is_better=False, samples={BATCH: samples})


def _hits(work: Path, engine: dict[str, Any], look_ahead: int) -> Check:
    prefixes = [f"prefix {i} " * 40 for i in range(NUM_PREFIXES)]
    lines = [{"prompt": f"{prefixes[i % NUM_PREFIXES]}{i}", "max_tokens": 2} for i in range(NUM_PREFIXES * NUM_SHARING)]
    source = _write(work / "shared.jsonl", lines)
    summary = batch.run(
        source,
        work / f"shared-{look_ahead}",
        look_ahead=look_ahead,
        use_tqdm=False,
        max_in_flight=16,
        num_blocks_override=1000,
        **engine,
    )
    rate = summary.cache_hit_rate
    return Check(name=f"prompt tokens found in the cache, look_ahead={look_ahead}", value=f"{rate:.1%}", data=rate)


def _conditions(plan: Plan) -> list[str]:
    options = plan.options
    steps = "The model of --model." if options.real else f"Steps of a FakeExecutor take {1e3 * STEP_S:.0f} ms."
    return [
        f"{options.requests:,} greedy requests of {options.new_tokens} new tokens. {steps} A sample is from an engine "
        "that is ready to the last text: with LLM.generate in memory, with ringcore.batch.run written and synced.",
        "Resumed: from the call of ringcore.batch.run to its return, without the interpreter's start and with that "
        "of a FakeExecutor's engine; one line is left to be answered. Nothing was marked as synced, so that the CRC of "
        "every result is verified.",
        f"Cached: {NUM_PREFIXES * NUM_SHARING} prompts of {NUM_PREFIXES} prefixes in turn, in a KV cache that holds a "
        "part of them.",
    ]
