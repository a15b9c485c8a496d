"""Typed access to a dict read from a file; every error names the field and the file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ringcore.checkpoint.model_file import read_model_file
from ringcore.errors import ModelLoadError

__all__ = ["JSON_MAX_BYTES", "Metadata", "read_json"]

_MAX_SHOWN = 100  # characters
JSON_MAX_BYTES = 1 << 20  # of config.json and similar files, which have a few KiB


def read_json(path: str | Path, max_bytes: int = JSON_MAX_BYTES) -> dict[str, Any]:
    """The JSON object in a file. Raises `ModelLoadError` where it cannot be read, is too large or is not an object."""
    try:
        value = msgspec.json.decode(read_model_file(path, max_bytes))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}", path=str(path)) from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: holds a JSON {type(value).__name__}, an object is needed", path=str(path))
    return value


def _shown(value: object) -> str:
    """The value, shortened for an error."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class Metadata:
    """A mapping read from a file. None counts as absent, as in config.json.

    Each method returns the value of `key` in the type of its name, or `default` where it is absent; without a
    default an absent field is an error. All raise `ModelLoadError`.
    """

    def __init__(self, values: Mapping[str, Any], path: str, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self.prefix = prefix  # the path of `values` in the file, for errors: "rope_scaling."

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def error(self, key: str, what: str) -> ModelLoadError:
        name = self.prefix + key
        return ModelLoadError(f"{self.path}: field {name!r} {what}", path=self.path, field=name)

    def required(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 31) -> int:
        if default is not None and key not in self:
            return default
        value = self.required(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"is {_shown(value)}, an integer is needed")
        if not low <= value <= high:
            raise self.error(key, f"is {_shown(value)}, it must be from {low} to {high}; download the file again")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        if default is not None and key not in self:
            return default
        value = self.required(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"is {_shown(value)}, a number is needed")
        if not 0 < value <= sys.float_info.max:  # an integer may be larger than any float
            raise self.error(key, f"is {_shown(value)}, it must be above 0 and finite")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        return self.number(key) if key in self else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"is {_shown(value)}, true or false is needed")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        if default is not None and key not in self:
            return default
        value = self.required(key)
        if not isinstance(value, str):
            raise self.error(key, f"is {_shown(value)}, a string is needed")
        return value

    def child(self, key: str) -> Metadata | None:
        """The object at `key` as `Metadata`, None where it is absent or empty."""
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"is {_shown(value)}, an object is needed")
        return Metadata(value, self.path, f"{self.prefix}{key}.")
