"""JSON schemas by either backend: what is written satisfies the schema, what is accepted does too, and a schema that
cannot be enforced is refused. Between two parts of JSON there are few blanks."""

from __future__ import annotations

import json
import random
import re

import pytest
from any_schemas import any_schema, any_text
from grammar_texts import BLANK, Grammar, make_backend

from ringcore.errors import InvalidRequestError
from ringcore.grammars.json_schemas import normalized_schema
from ringcore.params.structured_outputs import StructuredOutputsParams

validators = pytest.importorskip("jsonschema_rs")
BACKENDS = ("llguidance", "xgrammar")


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    pytest.importorskip(request.param)
    return make_backend(request.param)


def spec(schema) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema)


def value_of(text: str | bytes):
    return json.loads(text, parse_float=lambda number: max(-1e308, min(1e308, float(number))))


# ---------------------------------------------------------------------------------------------------------------
# Texts that a schema allows and texts that it does not, as the specification has it.

CASES = [
    # schema, allowed, not allowed
    ({"type": "string", "pattern": "a"}, ['"a"', '"xay"'], ['""', '"x"']),
    ({"type": "string", "pattern": "^a"}, ['"ab"'], ['"ba"']),
    ({"type": "string", "pattern": "a$"}, ['"ba"'], ['"ab"', '"a\\n"']),
    (
        {"type": "string", "pattern": "^.$"},
        ['"a"', '"🙂"', '"\\""', '"\\\\"'],
        ['"\\n"', '"\\r"', '"\u2028"', '"ab"', '"\n"'],
    ),
    ({"type": "string", "pattern": r"^\s$"}, ['" "', '"\u00a0"', '"\ufeff"', '"\\n"'], ['"\x85"', '"a"']),
    ({"type": "string", "pattern": r"^[^a]$"}, ['"b"', '"\\n"', '"\\""', '"\\\\"'], ['"a"', '"\\u0061"', '"\\"']),
    ({"type": "string", "pattern": r"^[\^]$"}, ['"^"'], ['"a"']),
    ({"type": "string", "pattern": r"^\d\w\u{1f642}$"}, ['"1_🙂"'], ['"٣_🙂"', '"1é🙂"']),
    ({"type": "string", "pattern": r"^\ud83d\ude42$"}, ['"🙂"'], ['"\\ud83d"']),
    (
        {"type": "string", "minLength": 1, "maxLength": 1},
        ['"🙂"', '"\\n"', '"\\""'],
        ['""', '"ab"', '"\n"', '"e\u0301"'],
    ),
    ({"type": "string"}, ['"\\n"', '""'], ['"\\ud83d"', '"\\x"', '"\n"', '"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"1900-02-29"', '"2023-04-31"']),
    ({"type": "string", "format": "time"}, ['"12:00:00Z"'], ['"12:59:60Z"', '"24:00:00Z"']),
    ({"type": "string", "format": "date-time"}, ['"2024-02-29T00:00:00Z"'], ['"2023-02-29T00:00:00Z"']),
    ({"type": "string", "format": "ipv4"}, ['"1.2.3.40"'], ['"01.2.3.4"', '"256.1.1.1"']),
    (
        {"type": "string", "format": "ipv6"},
        ['"::"', '"1::2"', '"1:2:3:4:5:6:7:8"'],
        ['"1::2::3"', '"::01.2.3.4"', '"1:2"'],
    ),
    ({"type": "integer"}, ["0", "-7"], ["1.5", "01", "-", '"1"', "true"]),
    ({"type": "integer", "exclusiveMinimum": 1}, ["2"], ["1", "-2"]),
    ({"type": "number", "exclusiveMaximum": 0}, ["-0.5", "-1"], ["0", "0.0"]),
    ({"enum": ["a", 1, None, True, [1]]}, ['"a"', "1", "null", "true", "[1]"], ['"1"', "false", "[]"]),
    ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}, ['{"a":null}'], ["{}", '{"a":1}']),
    (
        {"type": "object", "properties": {"whitespace{0, 64}": {"const": "[ ]"}}, "required": ["whitespace{0, 64}"]},
        ['{"whitespace{0, 64}": "[ ]"}'],
        ['{" ": "[ ]"}'],
    ),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        ["[1]", "[1, 2]"],
        ["[]", "[1,2,3]"],
    ),
]
# Only llguidance keeps these.
CASES_OF_LLGUIDANCE = [
    ({"pattern": "a"}, ['"a"', "1"], ['"b"']),
    ({"type": "string", "format": "hostname"}, ['"a.b"'], ['"ab--cd"', '"-a"', f'"{"a" * 64}"', f'"{"a." * 127}a"']),
    ({"type": "string", "format": "email"}, ['"a+b@c.de"'], [f'"{"a" * 65}@c.de"', '"a@"', '"a..b@c.de"']),
    ({"type": "string", "pattern": r"^\p{Lu}$"}, ['"É"'], ['"é"']),
    (
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
        ['{"a":null,"b":1}'],
        ['{"a":null,"\\u0061":1}', '{"\\u0061":1}'],
    ),
    (
        {"type": "object", "patternProperties": {"^x": {"type": "null"}}},
        ['{"xy":null,"y":1}'],
        ['{"\\u0078":1}', '{"x":1}'],
    ),
    ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
    ({"type": "array", "uniqueItems": False, "items": {"type": "null"}}, ["[null,null]"], ["[1]"]),
]


