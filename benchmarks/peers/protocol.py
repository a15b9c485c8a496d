"""The child's side of the line protocol: one JSON command a line in, one JSON reply a line out.

    {"command": "load", "arguments": {...}}  ->  {"value": ...}  or  {"error": "Type: message", "traceback": "..."}

Only the standard library: this file is run by the Python of each peer's own environment.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, ClassVar, TextIO

__all__ = ["Engine", "package_versions", "serve", "serve_engine", "take_stdio"]


class Engine(ABC):
    """What a benchmark asks of any engine. Methods are called in the order they stand here."""

    packages: ClassVar[tuple[str, ...]]  # whose versions go into the result

    @abstractmethod
    def import_library(self) -> None:
        """Everything a user's script imports before it builds the engine."""

    @abstractmethod
    def construct(self, model: str, settings: Mapping[str, Any]) -> None:
        """Builds the engine on a model folder, in float32, ready for a first request."""

    @abstractmethod
    def generate(self, prompts: list[str], max_tokens: int) -> list[list[int]]:
        """Greedily, exactly `max_tokens` tokens for each prompt, end of text or not: text in, text and ids out."""

    def pids(self) -> dict[str, int]:
        """The engine's processes that have a role worth a line of their own; by default none."""
        return {}

    def close(self) -> None:  # noqa: B027 - an engine without processes of its own has nothing to end
        """Ends what `construct` started."""


def serve_engine(engine: Engine) -> None:
    """Serves the commands load, generate and pids until the parent says quit or is gone."""

    def load(model: str, settings: dict[str, Any]) -> dict[str, Any]:
        began_s = time.perf_counter()
        engine.import_library()
        imported_s = time.perf_counter()
        engine.construct(model, settings)
        return {
            "import_s": imported_s - began_s,
            "construct_s": time.perf_counter() - imported_s,
            "python": platform.python_version(),
            "packages": package_versions(engine.packages),
        }

    def generate(prompts: list[str], max_tokens: int) -> dict[str, Any]:
        began_s = time.perf_counter()
        token_ids = engine.generate(prompts, max_tokens)
        return {"seconds": time.perf_counter() - began_s, "token_ids": token_ids}

    try:
        serve({"load": load, "generate": generate, "pids": engine.pids})
    finally:
        engine.close()


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answers commands from standard input by name; an exception is the reply to its command and no more."""
    commands, replies = take_stdio()
    for line in commands:
        request = json.loads(line)
        if request["command"] == "quit":
            return
        print(json.dumps(_answer(handlers, request)), file=replies, flush=True)


def _answer(handlers: Mapping[str, Callable[..., Any]], request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": handlers[request["command"]](**request["arguments"])}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def take_stdio() -> tuple[TextIO, TextIO]:
    """The parent's two pipes, out of the reach of libraries that print: those get an empty input and the log."""
    commands, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdout.flush()
    os.dup2(2, 1)
    return commands, replies


def package_versions(names: tuple[str, ...]) -> dict[str, str]:
    """The installed version of each package that is installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
