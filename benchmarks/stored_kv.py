"""A turn whose earlier tokens left the device, found beyond it, beside computing them again."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from benchmarks.gpu_options import add_place_arguments, without_cpu_settings
from benchmarks.harness import Benchmark, Plan, child_specs, load_engine, note
from benchmarks.models import MODELS, find_published
from benchmarks.peers.rows import facts
from benchmarks.result import Check, Findings, Measurement
from ringcore.config import EngineConfig
from ringcore.engine_core.core import EngineCore
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.testing.models import write_model_config

__all__ = ["StoredKV"]

NONE, MEMORY, DIRECTORY, VLLM = "computed, no store", "host memory", "a directory", "vllm"
VLLM_HOST_GIB, TURN_TIMEOUT_S = 8, 300.0
BLOCK_SIZE, NEW_TOKENS = 16, 16  # of a turn, after what was said before
_WRITES_S, _QUIET_S = 60.0, 0.5  # for the files of a turn; without a new one they are written
_NUM_BETWEEN = 4  # prompts that take the memory in front of a directory
TINY = {"max_position_embeddings": 40960, "num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 704}


class StoredKV(Benchmark):
    """seconds to the first token of a turn found beyond the device, beside computing it again; needs no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 5

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_place_arguments(parser)
        parser.add_argument("--shape", default="Qwen3-8B", help=f"tiny, or one of {','.join(MODELS)}")
        parser.add_argument("--executor", choices=("multiproc", "uniproc"), default="multiproc")
        parser.add_argument("--tokens", type=int, default=8000, help="of the turns before (default: 8000)")

    def run(self, plan: Plan) -> Findings:
        with tempfile.TemporaryDirectory(prefix="stored-") as folder:
            taken = {name: _Session(plan, Path(folder), name).run() for name in (NONE, MEMORY, DIRECTORY)}
            engines = {name: dict(facts(("ringcore", "torch"), construct_s=0.0)) | {"env": {}} for name in taken}
            if len(plan.specs) > 1:
                taken[VLLM], engines[VLLM] = _of_vllm(plan, Path(folder))
        num_tokens = plan.options.tokens
        measurements = []
        for name in ("computed", "again"):
            samples = {one: found[name] for one, found in taken.items()}
            label = f"{plan.options.shape}, {num_tokens:,} tokens, {name}"
            measurements.append(Measurement(name=label, unit="s", higher_is_better=False, samples=samples))
        return Findings(measurements=measurements, engines=engines, conditions=_conditions(), checks=_checks(taken))


def _conditions() -> list[str]:
    return [
        "Seconds from the arrival of a turn to its first token, alone in an engine in this process with workers of its "
        f"own and dummy weights. The turn adds {NEW_TOKENS} tokens to a prompt that the engine has computed before; "
        "since then another one as long has taken its blocks, as the cache holds one and a half, and with a directory "
        f"{_NUM_BETWEEN} more the memory in front of it. After a turn its files are waited for.",
        "Computed: a prompt that the engine has not seen, which also evicts another one. Again: one that it has seen. "
        "All CUDA graphs are captured before, as in a service that was idle once.",
        f"vLLM, where it takes part: as many blocks on the device, kv_offloading_size={VLLM_HOST_GIB}; a generate() "
        "call of one new token, in a process of its own.",
    ]


def _checks(taken: dict[str, dict[str, list[float]]]) -> list[Check]:
    checks = []
    if VLLM in taken:
        ratio = median(taken[VLLM]["computed"]) / median(taken[VLLM]["again"])
        checks.append(Check(name=f"found by {VLLM}, times faster than it computes", value=f"{ratio:.1f}", data=ratio))
    for name in (MEMORY, DIRECTORY):
        ratio = median(taken[NONE]["computed"]) / median(taken[name]["again"])
        checks.append(Check(name=f"found in {name}, times faster than computed", value=f"{ratio:.1f}", data=ratio))
        equal = taken[name]["tokens"] == taken[NONE]["tokens"]
        checks.append(Check(name=f"tokens with {name} and without are equal", value=str(equal), data=equal))
        least = min(taken[name]["hits"])
        checks.append(Check(name=f"tokens found in {name}, the least of all rounds", value=f"{least:.0f}", data=least))
    return checks


