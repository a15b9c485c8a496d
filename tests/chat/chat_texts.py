"""What models write in each format, the tools they were shown, and ways to cut a text into deltas."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from ringcore.chat import (
    ChatFormat,
    ChatParser,
    ContentDelta,
    MessageBuilder,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

HERMES = ChatFormat("hermes")
QWEN3 = ChatFormat("hermes", "qwen3")
LLAMA = ChatFormat("llama3_json")
CODER = ChatFormat("qwen3_coder")
R1 = ChatFormat(None, "deepseek_r1")
HARMONY = ChatFormat("harmony", "harmony")
FORMATS = [HERMES, QWEN3, LLAMA, CODER, R1, ChatFormat("llama3_json", "deepseek_r1"), ChatFormat(), HARMONY]

WEATHER = '{"city": "Zürich", "days": 3}'
HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": ' + WEATHER + "}\n</tool_call>"
LLAMA_CALL = '{"name": "get_weather", "parameters": ' + WEATHER + "}"
CODER_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>"
)
HARMONY_CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WEATHER}<|call|>"
NEXT = "<|start|>assistant"


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool(
        "write_file",
        path={"type": "string"},
        content={"type": "string"},
        mode={"type": ["integer", "null"]},
        options={"type": "object"},
        lines={"anyOf": [{"type": "array"}, {"type": "null"}]},
        force={"type": "boolean"},
        ratio={"type": "number"},
        anything={},
    ),
    tool("now"),
]


def ids():
    count = itertools.count()
    return lambda: f"call_{next(count)}"


def stream(pieces, chat_format, tools=TOOLS, prompt_end=""):
    """The events of a text given in pieces, checked for their form."""
    parser = ChatParser(chat_format, tools, prompt_end, ids())
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    under_way, num_calls = None, 0
    for event in events:
        match event:
            case ContentDelta(text) | ReasoningDelta(text):
                assert text
                assert under_way is None
            case ToolCallStart(index, call_id, name):
                assert (under_way, index, call_id) == (None, num_calls, f"call_{num_calls}")
                assert tools is None or name in {one["function"]["name"] for one in tools}
                under_way, num_calls = index, num_calls + 1
            case ToolCallArguments(index, text):
                assert text
                assert index == under_way
            case ToolCallEnd(index, is_complete, text):
                assert index == under_way
                assert is_complete == (text == "")
                under_way = None
    assert under_way is None
    return events


def summed(events):
    """The events with neighbours of one kind joined: what does not depend on how the text was cut."""
    joined = []
    for event in events:
        last = joined[-1] if joined else None
        match last, event:
            case (ContentDelta(), ContentDelta()) | (ReasoningDelta(), ReasoningDelta()):
                joined[-1] = type(event)(last.text + event.text)
            case ToolCallArguments(), ToolCallArguments():
                joined[-1] = ToolCallArguments(event.index, last.text + event.text)
            case _:
                joined.append(event)
    return joined


def message_of(events):
    builder = MessageBuilder()
    builder.add(events)
    return builder.message


def parsed(text, chat_format, tools=TOOLS, prompt_end=""):
    """The message of a text, which is the same in one piece, in characters, and in pieces of 2, 3 and 7."""
    events = stream([text], chat_format, tools, prompt_end)
    for size in (1, 2, 3, 7):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert summed(stream(pieces, chat_format, tools, prompt_end)) == summed(events)
    return message_of(events)


def calls_of(message):
    return [(call.name, call.arguments) for call in message.tool_calls]


@st.composite
def cut(draw, texts):
    """A text, and the same in pieces, some of them empty."""
    text = draw(texts)
    places = draw(st.lists(st.integers(0, len(text)), max_size=12)) if draw(st.booleans()) else range(len(text))
    edges = [0, *sorted(places), len(text)]
    return text, [text[start:end] for start, end in itertools.pairwise(edges)]
