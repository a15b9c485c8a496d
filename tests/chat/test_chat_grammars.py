"""Grammars of forced calls and bounded texts: what they take, the parsers read; what is no such answer, they refuse."""

from __future__ import annotations

import json

import pytest
from byte_grammars import IDS, TOKENIZERS, each_tokenizer, takes

from ringcore.chat import ChatFormat, answer_grammar, parse_message
from ringcore.errors import InvalidRequestError
from ringcore.params.structured_outputs import StructuredOutputsParams

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "where": {"type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}, "required": ["at"]},
            },
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"Place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
ANY = {"type": "function", "function": {"name": "anything", "parameters": {}}}
TOOLS = [WEATHER, TIME, ANY]
ARGUMENTS = {"city": 'Zürich\n<param> "1"', "days": 3, "unit": "F", "where": {"at": {"lat": 1.5}}}


def tagged(name: str, arguments: dict) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def bare(name: str, arguments: dict) -> str:
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


def xml(name: str, arguments: dict) -> str:
    values = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


FORMS = {"hermes": (tagged, "\n"), "llama3_json": (bare, ";\n"), "qwen3_coder": (xml, "\n")}
each_form = pytest.mark.parametrize("form", FORMS)


@each_tokenizer
@each_form
@pytest.mark.parametrize("markers", [IDS, {}], ids=["tokens", "letters"])
def test_calls_that_a_grammar_takes_are_read(tokenizer, form, markers):
    write, separator = FORMS[form]
    grammar = answer_grammar(ChatFormat(form), tools=TOOLS, must_call=True, marker_ids=IDS)
    text = write("get_weather", ARGUMENTS) + separator + write("get_time", {})
    assert takes(tokenizer, grammar, text, markers)
    message = parse_message(text, ChatFormat(form), TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [
        ("get_weather", ARGUMENTS),
        ("get_time", {}),
    ]
    assert not message.content
    for text in ("no call", write("unknown", {}), write("get_time", {"a": 1}), write("get_weather", {"days": 1})):
        assert not takes(tokenizer, grammar, text, markers), text
    for wrong in ({"days": "x"}, {"unit": "K"}, {"where": {}}, {"where": {"at": {"lat": "x"}}}):
        assert not takes(tokenizer, grammar, write("get_weather", {"city": "a"} | wrong), markers), wrong


@each_form
def test_one_call_where_they_are_not_parallel(form):
    write, separator = FORMS[form]
    grammar = answer_grammar(ChatFormat(form), tools=[TIME], must_call=True, is_parallel=False, marker_ids=IDS)
    assert takes(TOKENIZERS[0], grammar, write("get_time", {}))
    assert not takes(TOKENIZERS[0], grammar, write("get_time", {}) + separator + write("get_time", {}))


def test_any_object_where_the_schema_says_nothing():
    grammar = answer_grammar(ChatFormat("hermes"), tools=[ANY], must_call=True, marker_ids=IDS)
    assert takes(TOKENIZERS[0], grammar, tagged("anything", {"a": [1, {"b": None}]}))
    assert not takes(TOKENIZERS[0], grammar, tagged("anything", {}).replace("{}", "[]"))


REASONINGS = [
    # the format, the end of the prompt, what may stand first, what may not
    ("qwen3", "assistant\n", ["", "<think>\nhm\n</think>\n\n"], ["hm</think>", "<think>hm"]),
    ("qwen3", "<think>\n", ["hm</think>\n\n"], ["", "hm"]),
    ("qwen3", "</think>\n\n", [""], ["<think>hm</think>", "hm</think>"]),
    ("deepseek_r1", "assistant", ["hm</think>\n", "<think>hm</think>"], ["", "hm"]),
    (None, "", [""], ["<think>hm</think>"]),
]


@each_tokenizer
@pytest.mark.parametrize(("reasoning", "prompt_end", "firsts", "wrong"), REASONINGS)
@pytest.mark.parametrize("must_call", [True, False])
def test_reasoning_stands_before_the_answer(tokenizer, reasoning, prompt_end, firsts, wrong, must_call):
    answer = tagged("get_time", {})
    options = {"tools": [TIME], "must_call": True}
    if not must_call:
        answer, options = '{"a": 1}', {"tools": [TIME], "text": StructuredOutputsParams(json_object=True)}
    grammar = answer_grammar(ChatFormat("hermes", reasoning), prompt_end=prompt_end, marker_ids=IDS, **options)
    for first in firsts:
        assert takes(tokenizer, grammar, first + answer), first
    for first in wrong:
        assert not takes(tokenizer, grammar, first + answer), first


TEXTS = [
    ({"json": {"type": "integer"}}, "12", "a"),
    ({"json": '{"type": "integer"}'}, "12", "a"),
    ({"json_object": True}, '{"a": 1}', "[1]"),
    ({"regex": r"[a/]\/\\+\n"}, "//\\\n", "a"),
    ({"regex": "a\nb|x/"}, "a\nb", "ab"),
    ({"regex": r"^\d[\d-]\w\$$"}, "1-a$", "1-é$"),
    ({"regex": r"a|b\]\D"}, "b]x", "b]1"),
    ({"choice": ["a", 'b"\n']}, 'b"\n', "ab"),
]


@each_tokenizer
@pytest.mark.parametrize(("spec", "good", "bad"), TEXTS)
def test_a_text_of_a_given_form_or_calls(tokenizer, spec, good, bad):
    text = StructuredOutputsParams(**spec)
    grammar = answer_grammar(ChatFormat("hermes", "qwen3"), text=text, tools=TOOLS, marker_ids=IDS)
    for answer in (good, "<think>hm</think>\n\n" + good, tagged("get_time", {})):
        assert takes(tokenizer, grammar, answer), answer
    for answer in (bad, "", good + tagged("get_time", {})):
        assert not takes(tokenizer, grammar, answer), answer


def test_what_needs_no_grammar_of_ours():
    text = StructuredOutputsParams(regex="a+")
    assert answer_grammar(ChatFormat(), text=text) is text
    assert answer_grammar(ChatFormat("hermes", "qwen3"), text=text, prompt_end="</think>") is text
    assert answer_grammar(ChatFormat("hermes", "qwen3"), tools=TOOLS) is None
    own = StructuredOutputsParams(grammar='start: "a"')
    assert answer_grammar(ChatFormat("hermes", "qwen3"), text=own, tools=TOOLS) is own


@pytest.mark.parametrize("key", ["a>b", "a\nb", " a", ""])
def test_a_key_that_has_no_form_is_refused(key):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {key: {}}}}}
    with pytest.raises(InvalidRequestError) as caught:
        answer_grammar(ChatFormat("qwen3_coder"), tools=[tool], must_call=True)
    assert caught.value.details["field"] == "tools"
    assert repr(key) in caught.value.message


