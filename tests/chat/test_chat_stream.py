import json

import pytest
from chat_texts import (
    HERMES,
    HERMES_CALL,
    LLAMA,
    LLAMA_CALL,
    QWEN3,
    R1,
    TOOLS,
    WEATHER,
    calls_of,
    parsed,
    stream,
)

from ringcore.chat import (
    ChatFormat,
    ChatMessage,
    ChatParser,
    ContentDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    parse_message,
    random_call_id,
)

# --- Hermes and Qwen


def test_text_then_calls():
    nested = '{"path": "a.html", "options": {"a": [{"b": {}}], "</tool_call>": "}{"}, "content": "<tool_call>{\\"x\\n"}'
    text = f"I look it up.\n{HERMES_CALL}\n<tool_call>\n" + '{"name": "write_file", "arguments": ' + nested
    message = parsed(text + "}\n</tool_call>\n", HERMES)
    assert message.content == "I look it up."
    assert calls_of(message) == [("get_weather", WEATHER), ("write_file", nested)]
    assert json.loads(message.tool_calls[1].arguments)["content"] == '<tool_call>{"x\n'
    assert [call.id for call in message.tool_calls] == ["call_0", "call_1"]


def test_a_call_is_given_out_as_it_comes():
    parser = ChatParser(HERMES, TOOLS, new_id=lambda: "call_x")
    assert parser.feed("So:\n\n<tool") == [ContentDelta("So:")]
    assert parser.feed('_call>\n{"name": "get_weather", "arguments": ') == []
    assert parser.feed('{"ci') == [ToolCallStart(0, "call_x", "get_weather"), ToolCallArguments(0, '{"ci')]
    assert parser.feed('ty": "\\ud83d') == [ToolCallArguments(0, 'ty": "\\ud83d')]
    assert parser.feed('\\ude42 🙂"}') == [ToolCallArguments(0, '\\ude42 🙂"}')]
    assert parser.feed("}") == [ToolCallEnd(0, is_complete=True)]
    assert parser.feed("\n</tool_call>\n\nDone") == [ContentDelta("Done")]
    assert parser.finish() == []


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>{"arguments": {"city": "}"}, "name": "get_weather"}</tool_call>',
        '<tool_call>{"name":"get_weather","arguments":{"city": "}"}}',  # without its closing tag
        '<tool_call>\n\n {"id": "1", "type": "function", "name": "get_weather", "arguments": {"city": "}"} }\n</tool',
        '<tool_call>{"n\\u0061me": "get_weather", "parameters": {"city": "}"}}</tool_call>\n',
    ],
)
def test_ways_to_write_a_call(call):
    assert parsed(call, HERMES) == ChatMessage("", "", (ToolCall("call_0", "get_weather", '{"city": "}"}'),))


@pytest.mark.parametrize(
    "text",
    [
        "Write <tool_call> around it, then </tool_call>.",
        "<tool_call>\nfirst I need the weather\n</tool_call>",
        '<tool_call>{"name": "launch_rockets", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": "Bern"}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": null}</tool_call>',
        '<tool_call>{"name": "get_weather"}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_weather", "city": "Bern"}</tool_call>',
        '<tool_call>{"name": "get_weather", "name": "now", "arguments": {}}</tool_call>',
        "<tool_call>{'name': 'get_weather', 'arguments': {}}</tool_call>",
        '<tool_call>[{"name": "get_weather", "arguments": {}}]</tool_call>',
        '<tool_call>{"arguments": {}, "name": "nobody"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_weather"',
        "<tool_call>",
        "a <tool_cal",
        "\n\n",
        "a < b && b <tool_ > <<tool_call <",
        LLAMA_CALL,
    ],
)
def test_what_is_no_call_stays_as_it_was_written(text):
    assert parsed(text, HERMES) == ChatMessage(text)


