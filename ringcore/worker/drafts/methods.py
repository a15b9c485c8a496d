"""The proposers by the names of `speculative`'s method."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError
from ringcore.worker.drafts.proposer import Proposer
from ringcore.worker.drafts.suffix_proposer import SuffixProposer
from ringcore.worker.rows.request_rows import RequestRows

__all__ = ["make_proposer"]


def make_proposer(config: EngineConfig, rows: RequestRows) -> Proposer | None:
    """It is told of what becomes of `rows`. None without `speculative`.

    Raises `ConfigError` for a 'module:Class' that is no proposer."""
    speculation = config.scheduler.speculation
    if speculation is None:
        return None
    if speculation.method == "suffix":
        proposer: Proposer = SuffixProposer(config, rows)
    else:
        proposer = _load(speculation.method)(config, rows)
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
    option = "speculative.method"
    return ConfigError(
        f"{option}={name!r}: {reason}; give 'suffix' or 'module:Class' of a proposer", option=option, value=repr(name)
    )
