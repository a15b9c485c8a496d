"""The commands and programs that the documents show, for tests that run them as typed."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python_blocks(page: str) -> list[str]:
    """The Python programs of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def commands(names: str, *pages: str, texts: tuple[str | None, ...] = ()) -> list[str]:
    """The lines of code that begin with `ringcore` and one of `names` ("ps|rpc"), without comments, each once; those
    within a sentence too, where they have an argument. texts: docstrings besides the pages."""
    wanted = re.compile(
        rf"(?:^ {{4,}}|^|`)(ringcore (?:--\S+ \S+ )*(?:{names})(?: [^`\n]+|$))|^ {{4,}}(ringcore (?:{names}))$", re.M
    )
    found = [
        (first or second).partition("  #")[0].strip()
        for text in (*((ROOT / page).read_text() for page in pages), *texts)
        for first, second in wanted.findall(text or "")
    ]
    return list(dict.fromkeys(found))