@pytest.mark.parametrize(
    "rest",
    [
        '{"city": "Bern", "days": 3',  # cut off
        '{"city": "Bern", days: 3}}\n</tool_call>\n',
        '{"city": "Be\nrn"}}\n</tool_call> and\n',
        '{"city": "Bern"}, "arguments": {}}\n</tool_call>',
        '{"city": "Bern"}]\n</tool_call>',
    ],
)
def test_a_call_that_breaks_off_says_so_and_the_message_has_its_text(rest):
    text = 'Now:\n<tool_call>\n{"name": "get_weather", "arguments": ' + rest
    assert parsed(text, HERMES) == ChatMessage(text)
    events = stream([text], HERMES)
    assert ToolCallStart(0, "call_0", "get_weather") in events
    (end,) = [event for event in events if isinstance(event, ToolCallEnd)]
    assert not end.is_complete
    given = "".join(event.text for event in events if isinstance(event, ToolCallArguments))
    assert given
    assert given in end.text
    assert text.startswith("Now:" + end.text)


def test_a_call_after_what_is_none():
    text = f"<tool_call>none</tool_call>\n{HERMES_CALL}"
    assert parsed(text, HERMES) == ChatMessage(
        "<tool_call>none</tool_call>", "", (ToolCall("call_0", "get_weather", WEATHER),)
    )
    (call,) = parsed('<tool_call> <tool_call>{"name": "now", "arguments": {}}</tool_call>', HERMES).tool_calls
    assert (call.name, call.arguments) == ("now", "{}")
    broken = '<tool_call>{"name": "now", "arguments": {,}}</tool_call>'
    message = parsed(f"{broken}\n{HERMES_CALL}", HERMES)
    assert (message.content, calls_of(message)) == (broken, [("get_weather", WEATHER)])
    broken = '<tool_call>{"name": "now", "arguments": {"a'
    message = parsed(f'{HERMES_CALL}\n{broken}\n"', HERMES)
    assert (message.content, calls_of(message)) == (broken + '\n"', [("get_weather", WEATHER)])


def test_which_names_are_calls():
    text = '<tool_call>{"name": "anything", "arguments": {}}</tool_call>'
    assert calls_of(parsed(text, HERMES, tools=None)) == [("anything", "{}")]
    assert parsed(text, HERMES, tools=[]) == parsed(text, ChatFormat()) == ChatMessage(text)
    for name in ("", "\\ud83d", "a\\nb"):
        unnamed = text.replace("anything", name)
        assert parsed(unnamed, HERMES, tools=None) == ChatMessage(unnamed)


# --- reasoning


@pytest.mark.parametrize("chat_format", [QWEN3, R1])
def test_reasoning_and_answer(chat_format):
    text = "<think>\nIs 3 < 4? </thin> \n\nYes.\n</think>\n\n    It is.\n"
    assert parsed(text, chat_format) == ChatMessage("    It is.\n", "Is 3 < 4? </thin> \n\nYes.")
    assert parsed("\n" + text, chat_format) == parsed(text, chat_format)


def test_reasoning_that_the_template_has_opened():
    text = "Hm.\n</think>\n\nNo."
    expected = ChatMessage("No.", "Hm.")
    assert parsed(text, QWEN3, prompt_end="<|im_start|>assistant\n<think>\n") == expected
    assert parsed(text, R1) == parsed(text, R1, prompt_end="<think>\n") == expected
    assert parsed("<think>\n" + text, QWEN3, prompt_end="<think>\n") == expected
    assert parsed(text, QWEN3) == ChatMessage(text)


@pytest.mark.parametrize("chat_format", [QWEN3, R1])
def test_reasoning_that_the_template_has_closed(chat_format):
    prompt = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert parsed("Answer </think>", chat_format, prompt_end=prompt) == ChatMessage("Answer </think>")


def test_reasoning_that_never_ends():
    assert parsed("<think>\nWell\n\n</thi", QWEN3) == ChatMessage("", "Well\n\n</thi")
    assert parsed("Well\n", R1) == ChatMessage("", "Well\n")
    assert parsed("<thi", R1) == ChatMessage("", "<thi")
    assert parsed("<thi", QWEN3) == ChatMessage("<thi")
    assert parsed("<think>", QWEN3) == ChatMessage()


