"""`ringcore --version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from ringcore.version import __version__

__all__ = ["version_line"]


def version_line() -> str:
    """Of ringcore, Python and torch, which is not imported for it."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return f"ringcore {__version__} (Python {platform.python_version()}, torch {torch})"