@pytest.mark.parametrize(("schema", "allowed", "others"), CASES)
def test_what_the_specification_says(backend, schema, allowed, others):
    check_case(backend, schema, allowed, others)


@pytest.mark.parametrize(("schema", "allowed", "others"), CASES_OF_LLGUIDANCE)
def test_what_only_llguidance_keeps(schema, allowed, others):
    pytest.importorskip("llguidance")
    check_case(make_backend("llguidance"), schema, allowed, others)


def check_case(backend, schema, allowed, others):
    grammar, rng = Grammar(backend, spec(schema)), random.Random(0)
    assert [text for text in [*allowed, *others] if grammar.accepts(text, rng)] == allowed


def test_random_schemas_are_kept_or_refused(backend, is_long):
    num_schemas, num_compiled = 2000 if is_long else 60, 0
    for seed in range(num_schemas):
        rng = random.Random(seed)
        schema = any_schema(rng)
        try:
            grammar = Grammar(backend, spec(schema))
        except InvalidRequestError:
            continue
        num_compiled += 1
        validator = validators.Draft202012Validator(schema, validate_formats=True)
        written = [text.decode() for _ in range(4) if (text := grammar.write(rng)) is not None]
        for text in written:
            assert validator.is_valid(value_of(text)), (seed, schema, text)
            assert not too_blank(text), (seed, text)
        for text in [any_text(rng) for _ in range(25)]:
            assert not grammar.accepts(text, rng) or validator.is_valid(value_of(text)), (seed, schema, text)
    assert num_compiled > num_schemas // 10


def test_strings_and_numbers_are_taken_where_the_schema_allows_them(backend, is_long):
    """What is refused of a compiled schema is not allowed by it, but for ways to write a value that no grammar has."""
    plain = [f'"{text}"' for text in ("", "a", "ab", "b", "1", "é", "🙂", 'x\\"', "\\\\", " a", "a-b", "abc1", "A")]
    numbers = [str(n) for n in range(-25, 26)] + ["0.5", "2.25", "-3.75", "7.1"]
    for seed in range(1000 if is_long else 40):
        rng = random.Random(seed)
        schema = {**any_schema(rng, depth=0), "type": rng.choice(["string", "integer", "number"])}
        try:
            grammar = Grammar(backend, spec(schema))
        except InvalidRequestError:
            continue
        validator = validators.Draft202012Validator(schema, validate_formats=True)
        for text in (*plain, *numbers):
            is_valid, accepts = validator.is_valid(json.loads(text)), grammar.accepts(text, rng)
            # xgrammar is given no escapes among characters that are counted.
            is_left_out = "\\" in text and "xgrammar" in type(backend).__module__
            assert accepts == is_valid or (is_left_out and not accepts), (seed, schema, text)


# ---------------------------------------------------------------------------------------------------------------
# Blanks.

BOUNDED = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "maxItems": 3},
        "c": {
            "type": "object",
            "properties": {"d": {"type": "null"}},
            "required": ["d"],
            "additionalProperties": False,
        },
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
VALUE = {"a": 7, "b": ["x", "y", "x"], "c": {"d": None}}


def too_blank(text: str) -> bool:
    """Whether there are more blanks in a row than is documented, outside of strings."""
    outside = re.sub(r'"(?:\\.|[^"\\])*"', '""', text)
    return any(not re.fullmatch(r" |\n(?: {0,32}|\t{0,8})", run) for run in re.findall(r"[ \t\r\n]+", outside))


def test_a_model_that_likes_blanks_best_still_ends(backend):
    grammar = Grammar(backend, spec(BOUNDED))
    for seed in range(20):
        text = grammar.write(random.Random(seed), max_tokens=1200, preferred=BLANK)
        assert text is not None
        assert validators.is_valid(BOUNDED, json.loads(text))
        assert not too_blank(text.decode()), text
        assert b"\n" in text


