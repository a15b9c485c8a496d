"""Logits processors of your own: classes that change rows of logits in every worker, before a token is drawn.

A class is given to an engine as `logits_processors=["module:Class"]`, or as the class itself. Every worker makes one
object of it, and in every step asks it for all rows that take part at once. This module needs no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from ringcore.errors import ConfigError, InvalidRequestError
from ringcore.params.sampling_params import SamplingParams

__all__ = [
    "LogitsProcessor",
    "LogitsProcessorContext",
    "check_params",
    "load_logits_processor",
    "logits_processor_name",
]

Tensor = Any  # a torch.Tensor; the front end, which imports this, has no torch


@dataclass(frozen=True, slots=True)
class LogitsProcessorContext:
    """What a processor is told of the engine that it is made for."""

    vocab_size: int  # columns of the logits; the tokenizer may know fewer tokens
    max_num_seqs: int  # rows are 0 to max_num_seqs - 1
    device: Any  # the torch.device of the logits
    dtype: str  # that the model computes in; the logits of `apply` are float32
    eos_token_ids: tuple[int, ...]


class LogitsProcessor(ABC):
    """Changes the logits of the rows that take part, between the penalties and the masks (see `SamplingParams`).

    A request has a row from `admit` to `remove`. After a preemption it comes again, maybe in another row, with the same
    prompt, and what it has generated is in `token_ids` from the first `apply` on: what a processor keeps of a row has
    to follow from those. It must be deterministic, and the same on every rank: each rank draws its own tokens.

    What `admit` or `apply` raises is the error of the requests that take part; others go on. A processor whose
    `remove` raises takes no more requests.
    """

    needs_token_ids: ClassVar[bool] = False  # True costs a wait in each step, for the tokens of the one before

    def __init__(self, context: LogitsProcessorContext) -> None:
        """Called once in each worker, before there are requests. What it raises stops the start."""
        self.context = context

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Called in the front end for every request. Raises ValueError for what `admit` could not take."""
        return  # as most do

    @abstractmethod
    def admit(self, row: int, params: SamplingParams, prompt_token_ids: np.ndarray) -> bool:
        """Whether a new request takes part: its `params.extra_args` tell, say. prompt_token_ids: [n] int32."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: np.ndarray, token_ids: Sequence[np.ndarray] | None) -> None:
        """Changes `logits` [k, vocab_size] float32 in place, on the context's device.

        rows: [k] int32, of requests that take part, in any order. token_ids: by row, [num_generated] int32, what it has
        generated so far; None without `needs_token_ids`.
        """

    def remove(self, row: int) -> None:  # noqa: B027 - many keep nothing of a row
        """The request that took part in `row` has left it."""


def logits_processor_name(processor: object) -> str:
    """'module:Class' of a class, or such a name as it is. Raises `ConfigError` for what workers cannot import."""
    if isinstance(processor, str):
        module, colon, name = processor.partition(":")
        if not (module and colon and name):
            raise _bad(processor, "give 'module:Class'")
        shown = processor
    elif isinstance(processor, type):
        module, name = processor.__module__, processor.__qualname__
        shown = f"{module}:{name}"
    else:
        raise _bad(repr(processor)[:80], "give a class, or its name as 'module:Class'")
    if module == "__main__" or "<locals>" in name:
        raise _bad(shown, "workers cannot import it; move the class to the top level of a module of its own")
    return shown


def load_logits_processor(name: str) -> type[LogitsProcessor]:
    """The class of a 'module:Class'. Raises `ConfigError`."""
    module_name, _, class_name = name.partition(":")
    try:
        found: Any = import_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise _bad(name, f"importing {module_name} raised {type(error).__name__}: {error}") from error
    for part in class_name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise _bad(name, f"{module_name} has no subclass {class_name} of ringcore.LogitsProcessor")
    return found


def check_params(processors: Sequence[type[LogitsProcessor]], params: SamplingParams) -> None:
    """Raises `InvalidRequestError` with what the first processor that refuses says."""
    for processor in processors:
        try:
            processor.validate_params(params)
        except InvalidRequestError:
            raise
        except Exception as error:  # a stranger's code: whatever it raises concerns this request alone
            told = str(error) if isinstance(error, ValueError) else f"it raised {type(error).__name__}: {error}"
            raise InvalidRequestError(
                f"extra_args={params.extra_args!r:.200}: the logits processor {processor.__qualname__} refuses the "
                f"request: {told}",
                field="extra_args",
                value=repr(params.extra_args)[:200],
            ) from error


def _bad(value: object, remedy: str) -> ConfigError:
    return ConfigError(f"logits_processors={value!r}: {remedy}", option="logits_processors", value=repr(value))
