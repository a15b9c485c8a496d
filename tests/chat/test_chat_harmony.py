"""gpt-oss's messages: reasoning, content and calls by their headers, and text that is none of them."""

import pytest
from chat_texts import HARMONY, HARMONY_CALL, NEXT, TOOLS, WEATHER, calls_of, parsed, stream

from ringcore.chat import (
    ChatFormat,
    ChatMessage,
    ChatParser,
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

ANALYSIS = "<|channel|>analysis<|message|>"
COMMENTARY = "<|channel|>commentary<|message|>"
FINAL = "<|channel|>final<|message|>"
CALLED = ChatMessage("", "", (ToolCall("call_0", "get_weather", WEATHER),))


def test_reasoning_and_answer():
    text = f"{ANALYSIS}\nIs 3 < 4?\n<|end|>{NEXT}{FINAL}  It is.\n"
    assert parsed(text, HARMONY) == parsed(f"{text}<|return|>", HARMONY) == ChatMessage("  It is.\n", "\nIs 3 < 4?\n")
    assert parsed(f"{FINAL}Yes.", HARMONY) == ChatMessage("Yes.")


def test_messages_of_one_kind_are_joined():
    text = NEXT.join(
        [f"{ANALYSIS}a<|end|>", f"{ANALYSIS}b<|end|>", f"{COMMENTARY}Plan<|end|>", f"{FINAL}<|end|>", f"{FINAL}Done"]
    )
    assert parsed(text, HARMONY) == ChatMessage("Plan\nDone", "a\nb")
    assert parsed(text.replace(NEXT, f"\n{NEXT}"), HARMONY) == ChatMessage("Plan\nDone", "a\nb")


def test_a_preamble_and_a_call():
    text = f"{ANALYSIS}hm<|end|>{NEXT}{COMMENTARY}I look it up.<|end|>{NEXT}{HARMONY_CALL}"
    expected = ChatMessage("I look it up.", "hm", CALLED.tool_calls)
    assert parsed(text, HARMONY) == parsed(text.removesuffix("<|call|>"), HARMONY) == expected


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json",
        "<|channel|>commentary to=functions.get_weather<|constrain|>json",
        "<|channel|>commentary to=functions.get_weather json",
        "<|channel|>commentary to=get_weather",
        "<|channel|>analysis to=functions.get_weather code",
        " to=functions.get_weather<|channel|>commentary json",
        " to=functions.get_weather<|channel|>commentary <|constrain|>json",
        " to=functions.get_weather",
        f"{NEXT} to=functions.get_weather<|channel|>commentary json",
    ],
)
def test_headers_of_a_call(header):
    assert parsed(f"{header}<|message|>{WEATHER}<|call|>", HARMONY) == CALLED
    assert parsed(f"{header}<|message|> {WEATHER}\n<|end|>", HARMONY) == CALLED
    after = parsed(f"{ANALYSIS}hm<|end|>{NEXT}{header.removeprefix(NEXT)}<|message|>{WEATHER}", HARMONY)
    assert after == ChatMessage("", "hm", CALLED.tool_calls)


def test_several_calls():
    now = "<|channel|>commentary to=functions.now<|message|>{}<|call|>"
    message = parsed(f"{HARMONY_CALL}{NEXT}{now}{NEXT}{FINAL}Wait.", HARMONY)
    assert (message.content, calls_of(message)) == ("Wait.", [("get_weather", WEATHER), ("now", "{}")])


def test_all_is_given_out_as_it_comes():
    parser = ChatParser(HARMONY, TOOLS, NEXT, new_id=lambda: "call_x")
    assert parser.feed("<|channel|>analysis") == []
    assert parser.feed("<|message|>Hm") == [ReasoningDelta("Hm")]
    assert parser.feed(". <|en") == [ReasoningDelta(". ")]
    assert parser.feed(f"d|>{NEXT}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>") == []
    assert parser.feed('{"ci') == [ToolCallStart(0, "call_x", "get_weather"), ToolCallArguments(0, '{"ci')]
    assert parser.feed('ty": "a"}') == [ToolCallArguments(0, 'ty": "a"}'), ToolCallEnd(0, is_complete=True)]
    assert parser.feed(f"<|call|>{NEXT}{FINAL}a") == [ContentDelta("a")]
    assert parser.finish() == []