def _rounds(plan: Plan, name: str, turn: Callable[[list[int]], tuple[float, int, int]]) -> dict[str, list[float]]:
    """turn: see `_Session._turn`."""
    num_tokens, found = plan.options.tokens, {what: list[float]() for what in ("computed", "again", "tokens", "hits")}
    for round_ in range(plan.rounds + 1):  # the first one warms up
        first, other = _prompt(2 * round_, num_tokens), _prompt(2 * round_ + 1, num_tokens)
        turn(first)
        computed_s, _, _ = turn(other)
        for number in range(_NUM_BETWEEN if name == DIRECTORY else 0):
            turn(_prompt(500 + _NUM_BETWEEN * round_ + number, num_tokens))
        again_s, token, num_cached = turn(first + _prompt(900 + round_, NEW_TOKENS))
        note(f"{name}, round {round_}: computed {computed_s:.4f} s, again {again_s:.4f} s, {num_cached}")
        if round_:
            for what, value in zip(found, (computed_s, again_s, token, num_cached), strict=True):
                found[what].append(value)
    return found


def _prompt(seed: int, num_tokens: int) -> list[int]:
    return [3 + (seed * 131 + 7 * i + i * i // 3) % 900 for i in range(num_tokens)]


def _of_vllm(plan: Plan, folder: Path) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """vLLM with as many blocks on the device, which keeps what it computes in host memory at once."""
    (published,) = find_published(plan.options.shape)
    length = plan.options.tokens + 2 * NEW_TOKENS
    settings = {"dtype": plan.options.dtype, "max_model_len": length, "memory_share": 0.5, "tensor_parallel_size": 1}
    settings |= {"block_size": BLOCK_SIZE, "num_blocks": 3 * length // (2 * BLOCK_SIZE), "host_kv_gib": VLLM_HOST_GIB}
    (spec,) = (without_cpu_settings(one) for one in child_specs(plan.specs[1:], "gpu", "child", settings))
    with spec.start() as driver:
        loaded = load_engine(driver, spec, published.write(folder))

        def turn(prompt: list[int]) -> tuple[float, int, int]:
            return driver.call("turn", TURN_TIMEOUT_S, prompt=prompt), 0, 0

        return _rounds(plan, VLLM, turn), loaded.facts


class _Session:
    """One engine, of which all rounds are."""

    def __init__(self, plan: Plan, folder: Path, store: str) -> None:
        self._plan, self._store, self._num_tokens = plan, store, plan.options.tokens
        self._num_requests = 0
        model = plan.options.shape
        if model == "tiny":
            path = Path(write_model_config(folder / "tiny", **TINY))
        else:
            (published,) = find_published(model)
            path = published.write(folder)
        length = self._num_tokens + 2 * NEW_TOKENS
        options: dict[str, Any] = {
            "model": str(path),
            "load_format": "dummy",
            "device": plan.options.device,
            "executor": plan.options.executor,
            "dtype": plan.options.dtype,
            "block_size": BLOCK_SIZE,
            "max_model_len": length,
            "num_blocks_override": 3 * length // (2 * BLOCK_SIZE),
        }
        if store != NONE:
            options["host_kv_cache_bytes"] = 4 * length * self._bytes_a_token(path)
        if store == DIRECTORY:
            directory = folder / "kv"
            directory.mkdir()
            options |= {
                "host_kv_cache_dir": str(directory),
                "host_kv_cache_dir_bytes": 40 * options["host_kv_cache_bytes"],
                "host_kv_cache_bytes": options["host_kv_cache_bytes"] // 2,  # two prompts, or four in 16 bits
            }
        self._directory = Path(options["host_kv_cache_dir"]) if store == DIRECTORY else None
        self._config = EngineConfig.from_options(**options)

    def _bytes_a_token(self, path: Path) -> int:
        spec = EngineConfig.from_options(model=str(path), load_format="dummy").model.spec
        return spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * 4  # type: ignore[union-attr]

    def run(self) -> dict[str, list[float]]:
        with EngineCore(self._config) as core:
            while core.ready.num_graphs_left and max(core.capture_graph().result()):
                pass  # as a service does while it is idle
            return _rounds(self._plan, self._store, lambda prompt: self._turn(core, prompt))

    def _turn(self, core: EngineCore, prompt: list[int]) -> tuple[float, int, int]:
        """-> seconds to the first token, that token, and the tokens that it found."""
        self._num_requests += 1
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        began_s = time.monotonic()
        core.add_request(EngineCoreRequest(f"turn {self._num_requests}", prompt, params, began_s))
        while True:
            for output in core.step().outputs:
                if output.new_token_ids:
                    taken_s = time.monotonic() - began_s
                    self._wait_for_writes()
                    return taken_s, output.new_token_ids[0], output.num_cached_tokens

    def _wait_for_writes(self) -> None:
        """What finds no place in memory is not saved; users pause between turns, and a disk is slower than these."""
        deadline_s, before = time.monotonic() + _WRITES_S, -1
        while self._directory is not None and time.monotonic() < deadline_s:
            count = sum(1 for _ in self._directory.rglob("*"))
            if count == before:
                return
            before = count
            time.sleep(_QUIET_S)
