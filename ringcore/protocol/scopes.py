"""What a call may do to an engine, as the keys of admin clients have it: the scopes."""

from __future__ import annotations

from typing import Literal

__all__ = ["SCOPES", "Scope"]

# "read" changes nothing; "call" is any other worker method; "lifecycle" stops serving or changes the model.
Scope = Literal["read", "call", "lifecycle"]
SCOPES: tuple[Scope, ...] = ("read", "call", "lifecycle")
