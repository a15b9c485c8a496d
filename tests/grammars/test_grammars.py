"""Grammars: what is written under their masks satisfies them, and what cannot be enforced is refused."""

from __future__ import annotations

import importlib.util
import json
import re
import threading

import numpy as np
import pytest
from random_schemas import SchemaMaker, Walker
from tokenizers import Tokenizer, decoders, models
from tokenizers_made import WORDS, byte_level, sentencepiece

from ringcore.checkpoint.tokenizer_files import TokenizerFiles
from ringcore.errors import InvalidRequestError
from ringcore.grammars import Grammars, grammar_key
from ringcore.grammars.vocabulary import read_vocabulary
from ringcore.grammars.xgrammar_keywords import unsupported_keyword
from ringcore.params.structured_outputs import StructuredOutputsParams

pytest.importorskip("llguidance")

VOCAB_SIZE = 391  # more than either tokenizer has, and no multiple of 32
KINDS = {"byte_level": (byte_level, [0, 2]), "sentencepiece": (sentencepiece, [2, 1])}
BACKENDS = ("llguidance", "xgrammar")


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request) -> str:
    pytest.importorskip(request.param)
    return request.param


@pytest.fixture(scope="module", params=KINDS)
def walker(request, backend) -> Walker:
    return make_walker(request.param, backend)


def make_walker(kind: str, backend: str) -> Walker:
    make, eos = KINDS[kind]
    files = TokenizerFiles(kind, make(), {}, None)
    return Walker(Grammars(files, VOCAB_SIZE, eos, backend), files, VOCAB_SIZE, eos)


def spec(**kind) -> StructuredOutputsParams:
    return StructuredOutputsParams(**kind)


def value_of(text: str):
    """The JSON value; a number beyond a float's range is as large as a float can be."""
    return json.loads(text, parse_float=lambda number: max(-1e308, min(1e308, float(number))))


# ---------------------------------------------------------------------------------------------------------------
# The vocabulary.


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_are_those_of_the_text(kind):
    make, eos = KINDS[kind]
    backend = make()
    vocabulary = read_vocabulary(TokenizerFiles(kind, backend, {}, None), VOCAB_SIZE, [*eos, 10**6])
    assert vocabulary.eos_token_ids == tuple(eos)
    assert len(vocabulary.tokens) == VOCAB_SIZE
    for text in WORDS:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert b"".join(vocabulary.tokens[i] for i in ids).decode().removeprefix(" ") == text
    num_known = backend.get_vocab_size(with_added_tokens=True)
    special = {backend.token_to_id(t) for t in ("<|end|>", "<s>", "<|user|>", "</s>", "<unk>")} - {None}
    assert set(vocabulary.special_ids) == special | set(eos) | set(range(num_known, VOCAB_SIZE))


def test_a_token_that_was_added_as_plain_text_is_text():
    backend = byte_level()
    vocabulary = read_vocabulary(TokenizerFiles("x", backend, {}, None), VOCAB_SIZE, [0])
    token_id = backend.token_to_id("<tool>")
    assert vocabulary.tokens[token_id] == b"<tool>"
    assert token_id not in vocabulary.special_ids


def test_a_vocabulary_smaller_than_the_tokenizers_is_cut():
    vocabulary = read_vocabulary(TokenizerFiles("x", byte_level(), {}, None), 100, [0])
    assert len(vocabulary.tokens) == 100


def test_models_that_no_grammar_can_end_or_read_are_refused():
    with pytest.raises(InvalidRequestError, match="end-of-text"):
        read_vocabulary(TokenizerFiles("x", byte_level(), {}, None), VOCAB_SIZE, [])
    words = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(InvalidRequestError, match="WordPiece"):
        read_vocabulary(TokenizerFiles("x", words, {}, None), VOCAB_SIZE, [0])


# ---------------------------------------------------------------------------------------------------------------
# What is written satisfies the grammar.


