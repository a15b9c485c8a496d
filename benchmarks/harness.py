"""What every benchmark shares: who takes part, whose turn it is, and what is written down."""

from __future__ import annotations

import argparse
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from benchmarks import BENCHMARKS
from benchmarks.driver import ROOT, BenchmarkError, Driver
from benchmarks.machine import git_commit, machine_facts, shown_path
from benchmarks.result import Findings, Result

__all__ = [
    "PEERS",
    "Benchmark",
    "EngineSpec",
    "Fleet",
    "Plan",
    "child_specs",
    "engine_specs",
    "generate",
    "interleave",
    "load_benchmark",
    "load_engine",
    "note",
    "numbers",
    "run_benchmark",
]

LOAD_TIMEOUT_S = 600.0
GENERATE_TIMEOUT_S = 600.0
PEER_MODES = ("eager", "compiled", "both")
T = TypeVar("T")


@dataclass(frozen=True)
class EngineSpec:
    """An engine that takes part: its name in the tables, its child module, and the Python that runs it."""

    name: str
    command: tuple[str, ...]
    import_statement: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        return self.command[0]

    def start(self) -> Driver:
        return Driver(self.name, self.command, self.env)


@dataclass(frozen=True)
class Plan:
    """The options that every benchmark has. `specs[0]` is ringcore."""

    specs: Sequence[EngineSpec]
    model: Path
    rounds: int
    options: argparse.Namespace  # the benchmark's own
    # Called with all that is measured so far, by benchmarks that take many minutes: one that is cut off has left that.
    keep: Callable[[Findings], object] = lambda findings: None

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.specs]


class Benchmark(ABC):
    """One benchmark. The first line of its docstring is what the list says of it."""

    needs_model: ClassVar[bool] = True
    default_rounds: ClassVar[int] = 5

    @classmethod  # noqa: B027 - most have no options of their own
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the benchmark's own options."""

    @abstractmethod
    def run(self, plan: Plan) -> Findings: ...


def load_benchmark(name: str) -> type[Benchmark]:
    """Raises `BenchmarkError` listing the known names."""
    if name not in BENCHMARKS:
        raise BenchmarkError(f"no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}", name=name)
    module, _, attribute = BENCHMARKS[name].partition(":")
    benchmark: type[Benchmark] = getattr(import_module(module), attribute)
    return benchmark


def run_benchmark(
    name: str,
    plan: Plan,
    command: str,
    commit: str | None = None,
    write: Callable[[Result], object] = lambda result: None,
) -> Result:
    """`commit` is that of the code, where it is not to be asked of git. `write` gets the result, and before it, of a
    benchmark that takes many minutes, what there is of it."""
    # Before the run: the load average is not our own yet, and the commit is that of the code that runs.
    machine, commit = machine_facts(), commit or git_commit()

    def result_of(findings: Findings) -> Result:
        return Result(
            benchmark=name,
            command=command,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=commit,
            machine=machine,
            rounds=plan.rounds,
            findings=findings,
        )

    keeping = replace(plan, keep=lambda findings: write(result_of(findings)))
    result = result_of(load_benchmark(name)().run(keeping))
    write(result)
    return result


def engine_specs(peers: Iterable[str], peer_mode: str, peer_env: Iterable[str] = ()) -> list[EngineSpec]:
    """ringcore in this Python, and each peer given as "NAME=PYTHON" in its own.

    `peer_env` has "NAME:VARIABLE=VALUE" settings for a peer's environment. Raises `BenchmarkError` for a peer that
    is not known, is given twice or has no such interpreter, and for a setting that belongs to none.
    """
    specs = [
        EngineSpec(
            "ringcore", (sys.executable, "-m", "benchmarks.peers.ringcore"), "from ringcore import LLM, SamplingParams"
        )
    ]
    for peer in peers:
        name, _, python = peer.partition("=")
        if name not in PEERS:
            raise BenchmarkError(f"--peer {peer}: no peer {name!r}; there are: {', '.join(PEERS)}", peer=peer)
        if not python or not Path(python).expanduser().is_file():
            raise BenchmarkError(f"--peer {peer}: give {name}=PYTHON, the interpreter of its environment", peer=peer)
        # Not resolved: a virtual environment's interpreter is a symbolic link, and knows its packages by its own path.
        specs += PEERS[name](str(Path(python).expanduser().absolute()), peer_mode)
    if len({spec.name for spec in specs}) != len(specs):
        raise BenchmarkError("--peer: the same peer twice; give each once")
    for setting in peer_env:
        specs = _with_setting(specs, setting)
    return specs


def child_specs(
    specs: Iterable[EngineSpec], part: str, called: str, settings: Mapping[str, Any] | None = None
) -> list[EngineSpec]:
    """The child `benchmarks.peers.PART_ENGINE` of each engine that takes part, once whatever its modes.

    Raises `BenchmarkError` for an engine without one; `called` is what it has none of.
    """
    found: dict[str, EngineSpec] = {}
    for spec in specs:
        name = spec.name.split()[0]
        module = f"{part}_{name}"
        if not (ROOT / "benchmarks" / "peers" / f"{module}.py").is_file():
            raise BenchmarkError(f"--peer {name}: it has no {called}; leave it out", peer=name)
        command = (spec.python, "-m", f"benchmarks.peers.{module}")
        found[name] = replace(spec, name=name, command=command, settings=settings or {})
    return list(found.values())


def _with_setting(specs: Sequence[EngineSpec], setting: str) -> list[EngineSpec]:
    target, _, assignment = setting.partition(":")
    variable, equals, value = assignment.partition("=")
    if not equals or not any(_is_peer(spec, target) for spec in specs):
        raise BenchmarkError(f"--peer-env {setting}: give NAME:VARIABLE=VALUE with the name of a peer", setting=setting)
    return [replace(s, env={**s.env, variable: value}) if _is_peer(s, target) else s for s in specs]


