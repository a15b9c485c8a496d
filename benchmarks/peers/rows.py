"""What children that measure many things at once share. Run by the Python of each peer's own environment."""

from __future__ import annotations

import gc
import platform
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.protocol import package_versions

__all__ = ["Row", "facts", "forget_garbage"]

Row = tuple[str, str, float]  # name, unit, value


def facts(packages: tuple[str, ...], import_s: float = 0.0, construct_s: float = 0.0) -> Mapping[str, Any]:
    """What the harness asks of every child once it is loaded."""
    took = {"import_s": import_s, "construct_s": construct_s}
    return took | {"python": platform.python_version(), "packages": package_versions(packages)}


def forget_garbage() -> None:
    """As both engines do once they have started: what is there now is no matter of later collections."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