@pytest.mark.parametrize(("backend", "num_schemas"), [("llguidance", 200), ("xgrammar", 40)])
def test_random_schemas(backend, num_schemas, is_long):
    pytest.importorskip(backend)
    validators = pytest.importorskip("jsonschema_rs")
    walkers = [make_walker(kind, backend) for kind in KINDS]
    for seed in range(num_schemas if is_long else num_schemas // 2):
        schema = SchemaMaker(seed, for_xgrammar=backend == "xgrammar").make()
        text = walkers[seed % 2].write(spec(json=schema if seed % 3 else json.dumps(schema)), seed)
        validator = validators.Draft202012Validator(schema, validate_formats=True)
        assert [error.message for error in validator.iter_errors(value_of(text))] == [], (seed, text)


REGEXES = [
    "[a-z]{3}-[0-9]{2}",
    r"^\d+(\.\d+)?$",
    "(é|🙂|x)+",
    r"(foo|ba[rz])*!",
    r"\$\d{1,3}$",
    r"[^abc\n]{2,5}",
    "(?i:yes)",
]


@pytest.mark.parametrize("regex", REGEXES)
def test_regular_expressions(walker, regex):
    for seed in range(5):
        text = walker.write(spec(regex=regex), seed)
        assert re.fullmatch(regex, text), text


def test_choices(walker):
    choices = ["yes", "no", "yesterday", 'it\'s "é"\n\t\\ 🙂', " a"]
    found = {walker.write(spec(choice=choices), seed) for seed in range(60)}
    assert found <= set(choices)
    assert len(found) >= 4


def test_any_object(walker):
    matcher = walker.grammars.matcher(spec(json_object=True))
    assert {walker.tokenizer.token_text(int(i))[:1] for i in walker.allowed(matcher)} == {"{"}
    assert isinstance(value_of(walker.write(spec(json_object=True), 6, max_tokens=20_000)), dict)


LARK = 'start: item ("," item)*\nitem: NAME "=" NUMBER\nNAME: /[a-z]+/\nNUMBER: /[0-9]+/'
GBNF = 'root ::= item ("," item)*\nitem ::= name "=" [0-9]+ # a number\nname ::= [a-z]+'


@pytest.mark.parametrize("grammar", [LARK, GBNF])
def test_context_free_grammars(walker, grammar):
    for seed in range(5):
        text = walker.write(spec(grammar=grammar), seed)
        assert re.fullmatch(r"[a-z]+=[0-9]+(,[a-z]+=[0-9]+)*", text), text


def test_a_grammar_that_no_regular_expression_is(walker):
    for seed in range(5):
        text = walker.write(spec(grammar='root ::= "(" root ")" | "x"'), seed)
        depth = text.count("(")
        assert text == "(" * depth + "x" + ")" * depth


def test_white_space_is_bounded(walker):
    """A model that would write nothing but spaces has to go on."""
    matcher = walker.grammars.matcher(spec(json={"type": "object", "properties": {"a": {"type": "null"}}}))
    blank = {i for i in range(VOCAB_SIZE) if walker.tokenizer.token_text(i) in (" ", "\n")}
    assert matcher.accept([int(next(i for i in walker.allowed(matcher) if walker.tokenizer.token_text(int(i)) == "{"))])
    for _ in range(200):
        if not (found := blank & set(walker.allowed(matcher).tolist())):
            return
        assert matcher.accept([found.pop()])
    raise AssertionError("it may write spaces for ever")


# ---------------------------------------------------------------------------------------------------------------
# The end.


def test_each_end_of_text_ends_it(walker):
    first, second = walker._eos
    for token_id in (first, second):
        matcher = walker.grammars.matcher(spec(regex="ab?"))
        assert not matcher.is_over
        assert not {first, second} & set(walker.allowed(matcher).tolist())
        a = next(int(i) for i in walker.allowed(matcher) if walker.tokenizer.token_text(int(i)) == "a")
        assert matcher.accept([a])
        assert not matcher.is_over
        assert {first, second} < set(walker.allowed(matcher).tolist())
        assert matcher.accept([token_id])
        assert matcher.is_over
        assert matcher.accept([first, second])
        assert not matcher.accept([a])


def test_a_whole_sentence_leaves_only_the_ends_of_text(walker):
    matcher = walker.grammars.matcher(spec(choice=["a"]))
    assert matcher.accept([int(i) for i in walker.allowed(matcher)][:1])
    assert matcher.is_over
    assert set(walker.allowed(matcher).tolist()) == set(walker._eos)


def test_what_does_not_fit_is_refused_for_good(walker):
    matcher = walker.grammars.matcher(spec(choice=["a"]))
    others = set(range(VOCAB_SIZE)) - set(walker.allowed(matcher).tolist())
    assert not matcher.accept([max(others)])
    assert matcher.failure is not None
    assert not matcher.is_over
    assert len(walker.allowed(matcher)) == 0
    early = walker.grammars.matcher(spec(choice=["a"]))
    assert not early.accept([walker._eos[0]])


def test_completions_of_one_grammar_are_apart(walker):
    one, other = (walker.grammars.matcher(spec(choice=["ab", "cd"])) for _ in range(2))
    before = walker.allowed(other).tolist()
    assert one.accept(before[:1])
    assert walker.allowed(other).tolist() == before
    assert walker.allowed(one).tolist() != before


def test_masks_of_many_rows_are_those_of_each(walker):
    specs = [spec(regex="[a-z]+"), spec(choice=["yes", "no"]), spec(json_object=True), spec(regex="[0-9]{3}")] * 4
    matchers = [walker.grammars.matcher(one) for one in specs]
    over = walker.grammars.matcher(spec(choice=["a"]))
    assert over.accept([int(walker.allowed(over)[0]), walker._eos[0]])
    failed = walker.grammars.matcher(spec(choice=["a"]))
    assert not failed.accept([walker._eos[0]])
    matchers += [over, failed]
    masks = np.full((len(matchers), -(-VOCAB_SIZE // 32)), -1, np.int32)
    walker.grammars.fill_bitmasks(matchers, masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    for row, matcher in zip(bits, matchers, strict=True):
        assert np.flatnonzero(row).tolist() == walker.allowed(matcher).tolist()
    assert np.flatnonzero(bits[-2]).tolist() == sorted(walker._eos)
    assert not bits[-1].any()
    walker.grammars.fill_bitmasks([], masks[:0])


# ---------------------------------------------------------------------------------------------------------------
# What is refused.

NO_GRAMMARS = [
    spec(regex="(a"),
    spec(regex="(?=a)b"),
    spec(regex=r"\bfoo\b"),
    spec(regex=r"(a)\1"),
    spec(grammar="start: x"),
    spec(grammar="root ::= y"),
    spec(grammar="neither of them"),
    spec(json={"$ref": "#/$defs/nowhere"}),
    spec(json={"$ref": "http://example.com/schema"}),
    spec(json={"type": "strng"}),
    spec(json={"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
    spec(json={"not": {"type": "object"}}),
    spec(json={"if": {"type": "string"}, "then": False}),
    spec(json={"type": "array", "contains": {"type": "string"}}),
    spec(json={"type": "object", "propertyNames": {"pattern": "^a"}}),
    spec(json={"type": "object", "dependentRequired": {"a": ["b"]}}),
    spec(json={"type": "string", "pattern": "(?=a)"}),
    spec(json={"type": "string", "format": "colour"}),
    spec(json={"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}),
]


@pytest.mark.parametrize("number", range(len(NO_GRAMMARS)))
def test_what_cannot_be_kept_is_refused(backend, number):
    grammars, wrong = make_walker("byte_level", backend).grammars, NO_GRAMMARS[number]
    with pytest.raises(InvalidRequestError) as caught:
        grammars.compile(wrong)
    assert caught.value.details["field"] == f"structured_outputs.{wrong.kind}"
    assert "leave structured_outputs out" in caught.value.message
    assert len(caught.value.message) < 2000
    with pytest.raises(InvalidRequestError):
        grammars.matcher(wrong)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "x-guidance": {"lenient": True}, "format": "colour"},
        {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True},
        {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]},
    ],
)
def test_a_schema_cannot_turn_its_constraints_off(schema):
    with pytest.raises(InvalidRequestError):
        make_walker("byte_level", "llguidance").grammars.compile(spec(json=schema))


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"allOf": [{"type": "string"}]}, "allOf"),
        ({"anyOf": [{"type": "string"}], "minLength": 3}, "minLength"),
        ({"enum": ["a", 1], "type": "string"}, "type"),
        ({"type": "string", "pattern": "a", "minLength": 1}, "minLength"),
        ({"pattern": "a"}, "without a type"),
        ({"type": []}, "[]"),
        ({"type": "string", "format": "date", "pattern": "a"}, "beside"),
        ({"required": ["b"]}, "without a type"),
        ({"type": "object", "required": True}, "no list"),
        ({"type": "object", "required": ["b"]}, "'b'"),
        ({"properties": {"a": {}}, "additionalProperties": True}, "additionalProperties"),
        ({"properties": {"a": False}}, "False"),
        ({"properties": []}, "properties"),
        ({"items": {"items": {"$defs": {"x": {"type": "string", "format": "email"}}}}}, "email"),
        ({"maxLength": 1.5}, "maxLength"),
    ],
)
def test_what_xgrammar_would_leave_out_is_found(schema, named):
    assert named in unsupported_keyword(schema)


def test_what_xgrammar_keeps_is_let_through():
    for seed in range(100):
        assert unsupported_keyword(SchemaMaker(seed, for_xgrammar=True).make()) is None
    assert unsupported_keyword({"enum": ["a", "b"], "type": "string", "description": "x", "default": "a"}) is None


HOSTILE = [
    spec(regex="(a{1,1000}){1,1000}"),
    spec(regex="(x+x+)+y"),
    spec(regex="(.*a.{50}){50}"),
    spec(json={"$defs": {"x": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"}),
    spec(json={"type": "array", "minItems": 10**6, "maxItems": 10**7, "items": {"type": "integer"}}),
    spec(json={"type": "string", "maxLength": 10**9}),
    spec(json={"allOf": [{"anyOf": [{"properties": {f"a{i}{k}": {}}} for i in range(8)]} for k in range(8)]}),
    spec(grammar="start: start"),
    spec(regex="(" * 60 + "a" + ")*" * 60),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_grammars_are_refused_or_go_on_in_time(number):
    """llguidance compiles lazily: what is too much for one step is found at that step, and said."""
    walker = make_walker("byte_level", "llguidance")
    try:
        matcher = walker.grammars.matcher(HOSTILE[number])
    except InvalidRequestError:
        return
    for _ in range(20):
        allowed = walker.allowed(matcher)
        if not len(allowed):
            assert matcher.failure is not None
            return
        assert matcher.accept([int(allowed[-1])]) or matcher.failure
        if matcher.is_over:
            return


# ---------------------------------------------------------------------------------------------------------------
# The cache of compiled grammars.


def test_the_least_recently_used_is_forgotten_and_compiled_anew():
    make, eos = KINDS["byte_level"]
    grammars = Grammars(TokenizerFiles("x", make(), {}, None), VOCAB_SIZE, eos, "llguidance", max_cached=2)
    specs = [spec(choice=[letter]) for letter in "abc"]
    for one in specs:
        grammars.compile(one)
    assert list(grammars._cache) == [grammar_key(one) for one in specs[1:]]
    grammars.matcher(specs[1])
    grammars.matcher(specs[0])
    assert list(grammars._cache) == [grammar_key(specs[1]), grammar_key(specs[0])]


def test_keys_tell_grammars_apart():
    specs = [
        spec(regex="a"),
        spec(grammar="a"),
        spec(choice=["a"]),
        spec(choice=["a", "b"]),
        spec(json={"properties": {"a": {}, "b": {}}}),
        spec(json={"properties": {"b": {}, "a": {}}}),  # written in this order
        spec(json_object=True),
    ]
    assert len({grammar_key(one) for one in specs}) == len(specs)
    assert grammar_key(spec(json={"type": "null"})) == grammar_key(spec(json='{"type": "null"}'))


def test_compiled_by_one_thread_while_another_one_fills_masks():
    walker = make_walker("byte_level", "llguidance")
    errors: list[BaseException] = []

    def compile_many() -> None:
        try:
            for seed in range(40):
                walker.grammars.compile(spec(json=SchemaMaker(seed).make()))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=compile_many) for _ in range(2)]
    for thread in threads:
        thread.start()
    for seed in range(40):
        walker.write(spec(json=SchemaMaker(seed).make()), seed)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []


@pytest.mark.parametrize("name", ["auto", *BACKENDS])
def test_a_library_that_is_missing_is_named_with_the_remedy(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    grammars = Grammars(TokenizerFiles("x", byte_level(), {}, None), VOCAB_SIZE, [0], name)
    with pytest.raises(InvalidRequestError, match=r"pip install 'ringcore\["):
        grammars.compile(spec(regex="a"))


def test_auto_is_what_is_installed(monkeypatch):
    pytest.importorskip("xgrammar")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llguidance" else found(name))
    grammars = Grammars(TokenizerFiles("x", byte_level(), {}, None), VOCAB_SIZE, [0])
    with pytest.raises(InvalidRequestError, match="xgrammar cannot enforce"):
        grammars.compile(spec(json={"not": {}}))
