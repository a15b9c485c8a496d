"""Whether this process was started by ringcore, and so runs no code of an application but what it was given."""

from __future__ import annotations

__all__ = ["is_own_process", "mark_own_process"]

_is_own = False


def mark_own_process() -> None:
    global _is_own
    _is_own = True


def is_own_process() -> bool:
    return _is_own
