import pytest

from ringcore.checkpoint.chat_template import MAX_RENDERED_CHARS, ChatTemplate
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
}


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name, prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template([CHAT], chat_template=TEMPLATES[name], add_generation_prompt=prompt, **SPECIAL)
    assert ChatTemplate(TEMPLATES[name], SPECIAL, "here").render(CHAT, prompt) == theirs[0]


def test_the_date(monkeypatch):
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}, "here").render(CHAT, True)
    assert len(text) == 10
    assert text.count("-") == 2


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ (messages|attr('__class__')) }}{{ messages.__class__.__name__ }}",
        "{% include 'x' %}",
        "{{ range(99999999) | list }}",
        "{{ 1 // 0 }}",
        "{{ nothing.at.all }}",
        "{{ raise_exception('roles must alternate') }}",
    ],
)
def test_a_template_cannot_get_out_and_its_failure_is_typed(template):
    with pytest.raises(InvalidRequestError, match="messages: the model's chat template refuses them") as caught:
        ChatTemplate(template, {}, "here").render(CHAT, True)
    assert caught.value.details["field"] == "messages"


def test_its_own_words_come_through():
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}, "here").render(CHAT, True)


def test_the_output_is_bounded():
    template = "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_RENDERED_CHARS} characters"):
        ChatTemplate(template, {}, "here").render(CHAT, True)


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
        ChatTemplate("x", {}, "here").render(messages, True)