def tool(**schema) -> dict:
    properties = {"a": schema}
    parameters = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_arguments_are_held_to_patterns_and_formats(form):
    write, _ = FORMS[form]
    for schema, right, wrong in (
        ({"type": "string", "pattern": r"^\s.$"}, "\u00a0b", " \u2028"),
        ({"type": "string", "format": "date"}, "2024-02-29", "2023-02-29"),
        ({"type": "string", "pattern": "b"}, "abc", "ac"),
    ):
        grammar = answer_grammar(ChatFormat(form), tools=[tool(**schema)], must_call=True, marker_ids=IDS)
        assert takes(TOKENIZERS[0], grammar, write("f", {"a": right}))
        assert not takes(TOKENIZERS[0], grammar, write("f", {"a": wrong}))
        assert not takes(TOKENIZERS[0], grammar, write("f", {"a": right}).replace('{"a"', '{ "a"')), (
            "laid out in one way"
        )


def test_parameters_that_cannot_be_enforced_are_refused():
    with pytest.raises(InvalidRequestError, match="tools: the parameters of 'f': lookahead") as caught:
        answer_grammar(ChatFormat("hermes"), tools=[tool(type="string", pattern="(?=a)b")], must_call=True)
    assert caught.value.details["field"] == "tools"
    for text in (StructuredOutputsParams(regex=r"a\b"), StructuredOutputsParams(json={"pattern": r"a\b"})):
        with pytest.raises(InvalidRequestError, match="word boundary") as caught:
            answer_grammar(ChatFormat("hermes", "qwen3"), text=text)
        assert caught.value.details["field"] == f"structured_outputs.{text.kind}"


def test_a_text_behind_reasoning_is_what_it_is_without():
    tokenizer = TOKENIZERS[0]
    regex = answer_grammar(ChatFormat("hermes", "qwen3"), text=StructuredOutputsParams(regex=r"^(?i:k)\s.$|/"))
    assert [text for text in ("k\tb", "K a", "/", "k\u00a0b", "k \n", "\u212a a") if takes(tokenizer, regex, text)] == [
        "k\tb",
        "K a",
        "/",
    ]
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}
    grammar = answer_grammar(ChatFormat("hermes", "qwen3"), text=StructuredOutputsParams(json=schema))
    written = [
        '{"a":null}',
        '{ "a": null }',
        '{\n  "a": null\n}',
        '{  "a":null}',
        '{\n\n"a":null}',
        '{\n "a":\n\n null}',
    ]
    assert [text for text in written if takes(tokenizer, grammar, text)] == written[:3]
