import pytest

from ringcore.checkpoint.chat_template import MAX_RENDERED_CHARS, ChatTemplate, conversation_json
from ringcore.errors import InvalidRequestError, ModelLoadError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [{"role": "system", "content": "Be <brief> & kind"}, {"role": "user", "content": " Hi 🙂 "}]
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}",
    "blocks": "{{ bos_token }}\n  {% for m in messages %}\n    {{- m.content | trim }}\n  {% endfor %}\n"
    "{{ eos_token }}\n",
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{{ m.content }}{% break %}{% endfor %}",
    "json": "{{ messages | tojson }}{{ {'b': 1, 'a': 'ü<'} | tojson(indent=2) }}{{ tools is none }}{{ tools }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}\n{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "defined": "{% if tools %}T{% endif %}{% if nothing is defined %}N{% endif %}{{ messages[0].name }}{{ pad_token }}",
    "dict": "{{ dict(a=1)['a'] }}{{ messages[-1]['role'] in ['user'] }}{{ messages[1:][0].content.split(' ') }}",
    "tools": "{% for t in tools or [] %}{{ t | tojson }}{{ (t.function or t).name }}{% endfor %}{{ tools is none }}",
    "thinking": "{{ enable_thinking is defined and enable_thinking is false }}{{ bos_token }}{{ documents }}{{ n }}",
    "calls": "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.role }}{{ m.content }}{% endif %}{% endfor %}",
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALLED = [
    *CHAT,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Zürich"}}}],
    },
    {"role": "tool", "content": "fine"},
]


@pytest.mark.parametrize(
    ("messages", "prompt", "tools", "kwargs"),
    [
        (CHAT, True, None, {}),
        (CHAT, False, None, {}),
        (CHAT, True, [WEATHER, {"name": "now"}], {"enable_thinking": False, "n": [1, {"a": None}]}),
        (CALLED, True, [WEATHER], {"bos_token": "<b>", "documents": [{"title": "t"}], "unheard_of": 1}),
    ],
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name, messages, prompt, tools, kwargs):
    from transformers.utils.chat_template_utils import render_jinja_template

    given = {"chat_template": TEMPLATES[name], "add_generation_prompt": prompt, **SPECIAL, **kwargs}
    theirs, _ = render_jinja_template([messages], tools=tools, **given)
    assert (
        ChatTemplate(TEMPLATES[name], SPECIAL, "here").render(conversation_json(messages, prompt, tools, kwargs))
        == theirs[0]
    )


def test_no_tools_and_an_empty_list_are_the_same():
    template = ChatTemplate("{{ tools is none }}", {}, "here")
    assert (
        template.render(conversation_json(CHAT, True, [])) == template.render(conversation_json(CHAT, True)) == "True"
    )


def test_the_date(monkeypatch):
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}, "here").render(conversation_json(CHAT, True))
    assert len(text) == 10
    assert text.count("-") == 2


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ (messages|attr('__class__')) }}{{ messages.__class__.__name__ }}",
        "{{ dict.fromkeys.__self__ }}",
        "{{ dict.mro() }}",
        "{{ namespace(_a=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ extra.clear() }}",
        "{{ tools.append(1) }}",
        "{% include 'x' %}",
        "{{ range(99999999) | list }}",
        "{{ 1 // 0 }}",
        "{{ nothing.at.all }}",
        "{{ raise_exception('roles must alternate') }}",
    ],
)
def test_a_template_cannot_get_out_and_its_failure_is_typed(template):
    with pytest.raises(InvalidRequestError, match="messages: the model's chat template refuses them") as caught:
        ChatTemplate(template, {}, "here").render(conversation_json(CHAT, True, [WEATHER], {"extra": {"a": 1}}))
    assert caught.value.details["field"] == "messages"


def test_its_own_words_come_through():
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}, "here").render(conversation_json(CHAT, True))


def test_the_output_is_bounded():
    template = "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_RENDERED_CHARS} characters"):
        ChatTemplate(template, {}, "here").render(conversation_json(CHAT, True))


@pytest.mark.parametrize("template", ["{% if %}", "{{", "{% for m in messages %}"])
def test_a_template_that_does_not_compile(template):
    with pytest.raises(ModelLoadError, match="here: the chat template is not valid"):
        ChatTemplate(template, {}, "here")


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ("hello", "a list of dicts is needed, got str"),
        ({"role": "user", "content": "x"}, "a list of dicts is needed, got dict"),
        (7, "got int"),
        ([], "the conversation is empty"),
        (["hello"], "message 0 is 'hello', a dict"),
        ([CHAT[0], {"content": "x"}], "message 1 has no 'role'"),
        ([{"role": 3, "content": "x"}], "message 0 has no 'role'"),
        ([{"role": "user"}], "message 0 has no 'content'"),
        ([{"role": "user", "content": object()}], "only strings, numbers, lists and dicts"),
    ],
)
def test_the_shape_of_messages(messages, match):
    with pytest.raises(InvalidRequestError, match=match):
        ChatTemplate("x", {}, "here").render(conversation_json(messages, True))


@pytest.mark.parametrize(
    ("tools", "match"),
    [
        ("weather", "tools: a list of dicts is needed, got str"),
        (WEATHER, "got dict"),
        ([len], "tool 0 is <built-in function len>; give {'type': 'function'"),
        ([WEATHER, {"type": "function", "function": {}}], "tool 1 has no 'name'"),
        ([{"type": "function", "function": {"name": ""}}], "tool 0 has no 'name'"),
        ([{"type": "function", "function": "weather"}], "tool 0 has no 'name'"),
        ([{"name": "f", "parameters": ["city"]}], "the 'parameters' of tool 0 are no JSON schema"),
        ([{"name": "f", "parameters": {"x": object()}}], "tools: only strings, numbers, lists and dicts"),
    ],
)
def test_the_shape_of_tools(tools, match):
    with pytest.raises(InvalidRequestError, match=match) as caught:
        ChatTemplate("x", {}, "here").render(conversation_json(CHAT, True, tools))
    assert caught.value.details["field"] == "tools"


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        (["enable_thinking"], "chat_template_kwargs: a dict of the template's variables is needed, got list"),
        ({1: 2}, "1 is no variable's name"),
        ({"messages": []}, "'messages' has a parameter of its own"),
        ({"tools": []}, "'tools' has a parameter of its own"),
        ({"add_generation_prompt": False}, "'add_generation_prompt' has a parameter of its own"),
        ({"f": print}, "chat_template_kwargs: only strings, numbers, lists and dicts"),
    ],
)
def test_the_shape_of_template_variables(kwargs, match):
    with pytest.raises(InvalidRequestError, match=match) as caught:
        ChatTemplate("x", {}, "here").render(conversation_json(CHAT, True, None, kwargs))
    assert caught.value.details["field"] == "chat_template_kwargs"
