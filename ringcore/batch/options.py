"""Options of a batch job, besides those of its engines."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from ringcore.chat import choose_format
from ringcore.errors import ConfigError

__all__ = ["BatchOptions", "InputFormat", "Order"]

InputFormat = Literal["auto", "openai", "plain"]
Order = Literal["completion", "input"]


def _option(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"option": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Raises `ConfigError`. Each field is described by its metadata's "option".

    served_model_names: as in `ServiceOptions`: what a body's "model" may say, and "model" in the answers.
    tool_call_parser, reasoning_parser: as in `ServiceOptions`.
    """

    served_model_names: tuple[str, ...] = ()
    tool_call_parser: str | None = "auto"
    reasoning_parser: str | None = "auto"
    format: str = _option("auto", "the lines of the input: openai, plain, or auto to tell by the first one")
    order: str = _option("completion", "the order of the results: completion, or input")
    journal: str | None = _option(None, "the journal's path; default: the output's with .journal at its end")
    data_parallel: int = _option(1, "engines that are fed from one queue, each on devices of its own")
    ray: str | None = _option(
        None, "run the engines on the nodes of this Ray cluster: HOST:PORT of its head, or auto for this host's"
    )
    max_in_flight: int | None = _option(
        None, "requests that an engine has at once; default: twice its max_num_seqs, so that it never waits for one"
    )
    look_ahead: int = _option(1024, "lines that are read ahead, and run in the order of their prompts' beginnings")
    sync_interval_s: float = _option(
        1.0, "seconds between two times that results are forced to the disk: a power cut costs what is younger"
    )
    engine_restarts: int = _option(8, "how often in a row engines may die without a result between, until the job ends")
    max_line_bytes: int = _option(16 << 20, "a longer line of the input is an error record")

    def __post_init__(self) -> None:
        _check_choice("format", self.format, get_args(InputFormat))
        _check_choice("order", self.order, get_args(Order))
        for name in ("data_parallel", "look_ahead", "max_line_bytes"):
            self._check_integer(name, 1)
        self._check_integer("engine_restarts", 0)
        if self.max_in_flight is not None:
            self._check_integer("max_in_flight", 1)
        seconds = self.sync_interval_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= 3600:
            raise _bad("sync_interval_s", seconds, "give seconds, from 0 (after each result) to 3600")
        if math.isnan(seconds):
            raise _bad("sync_interval_s", seconds, "give a number")
        if self.ray is not None and (not isinstance(self.ray, str) or not self.ray or "://" in self.ray):
            raise _bad("ray", self.ray, "give HOST:PORT of the cluster's head, or auto")
        for name in self.served_model_names:
            if not isinstance(name, str) or not name:
                raise _bad("served_model_names", name, "give names that are not empty")
        choose_format(None, self.tool_call_parser, self.reasoning_parser)

    def _check_integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _bad(name, value, f"give an integer of at least {least}")

    @classmethod
    def described(cls) -> list[Any]:
        """The fields that are a flag of the command as they are."""
        return [f for f in fields(cls) if "option" in f.metadata]


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise _bad(name, value, f"give {' or '.join(map(repr, choices))}")


def _bad(option: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"{option}={value!r}: {remedy}", option=option, value=value)
