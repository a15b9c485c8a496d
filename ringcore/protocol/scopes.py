"""Scopes: the permissions of an admin client's key."""

from __future__ import annotations

from typing import Literal

__all__ = ["SCOPES", "Scope"]

# "read" changes nothing; "call" is any other worker method; "lifecycle" stops serving or changes the model.
Scope = Literal["read", "call", "lifecycle"]
SCOPES: tuple[Scope, ...] = ("read", "call", "lifecycle")
