"""File names across processes. Python decodes a name by the locale's encoding, with undecodable bytes as surrogates
(surrogateescape), which messages cannot encode; child processes receive names as UTF-8, whatever the locale.
"""

from __future__ import annotations

import os
from typing import Any

from ringcore.errors import ModelLoadError

__all__ = ["as_file_name", "as_utf8", "with_utf8_names"]


def as_file_name(name: str) -> str:
    """Re-encodes a name that was written in UTF-8, for example in a program, for this process's file system calls."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return os.fsdecode(name.encode("utf-8", "surrogateescape"))
    return name


def as_utf8(name: str) -> str:
    """The name as text without surrogates. Raises `ModelLoadError` where its bytes are not UTF-8."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        try:
            return os.fsencode(name).decode("utf-8")
        except UnicodeError:
            what = f"{name!a}: its name is not UTF-8; rename the file or folder"
            raise ModelLoadError(what, path=ascii(name)) from None
    return name


def with_utf8_names(value: Any) -> Any:
    """Builtin values with `as_utf8` applied to every string."""
    match value:
        case str():
            return as_utf8(value)
        case list() | tuple():
            return [with_utf8_names(item) for item in value]
        case dict():
            return {key: with_utf8_names(item) for key, item in value.items()}
    return value
