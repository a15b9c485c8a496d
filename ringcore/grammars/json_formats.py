"""The formats of JSON schemas as regular expressions: the grammar libraries' own formats accept impossible dates and
times.

A text has a format if all its patterns match. Leap seconds are refused: their existence depends on the date.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["FORMAT_PATTERNS"]

_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR = r"(?:[01]\d|2[0-3])"
_TIME = rf"{_HOUR}:[0-5]\d:[0-5]\d(?:\.\d{{1,9}})?(?:[Zz]|[+-]{_HOUR}:[0-5]\d)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_HEX = "[0-9a-fA-F]"
_GROUP = f"{_HEX}{{1,4}}"
# :: replaces at least one group of zeros, between `before` groups and the rest.
_SHORTENED = "|".join(
    f"{':'.join([_GROUP] * before)}::" + (f"(?:{_GROUP}(?::{_GROUP}){{0,{6 - before}}})?" if before < 7 else "")
    for before in range(8)
)
# Letters, digits and hyphens; no hyphen at either end, and not both the third and the fourth character (RFC 5890).
_ALNUM, _INNER = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
_LABEL = (
    rf"{_ALNUM}(?:{_ALNUM}|{_INNER}{_ALNUM}|{_INNER}(?:{_ALNUM}|-){_ALNUM}"
    rf"|{_INNER}(?:{_ALNUM}{_INNER}|-{_ALNUM}){_INNER}{{0,58}}{_ALNUM})?"
)
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"

FORMAT_PATTERNS: Mapping[str, Sequence[str]] = {
    "date": [f"^{_DATE}$"],
    "time": [f"^{_TIME}$"],
    "date-time": [f"^{_DATE}[Tt]{_TIME}$"],
    "uuid": [f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$"],
    "ipv4": [rf"^{_BYTE}(?:\.{_BYTE}){{3}}$"],
    "ipv6": [f"^(?:{_GROUP}(?::{_GROUP}){{7}}|{_SHORTENED})$"],
    "hostname": [f"^{_HOSTNAME}$", "^.{1,253}$"],
    "email": [rf"^{_ATOM}(?:\.{_ATOM})*@{_HOSTNAME}$", "^[^@]{1,64}@[^@]{1,253}$", "^.{3,254}$"],
}
