import pytest

from ringcore.chat import ChatFormat, choose_format
from ringcore.errors import ConfigError

# The parts of the models' own templates that tell.
QWEN25 = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{{- \"\\n</tools>\\n\\nFor each function call, return a json object "
    "with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}{%- endif %}'
)
QWEN3 = QWEN25 + "{%- if '</think>' in content %}{%- endif %}{{- '<think>\\n\\n</think>\\n\\n' }}"
CODER = "{{- '<tool_call>\\n<function=example>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>' }}"
LLAMA = (
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{{- 'Respond in the format {\"name\": function name, "
    "\"parameters\": dictionary of argument name and its value}.' }}{%- if 'tool_calls' in message %}{%- endif %}"
)
R1 = "{%- if '</think>' in content %}{%- endif %}{{'<｜Assistant｜><think>\\n'}}"  # noqa: RUF001 (DeepSeek's bars)
GPT_OSS = (
    "{{- '<|start|>system<|message|>' }}{%- if message.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    "{%- endif %}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "tool_calls", "reasoning"),
    [
        (QWEN25, "hermes", None),
        (QWEN3, "hermes", "qwen3"),
        (CODER, "qwen3_coder", None),
        (LLAMA, "llama3_json", None),
        (R1, None, "deepseek_r1"),
        (GPT_OSS, "harmony", "harmony"),
        (CHATML, None, None),
        (None, None, None),
    ],
)
def test_a_template_tells_its_models_format(template, tool_calls, reasoning):
    assert choose_format(template) == ChatFormat(tool_calls, reasoning)
    assert choose_format(template, None, None) == ChatFormat()


@pytest.mark.parametrize(
    ("chat_format", "markers"),
    [
        (ChatFormat(), set()),
        (ChatFormat("hermes"), {"<tool_call>", "</tool_call>"}),
        (ChatFormat("llama3_json", "qwen3"), {"<|python_tag|>", "<think>", "</think>"}),
        (ChatFormat("qwen3_coder"), {"<tool_call>", "<function=", "</tool_call>"}),
        (
            ChatFormat(None, "harmony"),
            {f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return")},
        ),
    ],
)
def test_markers_are_what_a_parser_looks_for(chat_format, markers):
    assert chat_format.markers == markers


def test_a_format_by_name():
    assert choose_format(QWEN3, "llama3_json", "deepseek_r1") == ChatFormat("llama3_json", "deepseek_r1")
    with pytest.raises(ConfigError, match="tool_call_parser='qwen': no such format; give 'auto', None or one"):
        choose_format(None, "qwen")
    with pytest.raises(ConfigError, match="one of 'qwen3', 'deepseek_r1', 'harmony'") as caught:
        choose_format(None, "auto", "hermes")
    assert caught.value.details == {"option": "reasoning_parser", "value": "hermes"}


def test_harmony_is_for_both_or_for_neither():
    assert choose_format(GPT_OSS, None, "auto") == ChatFormat(None, "harmony")
    assert choose_format(GPT_OSS, None, None) == ChatFormat()
    for given in (("harmony", "auto"), ("auto", "harmony"), ("harmony", "harmony")):
        assert choose_format(None, *given) == choose_format(QWEN3, *given) == ChatFormat("harmony", "harmony")
    for calls, reasoning in (("auto", None), ("harmony", "qwen3"), ("hermes", "auto"), ("harmony", None)):
        with pytest.raises(ConfigError, match="for both, or for neither") as caught:
            choose_format(GPT_OSS, calls, reasoning)
        assert caught.value.details["option"] == "tool_call_parser"


def test_what_ends_an_output():
    assert ChatFormat("harmony", "harmony").stops == {"<|call|>", "<|return|>"}
    assert ChatFormat("hermes", "qwen3").stops == frozenset()