def _is_peer(spec: EngineSpec, name: str) -> bool:
    """Whether `spec` is peer `name`, in any mode."""
    return spec.name.split()[0] == name and name in PEERS


def _vllm(python: str, peer_mode: str) -> list[EngineSpec]:
    return [
        EngineSpec(
            f"vllm {mode}",
            (python, "-m", "benchmarks.peers.vllm"),
            "from vllm import LLM, SamplingParams",
            settings={"mode": mode},
            env={"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"},  # GiB
        )
        for mode in (("eager", "compiled") if peer_mode == "both" else (peer_mode,))
    ]


def _transformers(python: str, peer_mode: str) -> list[EngineSpec]:
    command = (python, "-m", "benchmarks.peers.transformers")
    statement = "import torch; from transformers import AutoModelForCausalLM, AutoTokenizer"
    return [EngineSpec("transformers", command, statement, env={"HF_HUB_OFFLINE": "1"})]


def _llama_cpp(python: str, peer_mode: str) -> list[EngineSpec]:
    command = (python, "-m", "benchmarks.peers.llama_cpp")
    settings = {"num_threads": len(os.sched_getaffinity(0))}
    return [EngineSpec("llama_cpp", command, "import llama_cpp", settings=settings)]


PEERS: Mapping[str, Callable[[str, str], list[EngineSpec]]] = {
    "vllm": _vllm,
    "transformers": _transformers,
    "llama_cpp": _llama_cpp,
}


class Fleet:
    """All engines loaded at once, all stopped but the one whose turn it is."""

    def __init__(self, plan: Plan, *, may_lose_peers: bool = False, settle_s: float = 0.0) -> None:
        """`may_lose_peers`: a peer that cannot be loaded is left out, for `lost` to tell, and the others go on.
        `settle_s`: each runs on for so long after it was loaded, and does what an engine does while nobody asks."""
        self._plan, self._may_lose_peers, self._settle_s = plan, may_lose_peers, settle_s
        self._drivers: dict[str, Driver] = {}
        self._stack = ExitStack()
        self.facts: dict[str, dict[str, Any]] = {}  # name -> Python and packages
        self.lost: dict[str, str] = {}  # name -> why it could not be loaded

    def __enter__(self) -> Fleet:
        with ExitStack() as stack:
            for spec in self._plan.specs:
                driver = stack.enter_context(spec.start())
                try:
                    self.facts[spec.name] = load_engine(driver, spec, self._plan.model).facts
                except BenchmarkError as error:
                    if not self._may_lose_peers or spec is self._plan.specs[0]:
                        raise
                    self.lost[spec.name] = error.message
                    driver.close()
                    continue
                time.sleep(self._settle_s)
                driver.pause()
                self._drivers[spec.name] = driver
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @contextmanager
    def turn(self, name: str) -> Iterator[Driver]:
        driver = self._drivers[name]
        with driver.running():
            yield driver


@dataclass(frozen=True)
class Loaded:
    import_s: float
    construct_s: float
    facts: dict[str, Any]  # the engine's Python, packages and settings


def load_engine(driver: Driver, spec: EngineSpec, model: Path) -> Loaded:
    """Imports the engine and loads the model. Raises `BenchmarkError` with the end of its log."""
    note(f"{spec.name}: loading")
    reply = driver.call("load", LOAD_TIMEOUT_S, model=str(model), settings=dict(spec.settings))
    facts = {"python": reply["python"], "packages": reply["packages"]}
    shown_env = {key: shown_path(value) if "/" in value else value for key, value in spec.env.items()}
    facts |= {"settings": dict(spec.settings), "env": shown_env}
    return Loaded(reply["import_s"], reply["construct_s"], facts)


@dataclass(frozen=True)
class Generated:
    seconds: float
    token_ids: list[list[int]]  # [prompt][new token]


def generate(driver: Driver, prompts: list[str], new_tokens: int) -> Generated:
    """One batch. Raises `BenchmarkError` where the engine generated any other number of tokens."""
    reply = Generated(**driver.call("generate", GENERATE_TIMEOUT_S, prompts=prompts, max_tokens=new_tokens))
    counts = sorted({len(ids) for ids in reply.token_ids})
    if len(reply.token_ids) != len(prompts) or counts != [new_tokens]:
        raise BenchmarkError(
            f"{driver.name}: {len(prompts)} completions of {new_tokens} tokens were asked for; "
            f"{len(reply.token_ids)} of {counts} tokens came back",
            engine=driver.name,
        )
    return reply


def interleave(names: Sequence[str], rounds: int, turn: Callable[[str, int], T]) -> dict[str, list[T]]:
    """Calls `turn(name, round)` for all names in every round, in alternating order; round 0 warms up and is not kept.

    Neighbouring turns meet the same disturbances of the machine, and the alternation takes away what a fixed
    order would give to the first or the last.
    """
    samples: dict[str, list[T]] = {name: [] for name in names}
    for round_ in range(rounds + 1):
        for name in names if round_ % 2 == 0 else reversed(names):
            value = turn(name, round_)
            if round_ > 0:
                samples[name].append(value)
    return samples


def numbers(option: str, text: str) -> list[int]:
    """The numbers between commas, each at least 1. Raises `BenchmarkError` naming the option."""
    values = [int(value) if value.isdecimal() else 0 for value in text.split(",")]
    if min(values) < 1:
        raise BenchmarkError(f"{option} {text}: give numbers of at least 1, as in 1,2,4")
    return values


def note(text: str) -> None:
    """Progress, on standard error: the table alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)
