"""The proposers by the names of `speculative`'s method."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError
from ringcore.worker.drafts.head_proposer import HeadProposer
from ringcore.worker.drafts.head_runs import HeadRuns
from ringcore.worker.drafts.proposer import Proposer
from ringcore.worker.drafts.suffix_proposer import SuffixProposer
from ringcore.worker.rows.request_rows import RequestRows

__all__ = ["make_proposer"]

_METHODS: Mapping[str, type[Proposer]] = {"suffix": SuffixProposer, "eagle3": HeadProposer, "mtp": HeadProposer}


def make_proposer(config: EngineConfig, rows: RequestRows, head: HeadRuns | None = None) -> Proposer | None:
    """It is told of what becomes of `rows`. head: of the model, where it has one. None without `speculative`.

    Raises `ConfigError` for a 'module:Class' that is no proposer."""
    speculation = config.scheduler.speculation
    if speculation is None:
        return None
    found = _METHODS.get(speculation.method) or _load(speculation.method)
    if issubclass(found, HeadProposer):
        if head is None:
            raise _bad(speculation.method, "it drafts by a head, whose folder is missing; give model=FOLDER too")
        proposer: Proposer = found(config, rows, head)
    else:
        proposer = found(config, rows)
    rows.add_listener(proposer)
    return proposer


def _load(name: str) -> type[Proposer]:
    module_name, _, class_name = name.partition(":")
    try:
        found: Any = getattr(import_module(module_name), class_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise _bad(name, f"importing it raised {type(error).__name__}: {error}") from error
    if not isinstance(found, type) or not issubclass(found, Proposer):
        raise _bad(name, "it is no subclass of ringcore.worker.drafts.proposer.Proposer")
    return found


def _bad(name: str, reason: str) -> ConfigError:
    option, known = "speculative.method", ", ".join(_METHODS)
    return ConfigError(
        f"{option}={name!r}: {reason}; give one of {known}, or 'module:Class' of a proposer",
        option=option,
        value=repr(name),
    )
