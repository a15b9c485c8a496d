"""Sizes as people write them: 2GiB."""

from __future__ import annotations

import re

import typer

__all__ = ["SIZE", "size_in_bytes"]

SIZE = "<bytes, or 2GiB>"  # in the help of a flag
_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    f"{letter}{of}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for of, base in (("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)\s*([a-z]*)")


def size_in_bytes(text: str) -> int:
    """A number of bytes, alone or of a unit: KB, MB, GB and TB are powers of 1000, KiB, MiB, GiB and TiB of 1024."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no size; give bytes as 1048576, 512MiB, 2GiB or 2.5GB")
    number, unit = found[1], _UNITS[found[2]]
    return int(number) * unit if number.lstrip("-").isdecimal() else round(float(number) * unit)
