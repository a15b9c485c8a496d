"""Grammars of harmony's messages: forced calls, and texts of a form in the final channel, after any reasoning."""

from __future__ import annotations

import pytest
from byte_grammars import IDS, TOKENIZERS, each_tokenizer, takes
from chat_texts import HARMONY, NEXT, TOOLS, WEATHER

from ringcore.chat import ChatFormat, answer_grammar, parse_message
from ringcore.errors import InvalidRequestError
from ringcore.params.structured_outputs import StructuredOutputsParams

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
REASONINGS = ["", f"{ANALYSIS}hm\n <|<|end|>{NEXT}", f"{ANALYSIS}a<|end|>{NEXT}{ANALYSIS}b<|end|>{NEXT}"]
HEADERS = [
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.get_weather<|message|>",
    " to=functions.get_weather<|channel|>commentary json<|message|>",
]


def called(tools=TOOLS, **options):
    return answer_grammar(HARMONY, tools=tools, must_call=True, marker_ids=IDS, prompt_end=NEXT, **options)


@each_tokenizer
@pytest.mark.parametrize("markers", [IDS, {}], ids=["tokens", "letters"])
def test_calls_that_a_grammar_takes_are_read(tokenizer, markers):
    grammar = called()
    for reasoning in REASONINGS:
        for header in HEADERS:
            for arguments in (WEATHER, '{"city":"a"}'):
                assert takes(tokenizer, grammar, f"{reasoning}{header}{arguments}", markers)
                message = parse_message(f"{reasoning}{header}{arguments}", HARMONY, TOOLS)
                ((name, given),) = [(call.name, call.arguments) for call in message.tool_calls]
                assert (name, given, message.content) == ("get_weather", arguments, "")
    for wrong in (
        *("no call", f"{FINAL}a", f"{HEADERS[0]}1", f'{HEADERS[0]}{{"days": "x"}}', f"{ANALYSIS}hm"),
        HEADERS[0].replace("get_weather", "launch") + "{}",
        HEADERS[0] + WEATHER + NEXT + HEADERS[0] + WEATHER,  # a model stops after one
    ):
        assert not takes(tokenizer, grammar, wrong, markers), wrong


def test_a_named_call_is_of_this_tool():
    (now,) = [tool for tool in TOOLS if tool["function"]["name"] == "now"]
    grammar = called([now])
    assert takes(TOKENIZERS[1], grammar, "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}")
    assert not takes(TOKENIZERS[1], grammar, HEADERS[0] + WEATHER)


FORMS = [
    ({"json": {"type": "integer"}}, "12", "a"),
    ({"json_object": True}, '{"a": 1}', "[1]"),
    ({"regex": "a|b/"}, "b/", "ab"),
    ({"choice": ["a", "b|"]}, "b|", "ab"),
]


@each_tokenizer
@pytest.mark.parametrize(("spec", "good", "bad"), FORMS)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["alone", "or calls"])
def test_a_text_of_a_given_form_is_in_the_final_channel(tokenizer, spec, good, bad, tools):
    chat_format = HARMONY if tools else ChatFormat(None, "harmony")
    grammar = answer_grammar(chat_format, text=StructuredOutputsParams(**spec), tools=tools, marker_ids=IDS)
    for reasoning in REASONINGS:
        text = f"{reasoning}{FINAL}{good}"
        assert takes(tokenizer, grammar, text)
        assert parse_message(text, chat_format, tools).content == good
        assert takes(tokenizer, grammar, f"{reasoning}{HEADERS[0]}{WEATHER}") == bool(tools)
    typed = f"<|channel|>final <|constrain|>json<|message|>{good}"
    assert takes(tokenizer, grammar, typed) == ("json" in next(iter(spec)))
    for wrong in (bad, good, f"{FINAL}{bad}", FINAL, f"<|channel|>commentary<|message|>{good}"):
        assert not takes(tokenizer, grammar, wrong), wrong


@each_tokenizer
def test_the_message_that_the_prompt_has_opened(tokenizer):
    text = StructuredOutputsParams(regex="a+")
    for channel, first in (("analysis", f"hm<|end|>{NEXT}{FINAL}"), ("final", ""), ("final", f"<|end|>{NEXT}{FINAL}")):
        prompt_end = f"{NEXT}<|channel|>{channel}<|message|>"
        grammar = answer_grammar(HARMONY, text=text, prompt_end=prompt_end, marker_ids=IDS)
        assert takes(tokenizer, grammar, f"{first}aa")
        assert not takes(tokenizer, grammar, f"{first}b")
        assert parse_message(f"{first}aa", HARMONY, prompt_end=prompt_end).content == "aa"


def test_what_is_no_grammar_of_ours():
    own = StructuredOutputsParams(grammar='start: "a"')
    assert answer_grammar(HARMONY, text=own, tools=TOOLS) is own
    assert answer_grammar(HARMONY, tools=TOOLS) is None
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "(?=a)b"}}}}}
    with pytest.raises(InvalidRequestError, match="tools: the parameters of 'f': lookahead"):
        called([tool])


def test_a_form_is_enforced_whole():
    """The JSON of a schema, with the blanks that models of this format write."""
    parameters = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
    grammar = called([{"function": {"name": "get_weather", "parameters": parameters}}])
    written = ['{"a":"x"}', '{"a": "x"}', '{\n  "a": "x"\n}', '{"a": "y"}', "{}"]
    assert [one for one in written if takes(TOKENIZERS[1], grammar, HEADERS[0] + one)] == written[:3]
