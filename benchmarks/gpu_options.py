"""The options that the GPU benchmarks share, and the engines that they are for."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from benchmarks.driver import BenchmarkError
from benchmarks.harness import EngineSpec, Plan, child_specs, note, numbers
from benchmarks.models import DEFAULT_MODELS, MODELS
from ringcore.config import EngineConfig

__all__ = [
    "Deadline",
    "add_engine_arguments",
    "add_option_argument",
    "add_place_arguments",
    "add_prompt_argument",
    "bytes_a_number",
    "gpu_specs",
    "max_model_len",
    "prompt_lengths",
    "with_deterministic",
    "with_options",
    "without_cpu_settings",
]

MAX_MODEL_LEN = 4096
_NEW_TOKENS = 1024  # room behind prompts whose length is asked for
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_ALONE_SHARE, _BESIDE_SHARE = 0.9, 0.8  # of the device's memory: for an engine alone; for all that are loaded at once


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for trying it out")
    parser.add_argument("--dtype", choices=tuple(_DTYPE_BYTES), default="bfloat16", help="default: bfloat16")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add_place_arguments(parser)
    default = ",".join(DEFAULT_MODELS)
    parser.add_argument("--models", default=default, help=f"some of {','.join(MODELS)} (default: {default})")
    parser.add_argument(
        "--model-impl",
        choices=("auto", "native", "transformers", "both"),
        default="auto",
        help="of ringcore; both: its native classes and transformers' modules beside each other (default: auto)",
    )
    parser.add_argument("--memory-share", type=float, help="of the device's memory, for each engine (default: as fits)")
    parser.add_argument("--expert-parallel", action="store_true", help="each device has whole experts")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="besides ringcore with deterministic=True, and vLLM in its batch-invariant mode",
    )


def add_option_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--with-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="besides ringcore with this engine option, e.g. max_cudagraph_capture_size=2048; once for each engine",
    )


def add_prompt_argument(parser: argparse.ArgumentParser) -> None:
    text = "of decodes, of one length after the other, in place of the batch's, e.g. 4000,36000"
    parser.add_argument("--prompt-tokens", help=text)


def prompt_lengths(options: argparse.Namespace) -> list[int]:
    """Raises `BenchmarkError` for what is no length."""
    asked = getattr(options, "prompt_tokens", None)
    return numbers("--prompt-tokens", asked) if asked else []


def max_model_len(options: argparse.Namespace) -> int:
    return max([MAX_MODEL_LEN, *(length + _NEW_TOKENS for length in prompt_lengths(options))])


def gpu_specs(
    plan: Plan,
    part: str,
    size: int = 1,
    are_together: bool = True,
    num_stages: int = 1,
    with_option: Sequence[str] = (),
) -> list[EngineSpec]:
    """The children `benchmarks.peers.PART_ENGINE` of those that take part, each stage over `size` devices.

    `are_together`: whether all are loaded at once, and share the memory. with_option: see `with_options`.
    """
    options = plan.options
    settings: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "max_model_len": max_model_len(options),
    }
    specs = _by_impl(child_specs(plan.specs, part, "child for the GPU benchmarks", settings), options.model_impl)
    if options.deterministic:
        specs = with_deterministic(specs)
    specs = with_options(specs, with_option)
    fitting = _BESIDE_SHARE / len(specs) if are_together and len(specs) > 1 else _ALONE_SHARE
    placed = {"memory_share": options.memory_share or fitting, "tensor_parallel_size": size}
    placed |= {"pipeline_parallel_size": num_stages} if num_stages > 1 else {}
    placed |= {"expert_parallel": True} if options.expert_parallel else {}
    specs = [replace(spec, settings={**spec.settings, **placed}) for spec in specs]
    return [without_cpu_settings(spec) for spec in specs] if options.device == "cuda" else specs


def _by_impl(specs: list[EngineSpec], impl: str) -> list[EngineSpec]:
    """ringcore once for each implementation of the models."""
    found = []
    for spec in specs:
        if spec.name != "ringcore" or impl == "auto":
            found.append(spec)
            continue
        for one in ("native", "transformers") if impl == "both" else (impl,):
            name = spec.name if impl != "both" or one == "native" else f"{spec.name} by transformers"
            found.append(replace(spec, name=name, settings={**spec.settings, "model_impl": one}))
    return found


def with_deterministic(specs: Sequence[EngineSpec]) -> list[EngineSpec]:
    """ringcore with deterministic=True and without; each peer, and vLLM besides in its batch-invariant mode."""
    found = []
    for spec in specs:
        if spec.name == "ringcore":
            settings = {**spec.settings, "deterministic": True}
            found.append(replace(spec, name="ringcore deterministic", settings=settings))
        found.append(spec)
        if spec.name.split()[0] == "vllm":
            env = {**spec.env, "VLLM_BATCH_INVARIANT": "1"}
            found.append(replace(spec, name=f"{spec.name} batch-invariant", env=env))
    return found


def with_options(specs: Sequence[EngineSpec], given: Sequence[str]) -> list[EngineSpec]:
    """After ringcore, ringcore with each "name=value" of `given`; a value is JSON, or a text. Raises `BenchmarkError`
    for what is no option."""
    found = []
    for spec in specs:
        found.append(spec)
        for one in given if spec.name == "ringcore" else ():
            name, _, text = one.partition("=")
            if name not in EngineConfig.options() or not text:
                raise BenchmarkError(f"--with-option {one}: give an engine option as NAME=VALUE", with_option=one)
            try:
                value = msgspec.json.decode(text)
            except msgspec.DecodeError:
                value = text
            settings = {**spec.settings, "options": {name: value}}
            found.append(replace(spec, name=f"{spec.name} {one}", settings=settings))
    return found


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
