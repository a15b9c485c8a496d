import pytest

from ringcore.chat import ChatFormat, to_template_messages
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


HARMONY = ChatFormat("harmony", "harmony")


def said(**fields):
    return {"role": "assistant", "content": "", **fields}


def test_reasoning_has_the_name_of_the_template():
    messages = [said(content="ok", reasoning_content="hm"), said(reasoning_content="")]
    assert to_template_messages(messages, HARMONY) == [said(content="ok", thinking="hm"), said()]
    for other in (None, ChatFormat("hermes", "qwen3"), ChatFormat(None, "deepseek_r1")):
        assert to_template_messages(messages, other) == messages
    before_call = said(content="I look.", reasoning_content="hm", tool_calls=[call("{}")])
    assert to_template_messages([before_call], HARMONY) == [said(thinking="hm\nI look.", tool_calls=[call({})])]
    assert to_template_messages([said(content="I look.", tool_calls=[call("{}")])], HARMONY) == [
        said(content="I look.", tool_calls=[call({})])
    ]


def test_a_call_has_a_message_of_its_own_where_the_template_writes_one():
    def result(name, content):
        return {"role": "tool", "content": content} | ({} if name is None else {"tool_call_id": name})

    first, second = call("{}") | {"id": "a"}, call("{}") | {"id": "b"}
    messages = [
        said(reasoning_content="hm", tool_calls=[first, second]),
        *(result("b", "2"), result(None, "?"), result("a", "1")),
        {"role": "user", "content": "x"},
    ]
    parsed = call({})
    assert to_template_messages(messages, HARMONY) == [
        said(thinking="hm", tool_calls=[parsed | {"id": "a"}]),
        result("a", "1"),
        said(tool_calls=[parsed | {"id": "b"}]),
        result("b", "2"),
        result(None, "?"),
        {"role": "user", "content": "x"},
    ]
    assert to_template_messages(["x", {"tool_calls": [3, {"function": 4}]}], HARMONY)[0] == "x"
    assert len(to_template_messages([{"tool_calls": [3, {"function": 4}]}], HARMONY)) == 2
