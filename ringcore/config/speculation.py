"""The engine option `speculative`: speculative decoding without a second model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ringcore.config.value_checks import bad_value
from ringcore.errors import ConfigError, unknown_option

__all__ = ["SPECULATIVE_METHODS", "Speculation", "check_speculative"]

SPECULATIVE_METHODS = ("suffix",)
MAX_DRAFTS = 64
_MAX_SHARED_TOKENS = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The fields of the option.

    method: "suffix", drafts that followed the row's last tokens before, or 'module:Class' of a proposer of your own
    (`worker.drafts.proposer`). num_drafts: the most drafts of a row in a step. min_match: a row has drafts where at
    least this many of its last tokens stood before. shared_tokens: tokens of completions of other requests that are
    kept to draft from, the oldest dropped first; 0 drafts from a request's own tokens alone.
    """

    method: str
    num_drafts: int = 8
    min_match: int = 3
    shared_tokens: int = 1 << 18


def check_speculative(options: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a value of `speculative` that cannot be served."""
    given = options["speculative"]
    if given is None:
        return
    if not isinstance(given, dict) or "method" not in given:
        raise bad_value("speculative", given, 'give an object as {"method": "suffix"}, or None')
    names = [field.name for field in fields(Speculation)]
    for name in given:
        if name not in names:
            raise unknown_option(name, names, "field of speculative")
    method = given["method"]
    if not isinstance(method, str) or (method not in SPECULATIVE_METHODS and ":" not in method):
        remedy = f"give one of {', '.join(SPECULATIVE_METHODS)}, or 'module:Class' of a proposer"
        raise bad_value("speculative.method", method, remedy)
    for name, low, high in (
        ("num_drafts", 1, MAX_DRAFTS),
        ("min_match", 1, 32),
        ("shared_tokens", 0, _MAX_SHARED_TOKENS),
    ):
        _check_between(f"speculative.{name}", given.get(name, low), low, high)
    if options["pipeline_parallel_size"] != 1:
        raise bad_value(
            "speculative",
            given,
            f"drafts need the last token where the step begins, and with pipeline_parallel_size="
            f"{options['pipeline_parallel_size']} the last stage alone has it; give pipeline_parallel_size=1, or leave "
            "this out",
        )


def _check_between(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r}: give an integer from {low} to {high}", option=name, value=repr(value))
