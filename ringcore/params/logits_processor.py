"""Custom logits processors: user classes that change rows of logits in every worker, before sampling.

A class is given to an engine as `logits_processors=["module:Class"]`, or as the class itself. Every worker creates one
instance, and calls it once per step for all participating rows. This module does not import torch.
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
    """What a processor knows of its engine."""

    vocab_size: int  # columns of the logits; the tokenizer may know fewer tokens
    max_num_seqs: int  # rows are 0 to max_num_seqs - 1
    device: Any  # the torch.device of the logits
    dtype: str  # the model's compute dtype; the logits of `apply` are float32
    eos_token_ids: tuple[int, ...]


class LogitsProcessor(ABC):
    """Changes the logits of participating rows, between the penalties and the token masks (see `SamplingParams`).

    A request has a row from `admit` to `remove`. After a preemption it is admitted again, maybe to another row, with
    the same prompt, and its generated tokens are in `token_ids` from the first `apply` on: a processor's per-row state
    has to follow from those. It must be deterministic, and the same on every rank: each rank samples on its own.

    An exception of `admit` or `apply` becomes the error of the participating requests; others continue. A processor
    whose `remove` raises is disabled for new requests.
    """

    needs_token_ids: ClassVar[bool] = False  # True makes each step wait for the tokens of the previous one

    def __init__(self, context: LogitsProcessorContext) -> None:
        """Called once in each worker at start-up. An exception fails the start."""
        self.context = context

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Called in the front end for every request. Raises ValueError for parameters that `admit` would refuse."""
        return  # no checks by default

    @abstractmethod
    def admit(self, row: int, params: SamplingParams, prompt_token_ids: np.ndarray) -> bool:
        """Whether a new request participates, for example by its `params.extra_args`. prompt_token_ids: [n] int32."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: np.ndarray, token_ids: Sequence[np.ndarray] | None) -> None:
        """Changes `logits` [k, vocab_size] float32 in place, on the context's device.

        rows: [k] int32, participating rows in any order. token_ids: per row, its generated tokens [num_generated]
        int32; None without `needs_token_ids`.
        """

    def remove(self, row: int) -> None:  # noqa: B027 - stateless processors need none
        """Called when a participating request leaves its row."""


def logits_processor_name(processor: object) -> str:
    """'module:Class' of a class; such a name unchanged. Raises `ConfigError` for a class that workers cannot import."""
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
    """Raises `InvalidRequestError` with the reason of the first processor that refuses the parameters."""
    for processor in processors:
        try:
            processor.validate_params(params)
        except InvalidRequestError:
            raise
        except Exception as error:  # user code: only this request fails
            reason = str(error) if isinstance(error, ValueError) else f"it raised {type(error).__name__}: {error}"
            raise InvalidRequestError(
                f"extra_args={params.extra_args!r:.200}: the logits processor {processor.__qualname__} refuses the "
                f"request: {reason}",
                field="extra_args",
                value=repr(params.extra_args)[:200],
            ) from error


def _bad(value: object, remedy: str) -> ConfigError:
    return ConfigError(f"logits_processors={value!r}: {remedy}", option="logits_processors", value=repr(value))
