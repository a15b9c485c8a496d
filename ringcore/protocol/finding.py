"""What a check of this machine found."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["DEVICE_CHECKS", "CheckDone", "Finding", "Level"]

Level = Literal["ok", "warning", "error"]

# In the order in which the program of the device column makes them; each says `CheckDone` after its findings.
DEVICE_CHECKS = ("torch", "GPU", "triton", "attention backends", "linear schemes")


class Finding(msgspec.Struct, frozen=True, tag="finding"):
    """mend: the command, or else the change, that would make it better; None: nothing to do."""

    check: str
    level: Level
    found: str
    mend: str | None = None


class CheckDone(msgspec.Struct, frozen=True, tag="done"):
    check: str