def test_tags_that_begin_no_reasoning():
    for text in ("The tag <think> opens it.", "\n" * 40 + "<think>x</think>", "think</think>"):
        assert parsed(text, QWEN3) == ChatMessage(text)
    assert parsed("<think>x</think>", HERMES) == ChatMessage("<think>x</think>")


def test_reasoning_then_a_call():
    text = f"<think>\nI could write {HERMES_CALL}.\n</think>\n\n{HERMES_CALL}"
    message = parsed(text, QWEN3)
    assert message.reasoning == f"I could write {HERMES_CALL}."
    assert message.content == ""
    assert calls_of(message) == [("get_weather", WEATHER)]
    bare = parsed(f"Hm</think>\n\n{LLAMA_CALL}", ChatFormat("llama3_json", "deepseek_r1"))
    assert (bare.reasoning, bare.content, calls_of(bare)) == ("Hm", "", [("get_weather", WEATHER)])


# --- Llama 3


@pytest.mark.parametrize(
    "text",
    [
        LLAMA_CALL,
        "\n\n" + LLAMA_CALL + "\n",
        f"<|python_tag|>{LLAMA_CALL}",
        f"<|python_tag|>\n{LLAMA_CALL} ; ",
        '{"type": "function", "name": "get_weather", "parameters": ' + WEATHER + "}",
        '{"parameters": ' + WEATHER + ', "name": "get_weather"}',
    ],
)
def test_llama_writes_a_call(text):
    assert parsed(text, LLAMA) == ChatMessage("", "", (ToolCall("call_0", "get_weather", WEATHER),))


def test_llama_writes_several():
    now = '{"name": "now", "parameters": {}}'
    for text in (f"{LLAMA_CALL}; {now}", f"<|python_tag|>{LLAMA_CALL};<|python_tag|>{now}", f"{LLAMA_CALL}\n{now}"):
        message = parsed(text, LLAMA)
        assert (message.content, calls_of(message)) == ("", [("get_weather", WEATHER), ("now", "{}")])


def test_llama_answers_around_a_call():
    message = parsed(f"Wait.\n<|python_tag|>{LLAMA_CALL}\nDone; really", LLAMA)
    assert (message.content, calls_of(message)) == ("Wait.Done; really", [("get_weather", WEATHER)])
    message = parsed(f"{LLAMA_CALL};; {LLAMA_CALL}", LLAMA)
    assert (message.content, calls_of(message)) == (f";; {LLAMA_CALL}", [("get_weather", WEATHER)])
    message = parsed(LLAMA_CALL + '; {"city": 1}', LLAMA)
    assert (message.content, calls_of(message)) == ('; {"city": 1}', [("get_weather", WEATHER)])


@pytest.mark.parametrize(
    "text",
    [
        '{"city": "Bern", "weather": "fine"}',
        '{"name": "Bern", "parameters": {"inhabitants": 130000}}',
        f"A call is {LLAMA_CALL}",
        '<|python_tag|>print("{}")',
        'brave_search.call(query="x")',
        "{",
        "<|python_t",
        ' \n {"name"',
        HERMES_CALL,
        "; ; {}",
    ],
)
def test_llama_answers(text):
    assert parsed(text, LLAMA) == ChatMessage(text)


def test_an_answer_in_json_is_not_held_back():
    parser = ChatParser(LLAMA, TOOLS)
    assert parser.feed('{"city":') == [ContentDelta('{"city"'), ContentDelta(":")]
    assert parser.feed(' "Be') == [ContentDelta(' "Be')]


# --- the parser itself


def test_ids_are_random():
    assert len({random_call_id() for _ in range(100)}) == 100
    assert random_call_id().startswith("call_")
    (call,) = parse_message(HERMES_CALL, HERMES, TOOLS).tool_calls
    assert len(call.id) == len("call_") + 24


def test_nothing_comes_after_the_end():
    parser = ChatParser(HERMES)
    parser.finish()
    with pytest.raises(AssertionError):
        parser.feed("x")
