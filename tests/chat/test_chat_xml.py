import json

import pytest
from chat_texts import (
    CODER,
    CODER_CALL,
    HERMES_CALL,
    TOOLS,
    calls_of,
    parsed,
)

from ringcore.chat import (
    ChatMessage,
    ChatParser,
    ToolCallArguments,
    ToolCallStart,
)


def test_coder_writes_calls():
    body = 'def f(x):\n    return x < 3 and "</tool_call>" or "\\n"\n\n<parameter=none>\t🙂\n'
    text = (
        f"I write it.\n\n{CODER_CALL}\n<tool_call>\n<function=write_file>\n<parameter=path>\n007\n</parameter>\n"
        f"<parameter=content>\n{body}\n</parameter>\n<parameter=options>\n"
        '{"a": [1, {"b": null}]}\n</parameter>\n<parameter=force>\nTrue\n</parameter>\n'
        "<parameter=mode>None</parameter>\n"
        "<parameter=lines>\n[1, 2]\n</parameter>\n<parameter=ratio>\n 1e400 \n</parameter>\n</function>\n</tool_call>"
    )
    message = parsed(text, CODER)
    assert message.content == "I write it."
    first, second = message.tool_calls
    assert json.loads(first.arguments) == {"city": "Zürich", "days": 3}
    assert '"ratio": 1e400' in second.arguments
    assert json.loads(second.arguments) == {
        "path": "007",
        "content": body,
        "options": {"a": [1, {"b": None}]},
        "force": True,
        "mode": None,
        "lines": [1, 2],
        "ratio": float("inf"),
    }


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("path", "", ""),
        ("path", "\n\n", ""),
        ("path", "\n\n\n", "\n"),
        ("path", "\nnull\n", "null"),
        ("unheard_of", "12", "12"),
        ("anything", "[1]", "[1]"),
        ("mode", "\n0x1ff\n", "0x1ff"),
        ("mode", "\n1.5\n", 1.5),
        ("mode", "[1]", "[1]"),
        ("mode", "true", "true"),
        ("mode", "null", None),
        ("force", "False", False),
        ("force", "yes", "yes"),
        ("ratio", "NaN", "NaN"),
        ("ratio", "1" * 5000, "1" * 5000),
        ("options", "[" * 5000, "[" * 5000),
        ("options", "{'a': 1}", "{'a': 1}"),
    ],
)
def test_the_types_of_values(key, written, value):
    text = f"<tool_call><function=write_file><parameter={key}>{written}</parameter></function></tool_call>"
    (call,) = parsed(text, CODER).tool_calls
    assert json.loads(call.arguments) == {key: value}


def test_coder_leaves_tags_out():
    for text in (CODER_CALL.removeprefix("<tool_call>\n"), CODER_CALL.removesuffix("\n</tool_call>")):
        ((name, arguments),) = calls_of(parsed(text, CODER))
        assert (name, json.loads(arguments)) == ("get_weather", {"city": "Zürich", "days": 3})
    assert calls_of(parsed("<tool_call><function=now></function></tool_call>", CODER)) == [("now", "{}")]


def test_a_value_is_given_out_as_it_comes():
    parser = ChatParser(CODER, TOOLS, new_id=lambda: "call_x")
    begin = parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>")
    assert begin == [ToolCallStart(0, "call_x", "get_weather"), ToolCallArguments(0, '{"city": "')]
    assert parser.feed('\nZ"ü\n</para') == [ToolCallArguments(0, 'Z\\"ü')]
    assert parser.feed("graph") == [ToolCallArguments(0, "\\n</paragraph")]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=launch>\n<parameter=at>\nnow\n</parameter>\n</function>\n</tool_call>",
        "<function=get_weather",
        "<function=>x</function>",
        "<tool_call><parameter=city>Bern</parameter></tool_call>",
        "The tag <function=name> begins one, <parameter=x> too.",
        HERMES_CALL,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</para",
        "<tool_call>\n<function=get_weather>\nBern\n</function>\n</tool_call>\n",
        "<tool_call><function=get_weather><parameter=city>a</parameter><parameter=city>b</parameter></function>",
        "<tool_call><function=get_weather><parameter=>a</parameter></function>",
    ],
)
def test_coder_writes_no_call(text):
    assert parsed(text, CODER) == ChatMessage(text)
