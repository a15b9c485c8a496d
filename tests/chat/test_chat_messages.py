import pytest

from ringcore.chat import to_template_messages
from ringcore.errors import InvalidRequestError


def call(arguments):
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_arguments_become_objects_and_parts_become_text():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call('{"x": [1]}'), call(""), call({"y": 2})]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "assistant", "content": "ok", "tool_calls": None},
    ]
    assert to_template_messages(messages) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": None, "tool_calls": [call({"x": [1]}), call({}), call({"y": 2})]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "assistant", "content": "ok"},
    ]
    assert messages[1]["tool_calls"][0] == call('{"x": [1]}')


def test_the_rest_is_the_templates_to_refuse():
    assert to_template_messages(["x", {"tool_calls": [3, {"function": 4}]}]) == [
        "x",
        {"tool_calls": [3, {"function": 4}]},
    ]


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (
            {"content": [{"type": "image_url", "image_url": {}}]},
            r"messages\[0\].content\[0\]: a part of type 'image_url'",
        ),
        ({"content": ["x"]}, "a part of type 'x'"),
        ({"content": [{"type": "text", "text": 3}]}, "a part of type 'text'"),
        ({"tool_calls": [call("{")]}, r"messages\[0\].tool_calls\[0\].function.arguments: the text of a JSON object"),
        ({"tool_calls": [call("[1]")]}, "it is of type list"),
    ],
)
def test_what_cannot_be_converted(message, match):
    with pytest.raises(InvalidRequestError, match=match) as caught:
        to_template_messages([{"role": "user", **message}])
    assert caught.value.details["field"].startswith("messages[0].")
