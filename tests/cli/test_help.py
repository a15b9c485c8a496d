"""What `-h` of every command says."""

from __future__ import annotations

import re
from dataclasses import MISSING

import pytest
import typer

from ringcore.cli.app import make_app
from ringcore.cli.help import flag_help
from ringcore.cli.vllm_flags import SERVICE_FLAGS
from ringcore.errors import UnknownOptionError
from ringcore.params.sampling_params import SamplingParams
from ringcore.params.vllm_names import ENGINE_OPTIONS

APP = typer.main.get_command(make_app())
COMMANDS = {name: command for name, command in APP.commands.items() if name != "bench"} | {
    f"bench {name}": command for name, command in APP.commands["bench"].commands.items()
}
NAMES = {"max_model_len", "min_tokens", "ignore_eos", "logprobs"}


def help_of(command) -> str:
    with typer.Context(command, info_name="ringcore", max_content_width=100) as context:
        return command.get_help(context)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_described(name):
    command = COMMANDS[name]
    for param in command.params:
        if param.param_type_name == "option":
            assert param.help, param.name
            assert not re.search(r"\bNone\b|\bTrue\b|\bFalse\b|`|;;|\.$", param.help), (param.name, param.help)
    text = help_of(command)
    assert "Examples:" in text
    assert "\\b" not in text
    assert not re.search(r"<list\[|range>", text)


def test_a_command_that_is_no_word_of_the_command_line_has_its_line_in_the_list():
    meant = typer.main.get_command(make_app(["--log-level", "info", "ps", "--json"]))
    assert help_of(meant) == help_of(APP)
    flags = [{name: len(app.commands[name].params) for name in ("ps", "serve")} for app in (APP, meant)]
    assert flags[1] == {"ps": flags[0]["ps"], "serve": 0}
    assert flags[0]["serve"] > 50


def test_options_have_headings():
    text = help_of(COMMANDS["serve"])
    headings = re.findall(r"^(\w.*):$", text, re.M)
    assert headings == [
        "Arguments", "Options", "Requests, batches and connections", "Engine: the model", "Engine: KV cache",
        "Engine: scheduling", "Engine: processes, hosts and operators", "Engine: the device",
    ]  # fmt: skip
    assert text.index("\n  --port") < text.index("\n  --max-n ") < text.index("\n  --block-size")
    assert "Sampling:\n  --temperature" in help_of(COMMANDS["generate"])


@pytest.mark.parametrize(
    ("doc", "default", "shown"),
    [
        ("a text.", None, "a text"),
        ("a text", MISSING, "a text"),
        ("a size; None means 2 GiB", None, "a size; default: 2 GiB"),
        ("None measures what is free", None, "the default measures what is free"),
        ("ends it; None means never", 300.0, "ends it (default: 300)"),
        ("keep it", True, "keep it (default: on)"),
        ("False makes none", True, "--no-x-bytes makes none (default: on)"),
        ("bytes", 64 << 20, "bytes (default: 64MiB)"),
        ("bytes", 1000, "bytes (default: 1000)"),
        ("up to max_model_len", None, "up to --max-model-len"),
        ("needs min_tokens=0 and ignore_eos=False", None, "needs --min-tokens 0 and --no-ignore-eos"),
        ("as `logprobs` of `Engine`", None, "as --logprobs of Engine"),
        ("of max_model_len.json and other_names", None, "of max_model_len.json and other_names"),
    ],
)
def test_words_of_python_become_those_of_a_command_line(doc, default, shown):
    name = "x_bytes" if isinstance(default, int) else "x"
    assert flag_help(name, doc, default, NAMES) == shown


def test_a_description_of_several_lines_is_whole():
    params = {param.name: param.help for param in COMMANDS["generate"].params if hasattr(param, "help")}
    assert params["request_seed"].endswith("and -1 is none")
    assert {"pooling", "include_stop_str_in_output"} <= set(SamplingParams.__dataclass_fields__)
    assert params["pooling"].endswith("nothing is read from the prefix cache")


@pytest.mark.parametrize(
    ("command", "flag", "says"),
    [
        (
            "serve",
            "--swap-space=4",
            "--swap-space, which is vLLM's: blocks beyond the device are --host-kv-cache-bytes",
        ),
        ("serve", "--no-enable-chunked-prefill", "always chunked"),
        ("serve", "--async-scheduling", "--steps-in-flight 2"),
        ("serve", "--ssl-keyfile", "reverse proxy"),
        ("generate", "--served-model-name", "an option of 'ringcore serve'"),
        ("generate", "--best-of", "it is n here"),
        ("bench throughput", "--enable-lora", "adapters are not served"),
    ],
)
def test_a_flag_of_vllms_is_explained(command, flag, says):
    with pytest.raises(UnknownOptionError) as caught:
        COMMANDS[command].make_context(command, [flag, "4"])
    assert says in str(caught.value)


def test_short_flags_of_vllms():
    flags = ["-tp", "2", "-pp=3", "-dp", "4", "-ep", "-q", "fp8"]
    given = COMMANDS["serve"].make_context("serve", ["model", *flags]).params
    wanted = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 4, "expert_parallel": True}
    assert {name: given[name] for name in wanted} == wanted
    assert given["quantization"] == "fp8"


def test_other_errors_of_flags_stay(capsys):
    for wrong, says in (("--nothing", "No such option: --nothing"), ("--port=x", "Invalid value for '--port'")):
        with pytest.raises(Exception, match=r".") as caught:
            COMMANDS["serve"].make_context("serve", ["model", wrong])
        assert says in caught.value.format_message()


def test_explanations_name_flags_of_serve():
    flags = {flag for param in COMMANDS["serve"].params for flag in (*param.opts, *param.secondary_opts)}
    flags |= {"--log-level", "--log-format"}
    assert {name for here in SERVICE_FLAGS.values() for name in re.findall(r"--[a-z-]+", here)} <= flags
    theirs = {f"--{name.replace('_', '-')}" for name in SERVICE_FLAGS}
    assert theirs & flags == set(), "a flag of ours needs no explanation"
    assert SERVICE_FLAGS.keys() & ENGINE_OPTIONS.keys() == set()
