import json

import pytest
from chat_texts import (
    CODER,
    CODER_CALL,
    FORMATS,
    HARMONY,
    HARMONY_CALL,
    HERMES,
    HERMES_CALL,
    LLAMA,
    LLAMA_CALL,
    NEXT,
    QWEN3,
    TOOLS,
    WEATHER,
    cut,
    message_of,
    parsed,
    stream,
    summed,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringcore.chat import (
    ChatParser,
)

WORDS = [
    *(HERMES_CALL, LLAMA_CALL, CODER_CALL, WEATHER, "<tool_call>", "</tool_call>", "<tool", "_call>"),
    *("<think>", "</think>", "</thi", "nk>", "<|python_tag|>", "<|python", "_tag|>", ";"),
    *('{"name": "now", ', '"arguments": {}}', '"parameters": {', '{"name": "nobody", "arguments": {}}'),
    *("<function=now>", "<function=", "write_file>", "<parameter=mode>", "7\n", "<parameter=content>"),
    *("\n</parameter>", "</parameter>", "</function>", "\n", "\n\n", " ", "{", "}", '"', "\\", "<", "</", ">"),
    *("é", "🙂", "text", ",", ":", "\\u12"),
]
HARMONY_WORDS = [
    *(HARMONY_CALL, NEXT, f"<|end|>{NEXT}", "<|start|>", "user", "assistant", " to=functions.now", " to=browser.open"),
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
    *("<|channel|>", "analysis", "commentary", "final", "comment", "<|message|>", "<|constrain|>json", " json"),
    *(
        "<|end|>",
        "<|call|>",
        "<|return|>",
        "<|chan",
        "nel|>",
        "<|",
        "|>",
        '{"a": 1}',
        '{"',
        '"}',
        "text",
        " ",
        "\n",
        "é",
    ),
]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)
PROMPTS = st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"])


def is_within(inner, outer):
    """Whether `inner` is `outer` with something left out."""
    characters = iter(outer)
    return all(character in characters for character in inner)


@pytest.mark.parametrize("chat_format", FORMATS, ids=lambda one: f"{one.tool_calls}-{one.reasoning}")
@settings(max_examples=250, deadline=None)
@given(cut(TEXTS), PROMPTS, st.sampled_from([TOOLS, None, []]))
@example((HERMES_CALL, list(HERMES_CALL)), "", TOOLS)
def test_pieces_add_up_to_the_whole(chat_format, text_and_pieces, prompt_end, tools):
    text, pieces = text_and_pieces
    whole = stream([text], chat_format, tools, prompt_end)
    message = message_of(whole)
    assert summed(stream(pieces, chat_format, tools, prompt_end)) == summed(whole)
    for call in message.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
    assert is_within(message.reasoning + message.content, text)
    if not message.tool_calls and not message.reasoning and "</think>" not in text and "<think>" not in text:
        assert message.content == text


@settings(max_examples=400, deadline=None)
@given(
    cut(st.lists(st.sampled_from(HARMONY_WORDS), max_size=14).map("".join)),
    st.sampled_from(["", NEXT, f"{NEXT}<|channel|>analysis<|message|>", f"{NEXT}<|channel|>final<|message|>"]),
    st.sampled_from([TOOLS, None, []]),
)
@example((HARMONY_CALL, list(HARMONY_CALL)), NEXT, TOOLS)
def test_pieces_of_messages_add_up_to_the_whole(text_and_pieces, prompt_end, tools):
    text, pieces = text_and_pieces
    whole = stream([text], HARMONY, tools, prompt_end)
    message = message_of(whole)
    assert summed(stream(pieces, HARMONY, tools, prompt_end)) == summed(whole)
    for call in message.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
    for said in (message.reasoning, message.content):
        assert is_within(said.replace("\n", ""), text)  # messages are joined by line breaks


@pytest.mark.parametrize(
    "text",
    [
        *(HERMES_CALL, LLAMA_CALL, CODER_CALL, f"<think>\n{WEATHER}\n</think>\n\n{HERMES_CALL}"),
        f"<|channel|>analysis<|message|>hm<|end|>{NEXT}{HARMONY_CALL}",
    ],
)
@pytest.mark.parametrize("chat_format", FORMATS, ids=lambda one: f"{one.tool_calls}-{one.reasoning}")
def test_every_beginning_of_an_output(chat_format, text, is_long):
    for end in range(0, len(text), 1 if is_long else 3):
        message = parsed(text[:end], chat_format)
        for call in message.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(
    ("chat_format", "begin", "unit"),
    [
        (HERMES, "", "<tool_cal"),
        (HERMES, "", "\n"),
        (HERMES, "<tool_call>", " "),
        (HERMES, HERMES_CALL, "\n"),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"x": "', "a\\n"),
        (HERMES, '<tool_call>{"arguments": [', "1, "),
        (LLAMA, "", "\n"),
        (LLAMA, LLAMA_CALL, "\n"),
        (LLAMA, '{"parameters": {"x": ', "1" * 3),
        (CODER, "<tool_call><function=write_file><parameter=content>", "\n</param"),
        (CODER, "<tool_call><function=write_file><parameter=lines>", "[\n"),
        (CODER, "<tool_call><function=", "x"),
        (QWEN3, "", "\n"),
        (QWEN3, "<think>", "\n"),
        (QWEN3, "<think>", "</thin"),
    ],
)
def test_no_text_is_looked_at_twice(chat_format, begin, unit):
    """What waits to be looked at again is never longer than a marker and a few blanks."""
    parser = ChatParser(chat_format, TOOLS)
    for character in begin + unit * 400:
        parser.feed(character)
        assert len(parser._parser._content._pending) <= 16
        assert len(parser._parser._reasoning._pending) <= 24
    parser.finish()


@pytest.mark.parametrize(
    ("begin", "unit", "most"),
    [
        ("", "<|start|>assistan", 20),
        ("<|channel|>final<|message|>", "<|en", 20),
        ("<|channel|>final", " to=", 512),
        ("", "<|channel|>final to=x", 512),
        ("", f"{NEXT} to=", 512),
        (HARMONY_CALL, "\n", 20),
        ('<|channel|>commentary to=functions.now<|message|>{"x": "', "<|call|>", 0),
    ],
)
def test_no_message_is_looked_at_for_longer_than_a_header(begin, unit, most):
    parser = ChatParser(HARMONY, TOOLS)
    for character in begin + unit * 400:
        parser.feed(character)
        assert len(parser._parser._pending) <= max(most, len(begin))
    parser.finish()
