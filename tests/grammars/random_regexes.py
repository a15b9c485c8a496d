"""Random regular expressions in the syntax of Python's `re`, and texts that may match them."""

from __future__ import annotations

import random

ALPHABET = 'abcAkZz019_-]^$.\\ \n\r\t"/é🙂٣ſ\u212a\u00a0\u2028\x00\x1c\x85'
# What is cut into pieces and put together anyhow: most of it is no expression, and some is an unsupported one.
_SCRAPS = [
    *'abkZ_-]{},^$.|()*+?01 é🙂\n&[\\/"',
    *(r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\n", r"\x61", r"\u0062", r"\.", r"\-", r"\]", r"\^", r"\b", r"\B"),
    *(r"\A", r"\Z", r"\0", r"\1", r"\141", r"\e", r"\a", r"\U0001f642", r"\p", r"\/", r"\v"),
    *("(?:", "(?i:", "(?s:", "(?-i:", "(?P<x>", "(?=", "(?!", "(?<=", "(?>", "(?#x)", "(?i)", "(?x)", "(?m:", "(?a:"),
    *("{2}", "{1,2}", "{,2}", "{0,}", "{2,1}", "{0}", "{,}", "[^", "[a-c", "[]", "[^]", "[[:alpha:]]", "-a", "&&"),
    *("*?", "+?", "??", "++", "*+", "a{2}{2}"),
]
_ATOMS = [
    *("a", "b", "A", "k", "0", "-", "_", " ", "\n", '"', "/", "é", "🙂", ".", ".", "]", "}", "{", "{,", "a{,2", "&"),
    *(r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\n", r"\t", r"\x61", r"\u00e9", r"\U0001f642", r"\.", r"\\", r"\^"),
    *(
        "[ab]",
        "[^ab]",
        "[]a]",
        "[^]a]",
        "[a-c]",
        r"[\d_]",
        r"[^\s]",
        r"[\w-]",
        "[a-]",
        r"[\^]",
        "[^^]",
        "[[]",
        "[a&&b]",
    ),
    *(r"[^\n]", '[^"]', "[é-í]", "[🙂]", r"[\x00-\x1f]", r"[\W]", r"[^\W]", r"[\b]", r"[\]-a]", "[^é]", r"[^\D]"),
]
_QUANTIFIERS = ["*", "+", "?", "{2}", "{0,2}", "{1,}", "{,2}", "{0}", "*?", "+?", "??", "{1,2}?"]
_GROUPS = ["(", "(?:", "(?i:", "(?s:", "(?-s:", "(?s-i:", "(?P<{name}>"]


def kept_regex(rng: random.Random, depth: int = 2) -> str:
    """One that `re` takes, of constructs that every backend keeps."""
    regex = "|".join(_sequence(rng, depth) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    regex = rng.choice(["", "", "", "(?i)", "(?s)"]) + regex if depth == 2 else regex
    return (
        f"^(?:{regex})$"
        if depth == 2 and not regex.startswith("(?i)") and not regex.startswith("(?s)") and (rng.random() < 0.2)
        else regex
    )


def _sequence(rng: random.Random, depth: int) -> str:
    return "".join(_item(rng, depth) for _ in range(rng.randrange(0 if depth < 2 else 1, 4)))


def _item(rng: random.Random, depth: int) -> str:
    if depth and rng.random() < 0.3:
        begin = rng.choice(_GROUPS).format(name=f"g{rng.randrange(10**9)}")
        atom = f"{begin}{kept_regex(rng, depth - 1)})"
    else:
        atom = rng.choice(_ATOMS)
    is_whole = atom not in ("{,", "a{,2")
    return atom + rng.choice(_QUANTIFIERS) if is_whole and rng.random() < 0.4 else atom


def any_regex(rng: random.Random) -> str:
    """Scraps of expressions, which mostly are none."""
    return "".join(rng.choice(_SCRAPS) for _ in range(rng.randrange(1, 7)))


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(5)))


def changed(text: str, rng: random.Random) -> str:
    """With one character more, less, or another."""
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(["", rng.choice(ALPHABET)]) + text[at + rng.randrange(2) :]
