import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringcore.chat.json_scanner import MAX_DEPTH, MAX_SCALAR_CHARS, JsonScanner

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
WORDS = [*'{}[],:" \n\\', '"a"', '"k":', "1", "-0.5e3", "01", "true", "nul", "\\u00e9", "\\ud83d", "é", "\t"]
LIKE_JSON = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


def scanned(pieces):
    """How many characters belong to the value, and whether it is complete."""
    scanner, taken = JsonScanner(), 0
    for piece in pieces:
        position = scanner.scan(piece)
        taken += position
        if position < len(piece):
            assert scanner.is_complete or scanner.is_broken
            break
    return taken, scanner.is_complete


def is_json(text):
    try:
        json.loads(text, parse_constant=lambda name: pytest.fail(name))
    except ValueError:
        return False
    return True


@settings(max_examples=100, deadline=None)
@given(JSON, st.booleans(), st.sampled_from([None, 2]))
def test_a_value_is_followed_to_its_end(value, ensure_ascii, indent):
    text = "[" + json.dumps(value, ensure_ascii=ensure_ascii, indent=indent) + "]"
    assert scanned([text + "} and more"]) == (len(text), True)
    assert scanned(list(text + "x")) == (len(text), True)
    for end in range(len(text)):
        assert scanned([text[:end]]) == (end, False)  # a beginning of JSON is never taken for broken


@settings(max_examples=500, deadline=None)
@given(LIKE_JSON)
@example('["\\ud83d"]')
@example("[1,]")
@example('{"a" 1}')
@example("[-]")
@example("[1.]")
def test_it_takes_what_pythons_reader_takes(text):
    text = f"[{text}]"
    taken, is_complete = scanned([text])
    assert scanned(list(text)) == (taken, is_complete)
    assert (is_complete and taken == len(text)) == is_json(text)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("[NaN]", 1),
        ("[Infinity]", 1),
        ("['a']", 1),
        ('{"a": undefined}', 6),
        ('["a\nb"]', 3),
        ('["\\x41"]', 3),
        ('["\\u00g0"]', 6),
        ("[truth]", 6),
        ("[1٢]", 2),
        ("[1}", 2),
        ("{1: 2}", 1),
        ('{"a": 1,}', 8),
        ("[1,]", 3),
        ("}", 0),
        ("[" * (MAX_DEPTH + 1), MAX_DEPTH),
        ("[" + "1" * (MAX_SCALAR_CHARS + 1), MAX_SCALAR_CHARS + 1),
    ],
)
def test_it_breaks_at_the_character_that_is_wrong(text, at):
    for pieces in ([text], list(text)):
        assert scanned(pieces) == (at, False)


def test_a_scalar_ends_with_what_follows_it():
    assert scanned(["12"]) == (2, False)
    assert scanned(["12 "]) == scanned(["1", "2", " "]) == (2, True)
    assert scanned(["true]"]) == (4, True)
