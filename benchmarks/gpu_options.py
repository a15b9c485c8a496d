"""The options that the GPU benchmarks share, and the engines that they are for."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from benchmarks.harness import EngineSpec, Plan, child_specs, note
from benchmarks.models import MODELS

__all__ = [
    "Deadline",
    "add_engine_arguments",
    "add_place_arguments",
    "bytes_a_number",
    "gpu_specs",
    "without_cpu_settings",
]

MAX_MODEL_LEN = 4096
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_ALONE_SHARE, _BESIDE_SHARE = 0.9, 0.4  # of the device's memory: two engines that are loaded at once have 0.4 each


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for trying it out")
    parser.add_argument("--dtype", choices=tuple(_DTYPE_BYTES), default="bfloat16", help="default: bfloat16")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add_place_arguments(parser)
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {','.join(MODELS)} (default: all)")
    parser.add_argument("--memory-share", type=float, help="of the device's memory, for each engine (default: as fits)")


def gpu_specs(plan: Plan, part: str, size: int = 1, are_together: bool = True) -> list[EngineSpec]:
    """The children `benchmarks.peers.PART_ENGINE` of those that take part, over `size` devices.

    `are_together`: whether all are loaded at once, and share the memory.
    """
    options = plan.options
    share = options.memory_share or (_BESIDE_SHARE if are_together and len(plan.specs) > 1 else _ALONE_SHARE)
    settings: dict[str, Any] = {"device": options.device, "dtype": options.dtype, "max_model_len": MAX_MODEL_LEN}
    settings |= {"memory_share": share, "tensor_parallel_size": size}
    specs = child_specs(plan.specs, part, "child for the GPU benchmarks", settings)
    return [without_cpu_settings(spec) for spec in specs] if options.device == "cuda" else specs


def without_cpu_settings(spec: EngineSpec) -> EngineSpec:
    return replace(spec, env={key: value for key, value in spec.env.items() if not key.startswith("VLLM_CPU_")})


def bytes_a_number(dtype: str) -> int:
    return _DTYPE_BYTES[dtype]


class Deadline:
    """Whether there is time for one thing more."""

    def __init__(self, seconds: float | None) -> None:
        self._until_s = None if seconds is None else time.monotonic() + seconds

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, help="begin nothing after so long, and write what there is")

    def allows(self, what: str) -> bool:
        """Whether there is; where not, it is noted that `what` is left out."""
        if self._until_s is None or time.monotonic() < self._until_s:
            return True
        note(f"left out for lack of time: {what}")
        return False