def test_the_message_that_the_prompt_has_opened():
    text = f"Hm<|end|>{NEXT}{FINAL}No"
    assert parsed(text, HARMONY, prompt_end=NEXT + ANALYSIS) == ChatMessage("No", "Hm")
    assert parsed(text, HARMONY, prompt_end=f"{NEXT}{FINAL}\n") == ChatMessage("Hm\nNo")
    assert parsed(f"Hm<|end|>{NEXT}{HARMONY_CALL}", HARMONY, prompt_end=COMMENTARY).content == "Hm"


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        "\n\nHello\n",
        " to be",
        " to=be or not\nto be",
        "<|channel|>",
        "<|channel|>comments<|message|>text",
        "<|message",
        "<|channel|>final <|start|>user",
        "<|channel|>commentary to=functions.launch <|constrain|>json<|message|>{}",
        "<|channel|>commentary to=functions.get_weather<|message|>city",
        "<|channel|>commentary to=functions.get_weather<|message|>",
        f"{NEXT} said\nso",
        "<|start|>user<|message|>Hi",
        " to=functions." + "x" * 600 + "<|message|>{}",
    ],
)
def test_what_is_no_message_stays_as_it_was_written(text):
    expected = ChatMessage() if text == "<|channel|>" else ChatMessage(text)
    assert parsed(text, HARMONY) == expected
    after = parsed(f"{ANALYSIS}hm<|end|>{NEXT}{FINAL}a<|end|>b{text}", HARMONY)
    assert (after.reasoning, after.content) == ("hm", "ab" + expected.content)


def test_a_header_that_the_end_cuts_off_is_no_text():
    text = f"{ANALYSIS}hm<|end|>{NEXT}{HARMONY_CALL}"
    header = len(text) - len(f"{WEATHER}<|call|>")
    for end in range(text.index(NEXT) + len(NEXT), header):
        assert parsed(text[:end], HARMONY) == ChatMessage("", "hm")
    assert parsed(text[:header], HARMONY).content.endswith("json<|message|>"), "a call without arguments"


def test_a_call_that_breaks_off():
    raw = "<|channel|>commentary to=functions.get_weather<|message|>" + '{"city": "Bern", '
    assert parsed(raw, HARMONY) == ChatMessage(raw)
    text = f"{raw}days: 3}}<|call|>{NEXT}{FINAL}a"
    assert parsed(text, HARMONY) == ChatMessage(f"{raw}days: 3}}\na")
    (end,) = [event for event in stream([text], HARMONY) if isinstance(event, ToolCallEnd)]
    assert end == ToolCallEnd(0, is_complete=False, text=raw)


def test_a_message_without_an_end():
    assert parsed(f"{ANALYSIS}hm{NEXT}{FINAL}a", HARMONY) == ChatMessage("a", "hm")
    assert parsed(f"{ANALYSIS}hm<|end|>{FINAL}a", HARMONY) == ChatMessage("a", "hm"), "and one without its start"
    assert parsed(f"{ANALYSIS}{NEXT} and <|channel|>", HARMONY) == ChatMessage("", f"{NEXT} and <|channel|>")


def test_which_calls_are_calls():
    tool = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    assert parsed(tool, HARMONY) == ChatMessage("", "print(1)"), "a tool of the model's own reasoning"
    call = HARMONY_CALL.removesuffix("<|call|>")
    for chat_format, tools in (
        (HARMONY, []),
        (ChatFormat(None, "harmony"), None),
        (ChatFormat(None, "harmony"), TOOLS),
    ):
        assert parsed(call, chat_format, tools=tools) == ChatMessage(call)
    assert calls_of(parsed(call.replace("get_weather", "any.thing"), HARMONY, tools=None)) == [("any.thing", WEATHER)]
