"""The command line: prompts in, texts or JSON out, one clear line for an error."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys

import pytest
import typer
from documented import commands
from fake_engine import expected, make_model_folder

from ringcore import RequestOutput
from ringcore.cli import _log_options_first, main
from ringcore.cli.generate import Order, _Printer
from ringcore.cli.options import engine_options, given, sampling_options
from ringcore.cli.sizes import size_in_bytes
from ringcore.config import EngineConfig

FAKE = ["--load-format", "dummy", "--executor", "fake_engine:FakeUniproc", "--max-model-len", "64", "--no-progress"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def run(capsys, *args):
    """(exit code, stdout, stderr)"""
    with pytest.raises(SystemExit) as caught:
        main(list(args))
    printed = capsys.readouterr()
    return caught.value.code or 0, printed.out, printed.err


def text_of(prompt: str, num_tokens: int) -> str:
    return bytes(expected(list(prompt.encode()), num_tokens)).decode()


def test_texts(capsys, folder):
    code, out, _ = run(
        capsys, "generate", "--model", folder, *FAKE, "--prompt", "ab", "--prompt", "c", "--max-tokens", "3"
    )
    assert code == 0
    assert out == f"--- ab\n{text_of('ab', 3)}\n--- c\n{text_of('c', 3)}\n"


def test_json_lines(capsys, folder, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "ab", "request_id": "mine"}\n\n"c"\n[97, 98]\n')
    flags = ["--prompts-file", str(file), "--json", "--max-tokens", "4", "--logprobs", "1"]
    code, out, _ = run(capsys, "generate", "--model", folder, *FAKE, *flags)
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["outputs"][0]["text"] for line in lines] == [text_of(p, 4) for p in ("ab", "c", "ab")]
    assert lines[0]["request_id"] == "mine"
    assert lines[0]["error"] is None
    assert lines[2]["prompt_token_ids"] == [97, 98]
    first = lines[0]["outputs"][0]
    assert first["logprobs"][0][str(first["token_ids"][0])]["rank"] == 1


def test_a_file_of_lines_and_sampling_flags(capsys, folder, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("ab\n\n  c d \n")
    stop = text_of("ab", 6)[3]
    flags = ["--prompts-file", str(file), "--json", "--max-tokens", "6", "--stop", stop, "--stop", "?"]
    code, out, _ = run(capsys, "generate", "--model", folder, *FAKE, *flags)
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt"] for line in lines] == ["ab", "  c d "]
    assert lines[0]["outputs"][0]["stop_reason"] == stop


def test_sampling_options_of_several_parts(capsys, folder):
    flags = ["--json", "--max-tokens", "2", "--prompt-logprobs", "1", "--presence-penalty", "0.5"]
    flags += ["--logit-bias", '{"97": 2}', "--bad-words", "no", "--bad-words", "never", "--allowed-token-ids", "97"]
    code, out, _ = run(capsys, "generate", "--model", folder, *FAKE, "--prompt", "abc", *flags)
    assert code == 0
    line = json.loads(out)
    assert [position and "98" in position for position in line["prompt_logprobs"][:2]] == [None, True]
    assert len(line["prompt_logprobs"]) == 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--logit-bias", '{"a": 1}'], "give a JSON object with int keys"),
        (["--logit-bias", "5"], "not an object"),
        (["--extra-args", "{"], "give a JSON object with str keys"),
        (["--structured-outputs", '{"regexp": "a"}'], "unknown structured output 'regexp'; did you mean 'regex'?"),
        (["--structured-outputs", '{"choice": []}'], "structured_outputs.choice=0: give a list of 1 to 1024"),
        (["--logit-bias", '{"5": 101}'], "logit_bias=101: give a number from -100 to 100"),
    ],
)
def test_what_is_wrong_with_json_flags(capsys, folder, flags, says):
    code, _, err = run(capsys, "generate", "--model", folder, *FAKE, "--prompt", "a", *flags)
    assert code == 2
    assert says in err


def test_stdin_and_sizes(capsys, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\nc\n"))
    flags = ["--prompts-file", "-", "--max-tokens", "3", "--kv-cache-bytes", "1MiB"]
    code, out, err = run(capsys, "generate", "--model", folder, *FAKE[:-1], *flags)  # no terminal, so no bar
    assert (code, err) == (0, "")
    assert out == f"--- ab\n{text_of('ab', 3)}\n--- c\n{text_of('c', 3)}\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("2GiB", 2 << 30), ("1.5 kb", 1500), ("3MB", 3_000_000), ("-1", -1), ("9tib", 9 << 40)],
)
def test_sizes(text, size):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2XB", "1e9", "2G iB", "nan"])
def test_what_is_no_size(text):
    with pytest.raises(typer.BadParameter, match="is no size; give bytes as 1048576, 512MiB"):
        size_in_bytes(text)


def _output(request_id: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, prompt=request_id, prompt_token_ids=[1])


def test_results_come_in_order_and_none_is_lost(capsys):
    printer = _Printer([{"request_id": one} for one in "abcd"], lambda output: output.request_id, Order.input)
    printer.add(_output("b"))
    assert capsys.readouterr().out == ""
    printer.add(_output("a"))
    assert capsys.readouterr().out == "a\nb\n"
    printer.add(_output("d"))
    printer.print_rest()  # of c nothing came
    assert (capsys.readouterr().out, printer.num_printed) == ("d\n", 3)
    at_once = _Printer([{"request_id": one} for one in "ab"], lambda output: output.request_id, Order.completion)
    at_once.add(_output("b"))
    assert capsys.readouterr().out == "b\n"
    at_once.print_rest()
    assert (capsys.readouterr().out, at_once.num_printed) == ("", 1)


class InterruptedLLM:
    def __init__(self, **options) -> None:
        self.config = EngineConfig.from_options(**options)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None: ...

    def stream(self, prompts, params):
        yield _output(prompts[1]["request_id"])
        raise KeyboardInterrupt


def test_ctrl_c_keeps_what_is_done(capsys, folder, monkeypatch):
    monkeypatch.setattr("ringcore.front_end.llm.LLM", InterruptedLLM)
    flags = ["--prompt", "ab", "--prompt", "c", "--json"]
    code, out, err = run(capsys, "generate", "--model", folder, *FAKE, *flags)
    assert code == 130
    assert [json.loads(line)["request_id"] for line in out.splitlines()] == ["request-1"]
    assert err == "ringcore: stopped; 1 of 2 prompts are done\n"


def test_short_help_and_log_options_after_the_command(capsys):
    code, out, _ = run(capsys, "generate", "-h")
    assert (code, "--prompts-file" in out) == (0, True)
    assert _log_options_first(["serve", "m", "--log-level", "debug", "--port", "1", "--log-format=json"]) == [
        "--log-level", "debug", "--log-format=json", "serve", "m", "--port", "1",
    ]  # fmt: skip
    assert _log_options_first(["rpc", "x", "--", "--log-level", "y"]) == ["rpc", "x", "--", "--log-level", "y"]


def test_chat(capsys, folder):
    code, out, _ = run(capsys, "generate", "--model", folder, *FAKE, "--chat", "--prompt", "hi", "--json")
    assert code == 0
    assert bytes(json.loads(out)["prompt_token_ids"]) == b"user:hi;A:"


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--prompt", ""], 2, "prompt 0: prompt='': the prompt is empty"),
        (["--prompt", "a", "--top-p", "0"], 2, "top_p=0.0: give a number above 0"),
        (["--prompt", "a", "--dtype", "int3"], 2, "dtype='int3': give one of"),
        (["--prompt", "a", "--max-model-len", "all"], 2, "max_model_len='all': give an integer of at least 1, or"),
        (["--prompt", "a" * 64, "--max-model-len", "auto", "--kv-cache-bytes", "5120"], 2, "max_model_len is 64"),
        (["--prompts-file", "/no/such/file"], 2, "cannot be read"),
        ([], 2, "no prompts; give --prompt or --prompts-file"),
        (["--prompt", "a", "--kv-cache-bytes", "512"], 1, "raise kv_cache_bytes to"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(capsys, folder, flags, code, says):
    got, out, err = run(capsys, "generate", "--model", folder, *FAKE, *flags)
    (line,) = [line for line in err.splitlines() if line.startswith("ringcore: ")]
    assert got == code
    assert says in line
    assert out == ""


def test_a_missing_model(capsys):
    code, _, err = run(capsys, "generate", "--model", "/no/such/folder", "--prompt", "a")
    assert code == 1
    assert "/no/such/folder" in err


def test_broken_json_names_its_line(capsys, folder, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('"a"\n{"prompt": \n')
    code, _, err = run(capsys, "generate", "--model", folder, "--prompts-file", str(file))
    assert code == 2
    assert "line 2 is no JSON" in err


def test_every_engine_option_is_a_flag_of_the_same_name(capsys):
    code, out, _ = run(capsys, "generate", "--help")
    assert code == 0
    for name in EngineConfig.options():
        assert f"--{name.replace('_', '-')} " in out
    for flag in ("--max-tokens", "--temperature", "--request-seed", "--stop-token-ids", "--no-skip-special-tokens"):
        assert flag in out
    assert "ringcore generate --model" in out  # by example


def test_only_what_was_given_is_passed_on():
    values = {p.name: None for p in [*engine_options(), *sampling_options()]}
    values |= {"model": "m", "seed": 1, "request_seed": 2, "enable_prefix_caching": False, "stop": []}
    assert given(values, engine_options()) == {"model": "m", "seed": 1, "enable_prefix_caching": False}
    assert given(values, sampling_options()) == {"seed": 2}


def test_help_of_the_whole_command_needs_no_model_library():
    code = (
        "import sys\nfrom ringcore.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted(m for m in ('torch', 'transformers', 'zmq', 'tokenizers') if m in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "generate" in out
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", commands("generate", "docs/guide/offline.md"))
def test_the_commands_of_the_guide(capsys, monkeypatch, folder, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "model").symlink_to(folder)
    (tmp_path / "prompts.txt").write_text("ab\nc\n")
    words = shlex.split(command.partition(" > ")[0])
    code, out, err = run(capsys, *words[1:], *FAKE)
    assert code == 0, err
    if "--json" in words:
        assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["ab", "c"]
    else:
        assert text_of("The capital of France is", 32) in out
