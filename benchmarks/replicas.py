"""Several engines behind one interface: what two give beside twice one, and what each routing finds in their caches."""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.batch import EXECUTOR
from benchmarks.harness import Benchmark, Plan, note
from benchmarks.made_tokenizer import write_tokenizer
from benchmarks.models import MODELS, find_published
from benchmarks.peers.rows import facts
from benchmarks.result import Check, Findings, Measurement
from ringcore import SamplingParams
from ringcore.front_end.replicas.replica_set import ReplicaSet
from ringcore.routing.policies import ROUTINGS
from ringcore.testing.models import tiny_model_config, write_model_config

__all__ = ["Replicas"]

VOCAB_SIZE, IN_FLIGHT = 2000, 32  # requests of each replica
SLOW_EXECUTOR, SLOW_STEP_S = "benchmarks.peers.batch_executor:SlowlyPacedExecutor", 0.05
ONE, TWO = "one replica", "two replicas, each"
GPU_KV_CACHE_BYTES = 16 << 30
NUM_REPLICAS, NUM_CONVERSATIONS, NUM_TURNS, AT_ONCE = 4, 64, 6, 16  # conversations that are routed
SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS, BLOCKS = 128, 96, 8, 1000


class Replicas(Benchmark):
    """tokens/s of two replicas beside one, and cache hits by routing; needs no model"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 3

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--requests", type=int, default=128, help="of each replica (default: 128)")
        parser.add_argument("--new-tokens", type=int, default=32, help="of each request (default: 32)")
        parser.add_argument("--conversations", type=int, default=NUM_CONVERSATIONS, help="that are routed")
        parser.add_argument("--replicas", type=int, default=NUM_REPLICAS, help="to which (default: 4)")
        parser.add_argument("--shape", help=f"on two GPUs, a model beside twice itself: {','.join(MODELS)}")

    def run(self, plan: Plan) -> Findings:
        if plan.options.shape is not None:
            return _on_gpus(plan)
        with tempfile.TemporaryDirectory(prefix="replicas-") as folder:
            config = tiny_model_config(vocab_size=VOCAB_SIZE, bos_token_id=1998, eos_token_id=1999)
            write_model_config(folder, config)
            write_tokenizer(Path(folder), config)
            engine = {"model": folder, "load_format": "dummy", "executor": EXECUTOR}
            slow = engine | {"executor": SLOW_EXECUTOR, "max_num_seqs": IN_FLIGHT}
            measurement = asyncio.run(_beside_one(plan, slow, "tokens/s of a replica"))
            checks = [asyncio.run(_hits(plan, engine, routing)) for routing in ROUTINGS]
        packages = {name: version(name) for name in ("ringcore", "numpy", "msgspec", "tokenizers")}
        about: dict[str, Any] = {"python": platform.python_version(), "packages": packages, "settings": {}, "env": {}}
        return Findings(
            measurements=[measurement], engines={ONE: about, TWO: about}, conditions=_conditions(plan), checks=checks
        )


def _on_gpus(plan: Plan) -> Findings:
    (published,) = find_published(plan.options.shape)
    with tempfile.TemporaryDirectory(prefix="replicas-") as folder:
        path = published.write(Path(folder))
        write_tokenizer(path, dict(published.config))
        engine = {"model": str(path), "load_format": "dummy", "device": "cuda", "max_model_len": 4096}
        engine |= {"kv_cache_bytes": GPU_KV_CACHE_BYTES}  # three engines share the two devices
        measurement = asyncio.run(_beside_one(plan, engine, f"{published.name}, tokens/s of a replica"))
    engines = {name: dict(facts(("ringcore", "torch"), construct_s=0.0)) | {"env": {}} for name in (ONE, TWO)}
    return Findings(measurements=[measurement], engines=engines, conditions=_gpu_conditions(plan), checks=[])


async def _beside_one(plan: Plan, engine: dict[str, Any], name: str) -> Measurement:
    """Tokens a second of each replica, from the first request to the last token; one and two take turns."""
    samples: dict[str, list[float]] = {ONE: [], TWO: []}
    options: dict[str, Any] = engine | {"routing": "least-loaded"}
    async with ReplicaSet(**options) as one, ReplicaSet(**options, data_parallel_size=2) as two:
        for round_ in range(-1, plan.rounds):  # the first warms up
            sets = [(ONE, one), (TWO, two)]
            for which, engines in sets[:: -1 if round_ % 2 else 1]:
                rate = await _rate(plan, engines)
                if round_ >= 0:
                    note(f"round {round_ + 1} of {plan.rounds}, {which}: {rate:.0f} tokens/s")
                    samples[which].append(rate)
    return Measurement(name=name, unit="tokens/s", higher_is_better=True, samples=samples)


async def _rate(plan: Plan, engines: ReplicaSet) -> float:
    num_tokens, num_requests = plan.options.new_tokens, plan.options.requests * engines.num_replicas
    waiting = iter(range(num_requests))
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, output_kind="delta")

    async def ask() -> None:
        for number in waiting:
            async for _ in engines.generate([1 + number % (VOCAB_SIZE - 3)] * 8, params):
                pass

    begun_s = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(IN_FLIGHT * engines.num_replicas)))
    return plan.options.requests * num_tokens / (time.perf_counter() - begun_s)


async def _hits(plan: Plan, engine: dict[str, Any], routing: str) -> Check:
    """Conversations with one system prompt: every one's first turn, then every one's second, and so on, each time in
    another order."""
    options: dict[str, Any] = engine | {"num_blocks_override": BLOCKS, "data_parallel_size": plan.options.replicas}
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, output_kind="final")
    texts = [list(range(SYSTEM_TOKENS)) for _ in range(plan.options.conversations)]
    async with ReplicaSet(**options, routing=routing) as engines:
        for turn in range(NUM_TURNS):
            waiting = iter(random.Random(turn).sample(list(enumerate(texts)), len(texts)))

            async def ask(waiting: Any = waiting, turn: int = turn) -> None:
                for number, text in waiting:
                    text += [(number * 7919 + turn * 104_729 + i * 31) % VOCAB_SIZE for i in range(TURN_TOKENS)]
                    async for output in engines.generate(text, params):
                        text += output.outputs[0].token_ids

            await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
        stats = engines.stats
    rate = stats.num_prefix_hit_tokens / stats.num_prefix_query_tokens
    note(f"{routing}: {rate:.1%}")
    return Check(name=f"prompt tokens found in the cache, {routing}", value=f"{rate:.1%}", data=rate)


def _gpu_conditions(plan: Plan) -> list[str]:
    return [
        f"Dummy weights in bfloat16. {plan.options.requests} requests of each replica with 8 tokens and "
        f"{plan.options.new_tokens} new ones, {IN_FLIGHT} of each at once, streamed. A sample is the rate of one "
        "replica: twice one is where both are equal. All engines are on the devices; those whose turn it is not idle.",
    ]


def _conditions(plan: Plan) -> list[str]:
    options = plan.options
    return [
        f"Steps of a FakeExecutor take {1e3 * SLOW_STEP_S:.0f} ms and no processor, whatever is in them. "
        f"{options.requests} requests of each replica with {options.new_tokens} new tokens, {IN_FLIGHT} of each at "
        "once, streamed. A sample is the rate of one replica: twice one is where both are equal.",
        f"Cached, with steps of 10 ms: {options.conversations} conversations of {NUM_TURNS} turns, {AT_ONCE} at once, "
        f"over {options.replicas} replicas of {BLOCKS:,} blocks of 16 tokens: a system prompt of {SYSTEM_TOKENS} "
        f"tokens for all, each turn {TURN_TOKENS} tokens and an answer of {ANSWER_TOKENS}.",
    ]
