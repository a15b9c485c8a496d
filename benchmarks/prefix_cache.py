"""ringcore's prefix cache beside vLLM's: hashing a prompt, finding what is cached of it, and evicting."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from benchmarks.harness import Benchmark, Fleet, Plan, child_specs, numbers
from benchmarks.peers.prefix_loops import A_BLOCK, BLOCK_SIZE, POOL_PROMPTS, median_us
from benchmarks.result import Findings, Limit, Measurement
from benchmarks.turns import Turns

__all__ = ["PrefixCache", "shown_tokens"]

TOKENS = "256,1024,4096,16384,65536,131072"
HIT_PERCENTS = (0, 50, 100)
TIMEOUT_S = 300.0
FLOOR_BLOCKS = 1000
DIGEST_BYTES, TOKEN_BYTES = 32, 4
UNITS = ("µs", A_BLOCK)
HASH, LOOKUP = "hash", "lookup, 100% cached"  # the rows that have a floor


class PrefixCache(Benchmark):
    """microseconds to hash a prompt, to look it up, and to take its blocks; needs no model"""

    needs_model: ClassVar[bool] = False

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--tokens", default=TOKENS, help=f"lengths of prompts (default: {TOKENS})")
        parser.add_argument(
            "--taken", type=int, default=4096, help="tokens of a prompt that takes blocks (default: 4096)"
        )

    def run(self, plan: Plan) -> Findings:
        sizes = numbers("--tokens", plan.options.tokens)
        specs = child_specs(plan.specs, "prefix", "prefix cache")
        floors = block_floors()
        with Fleet(replace(plan, specs=specs, model=Path())) as fleet:
            turns = Turns(fleet, plan.rounds)
            measurements = []
            for size in sizes:
                measurements += _measure(turns, size, "hashing")
                for percent in HIT_PERCENTS:
                    measurements += _measure(turns, size, "looking", hit_percent=percent)
            measurements += _measure(turns, plan.options.taken, "taking")
        return Findings(
            measurements=[_with_floor(one, floors) for unit in UNITS for one in measurements if one.unit == unit],
            engines=fleet.facts,
            conditions=_conditions(),
            checks=turns.core_checks(),
        )


def _conditions() -> list[str]:
    return [
        f"Prompts of random tokens in blocks of {BLOCK_SIZE}. A sample is the median of calls for 20 ms, of five at "
        "least.",
        "Hash: the chain over all full blocks of a prompt of which nothing was hashed before.",
        "Lookup: what is cached of a prompt that is hashed; beside it the cache holds another prompt as long. Of a "
        "prompt that is wholly cached ringcore computes one token again, vLLM one block.",
        "Blocks taken and published: given to a hashed request for all its tokens, and made known by their hashes. "
        f"None cached: nobody knew any block. All cached: the pool holds {POOL_PROMPTS} other prompts, and the blocks "
        "used longest ago are evicted.",
        "All caches but the one whose turn it is are stopped.",
    ]


def _measure(turns: Turns, size: int, command: str, **arguments: Any) -> list[Measurement]:
    return turns.measure(shown_tokens(size), command, TIMEOUT_S, num_tokens=size, **arguments)


def _with_floor(measurement: Measurement, floors: Mapping[str, Limit]) -> Measurement:
    """Floors are of a block."""
    if measurement.unit != A_BLOCK:
        return measurement
    return msgspec.structs.replace(measurement, limit=floors.get(measurement.name.partition(", ")[2]))


def shown_tokens(num_tokens: int) -> str:
    return f"{num_tokens >> 10}K tokens" if num_tokens >= 1024 and num_tokens % 1024 == 0 else f"{num_tokens} tokens"


def block_floors() -> dict[str, Limit]:
    """The least microseconds a block, by the row's name."""
    data = bytes(DIGEST_BYTES + BLOCK_SIZE * TOKEN_BYTES)
    blocks = [data] * FLOOR_BLOCKS
    taken = {
        "SHA-256": median_us(lambda: [sha256(block).digest() for block in blocks]),
        "BLAKE2b": median_us(lambda: [blake2b(block, digest_size=DIGEST_BYTES).digest() for block in blocks]),
    }
    fastest = min(taken, key=taken.__getitem__)
    known = {sha256(bytes([i & 255, i >> 8])).digest(): i for i in range(FLOOR_BLOCKS)}
    digests = list(known)
    looked_us = median_us(lambda: [known.get(digest) for digest in digests])
    hashed = f"a loop that makes one {fastest} of {len(data)} bytes a block"
    return {
        HASH: Limit(value=taken[fastest] / FLOOR_BLOCKS, statement=hashed),
        LOOKUP: Limit(value=looked_us / FLOOR_BLOCKS, statement="a loop that looks one hash of 32 bytes a block up"),
    }