def test_any_object_has_few_blanks(backend):
    grammar = Grammar(backend, StructuredOutputsParams(json_object=True))
    for seed in range(20):
        text = grammar.write(random.Random(seed), preferred=BLANK if seed % 2 else ())
        assert text is None or not too_blank(text.decode()), text


@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",", ": ")])
def test_json_as_models_write_it(backend, indent, separators):
    rng = random.Random(0)
    assert Grammar(backend, spec(BOUNDED)).accepts(json.dumps(VALUE, indent=indent, separators=separators), rng) == (
        not (indent and separators[0] == ", ")  # a blank at the end of a line
    )
    assert Grammar(backend, StructuredOutputsParams(json_object=True)).accepts(json.dumps(VALUE, indent=indent), rng)


# ---------------------------------------------------------------------------------------------------------------
# What no backend can enforce.

REFUSED = [
    ({"type": "string", "pattern": "(?=a)b"}, "lookahead"),
    ({"type": "string", "pattern": "x(^a)"}, "anchor"),
    ({"type": "string", "pattern": "(?i)a"}, r"\(\?i\)"),
    ({"type": "string", "pattern": "a{,2}"}, "quantifier"),
    ({"type": "object", "patternProperties": {r"\b": {}}}, "word boundary"),
    ({"items": {"anyOf": [{"pattern": r"(a)\1"}]}}, "back-reference"),
    ({"type": "integer", "minimum": 2**53}, "minimum"),
    ({"const": 2**53 + 1}, "const"),
    ({"enum": [{"a": [2**60]}]}, "enum"),
    ({"const": "\x01"}, "control character"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 3}, "minProperties"),
    ({"$ref": "#/x", "x": {"type": "null"}}, r"\$ref '#/x'"),
    ({"$ref": "#/$defs"}, r"\$ref"),
    ({"$ref": "http://example.com/a#/$defs/x", "$id": "http://example.com/a"}, r"\$ref"),
    ({"divisibleBy": 2}, "divisibleBy"),
    ({"anyOf": [3]}, "the schema 3"),
]


@pytest.mark.parametrize(("schema", "named"), REFUSED)
def test_what_no_backend_can_enforce_is_refused_by_name(backend, schema, named):
    with pytest.raises(InvalidRequestError, match=named):
        backend.compile(spec(schema))


def test_names_and_values_are_no_keywords():
    """A property may be called as a keyword is, and a constant may look like a schema."""
    inner = {"pattern": {"type": "string"}, "$ref": {"const": {"pattern": "(?=a)", "$ref": "nowhere"}}}
    assert normalized_schema({"properties": inner}) == {"properties": inner}
    assert normalized_schema({"$ref": "#/$defs/a~1b/items"}) == {"$ref": "#/$defs/a~1b/items"}


def test_what_xgrammar_leaves_out_without_a_type():
    pytest.importorskip("xgrammar")
    backend = make_backend("xgrammar")
    for keywords in ({"pattern": "a"}, {"minLength": 1}, {"minimum": 1}, {"minItems": 1}, {"format": "date"}):
        with pytest.raises(InvalidRequestError, match="without a type"):
            backend.compile(spec(keywords))
    with pytest.raises(InvalidRequestError, match=r"the type \[\]"):
        backend.compile(spec({"type": []}))


def test_what_xgrammar_alone_cannot_enforce_names_the_other_library():
    pytest.importorskip("xgrammar")
    backend = make_backend("xgrammar")
    specs = [
        spec({"type": "string", "pattern": r"\p{L}"}),
        StructuredOutputsParams(grammar='start: "a" %json {"type": "array", "uniqueItems": true}'),
    ]
    for unsupported in specs:
        with pytest.raises(InvalidRequestError, match=r"xgrammar cannot enforce .*'llguidance' may"):
            backend.compile(unsupported)


KEYWORDS = [
    "type",
    "pattern",
    "format",
    "required",
    "properties",
    "items",
    "enum",
    "const",
    "minLength",
    "minProperties",
]
KEYWORDS += [
    "$ref",
    "anyOf",
    "patternProperties",
    "prefixItems",
    "minimum",
    "maxItems",
    "additionalProperties",
    "$defs",
]


def test_junk_in_place_of_keywords_is_refused_as_an_error_of_the_request(backend):
    junk = [
        None,
        True,
        -1,
        1.5,
        "a",
        "(",
        "object",
        [],
        ["a"],
        [{}],
        {},
        {"a": 1},
        {"a": {}},
        [[]],
        "#/$defs/a",
        [None],
    ]
    for seed in range(300):
        rng = random.Random(seed)
        schema = {name: rng.choice(junk) for name in rng.sample(KEYWORDS, rng.randrange(1, 4))}
        try:
            backend.compile(spec(schema))
        except InvalidRequestError:
            continue
