"""StructuredOutputsParams at its bounds and past them."""

from __future__ import annotations

import json
from dataclasses import fields

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcore import StructuredOutputsParams
from ringcore.errors import InvalidRequestError


def schema(depth: int) -> dict:
    inner: dict = {}
    for _ in range(depth - 1):
        inner = {"not": inner}
    return inner


GOOD = [
    ("json", {"type": "object", "properties": {"a": {"enum": [1, 2.5, None, True, "x"]}}}),
    ("json", '{"type": "integer"}'),
    ("json", schema(64)),
    ("json", json.dumps(schema(64))),
    ("json_object", True),
    ("regex", r"[0-9]{3}-\d+"),
    ("regex", "(" * 64 + ")" * 64),
    ("regex", r"\(" * 100),
    ("regex", "[" + "(" * 100 + "]"),
    ("choice", ["yes", "no"]),
    ("choice", ["x"] * 1024),
    ("grammar", 'start: "(" | "a"\n' + 'b: "("\n' * 100),
    ("grammar", "x" * 65_536),
]

BAD = [
    ("json", "{", "no JSON"),
    ("json", "[]", "an object"),
    ("json", [], "an object"),
    ("json", '{"a": NaN}', "NaN is no JSON number"),
    ("json", {"a": float("nan")}, "it holds this"),
    ("json", {1: 2}, "the keys of its dicts have to be strings"),
    ("json", schema(65), "more than 64 deep"),
    ("json", "[" * 60_000, "deep"),
    ("json", {"a": "x" * 65_536}, "65536"),
    ("json", '"' + "x" * 65_536, "65536 characters"),
    ("json_object", False, "give True"),
    ("json_object", 1, "give True"),
    ("regex", "", "1 to 65536 characters"),
    ("regex", 5, "1 to 65536 characters"),
    ("regex", "\ud800", "surrogate"),
    ("regex", "(" * 65, "more than 64 deep"),
    ("regex", "[a](" * 65, "more than 64 deep"),
    ("choice", [], "1 to 1024"),
    ("choice", ["x"] * 1025, "1 to 1024"),
    ("choice", "yes", "give a list"),
    ("choice", ["yes", ""], "1 to 65536"),
    ("choice", ["yes", 5], "1 to 65536"),
    ("choice", ["x" * 40_000] * 2, "fewer or shorter"),
    ("grammar", "x" * 65_537, "1 to 65536"),
    ("grammar", "start: " + "(" * 65, "more than 64 deep"),
]


@pytest.mark.parametrize(("kind", "value"), GOOD, ids=lambda value: str(value)[:40])
def test_good_values_survive_the_wire(kind, value):
    params = StructuredOutputsParams(**{kind: value})
    assert params.kind == kind
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=StructuredOutputsParams) == params


@pytest.mark.parametrize(("kind", "value", "says"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_value_is_named_with_its_remedy(kind, value, says):
    with pytest.raises(InvalidRequestError, match=rf"^structured_outputs\.{kind}=.*: .*{says}") as caught:
        StructuredOutputsParams(**{kind: value})
    assert caught.value.details["field"] == f"structured_outputs.{kind}"
    assert len(caught.value.message) < 500
    msgspec.msgpack.encode([caught.value.message, caught.value.details])


@pytest.mark.parametrize("given", [{}, {"regex": "a", "choice": ["b"]}, {"json_object": False, "regex": "a"}])
def test_exactly_one_is_given(given):
    with pytest.raises(InvalidRequestError, match="give exactly one of json, json_object, regex, choice, grammar"):
        StructuredOutputsParams(**given)


def test_what_comes_over_the_wire_is_checked_too():
    with pytest.raises(msgspec.ValidationError, match="exactly one"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({}), type=StructuredOutputsParams)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8) | st.builds(object),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from([field.name for field in fields(StructuredOutputsParams)]), value=JUNK)
def test_any_junk_is_taken_or_named(kind, value):
    try:
        params = StructuredOutputsParams(**{kind: value})
    except InvalidRequestError as error:
        refusal = error
    else:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=StructuredOutputsParams) == params
        return
    assert refusal.details["field"].startswith("structured_outputs")
    msgspec.msgpack.encode([refusal.message, refusal.details])


@settings(max_examples=200, deadline=None)
@given(text=st.text("([{)]}\\\"'/\n a", min_size=1, max_size=300))
def test_brackets_of_any_text_take_no_exception(text):
    for kind in ("regex", "grammar"):
        refusal = ""
        try:
            StructuredOutputsParams(**{kind: text})
        except InvalidRequestError as error:
            refusal = error.message
        assert not refusal or "more than 64 deep" in refusal
        assert not refusal or sum(text.count(bracket) for bracket in "([{") > 64
