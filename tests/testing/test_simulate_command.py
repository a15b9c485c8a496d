"""`ringcore simulate`, by the functions that its script calls."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from ringcore.cli import main
from ringcore.cli.app import make_app
from ringcore.errors import ConfigError
from ringcore.testing import read_trace

LINES = "".join(
    json.dumps({"time": 0.1 * i, "prompt_tokens": 20, "output_tokens": 5, "prefix_id": "a", "prefix_tokens": 16}) + "\n"
    for i in range(20)
)


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text(LINES)
    return str(file)


def run(*args: str):
    return CliRunner().invoke(make_app(["simulate"]), ["simulate", *args], catch_exceptions=False)


def test_a_table(trace, model_folder):
    result = run(trace, "--gpus", "4", "--model", f"{model_folder}/config.json", "--tensor-parallel-size", "2")
    assert result.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines() if not line.startswith(" "))
    assert lines["requests"] == "20"
    assert lines["TTFT"].startswith("p50 ")
    assert lines["preemptions"] == "0"
    assert "min " in lines["utilisation"]
    assert "prefix cache hits" in result.stdout


def test_json_and_engine_options(trace, model_folder, tmp_path):
    out = tmp_path / "out.json"
    args = ["--gpus", "2", "--model", model_folder, "--json", str(out), "--processes", "1"]
    assert run(trace, *args, "--max-model-len", "22", "--block-size", "8").exit_code == 0
    summary = json.loads(out.read_text())
    assert summary["num_cut"] == 20  # two tokens each
    assert summary["requests_by_replica"] == [10, 10]
    assert summary["cache_hit_rate"] == pytest.approx(18 * 16 / 400)
    assert run(trace, *args, "--no-enable-prefix-caching").exit_code == 0
    assert json.loads(out.read_text())["cache_hit_rate"] == 0


def test_costs_fitted_to_measurements(trace, model_folder, tmp_path):
    """Every step took half a second."""
    file, out = tmp_path / "steps.jsonl", tmp_path / "out.json"
    rows = [(1, 1, 10), (9, 3, 50), (100, 4, 900), (7, 7, 7000), (300, 2, 300)]
    names = ("num_tokens", "num_seqs", "num_context_tokens")
    file.write_text("".join(json.dumps(dict(zip(names, row, strict=True)) | {"seconds": 0.5}) + "\n" for row in rows))
    args = ["--gpus", "20", "--model", model_folder, "--json", str(out), "--processes", "1"]
    assert run(trace, *args, "--measurements", str(file)).exit_code == 0
    assert json.loads(out.read_text())["e2e"]["max"] == pytest.approx(2.5)


def test_a_trace_is_made(model_folder, tmp_path):
    file = tmp_path / "made.jsonl"
    args = [str(file), "--gpus", "1", "--model", model_folder, "--poisson", "5", "--requests", "30"]
    lengths = ["--prompt-tokens", "9", "--output-tokens", "3", "--prefixes", "2", "--prefix-tokens", "16"]
    assert run(*args, *lengths).exit_code == 0
    assert len(read_trace(file)) == 30
    assert read_trace(file).prefix_tokens.tolist() == [16] * 30


def test_an_existing_trace_is_not_overwritten(trace, model_folder, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["simulate", trace, "--gpus", "1", "--model", model_folder, "--poisson", "5"])
    assert caught.value.code == 2
    assert "exists, and --poisson would make it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--gpus", "3", "--tensor-parallel-size", "2"], "gpus=3: a replica has tensor_parallel_size=2"),
        (["--gpus", "0"], "gpus=0: "),
        (["--gpus", "1", "--routing", "best"], "routing='best': give one of"),
        (["--gpus", "1", "--hardware", "abacus"], "hardware='abacus'"),
        (["--gpus", "1", "--json", "/no/such/folder/a.json"], "json='/no/such/folder/a.json': there is no such folder"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(trace, model_folder, capsys, args, says):
    with pytest.raises(SystemExit) as caught:
        main(["simulate", trace, "--model", model_folder, *args])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ringcore: ")
    assert says in line


def test_a_png_without_matplotlib_is_refused_before_the_simulation(trace, model_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'ringcore\[simulate\]'"):
        run("/no/such/trace", "--gpus", "1", "--model", model_folder, "--png", "a.png")


def test_a_png_is_drawn(trace, model_folder, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'ringcore[simulate]'")
    file = tmp_path / "a.png"
    assert run(trace, "--gpus", "1", "--model", model_folder, "--png", str(file)).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_help_shows_only_options_that_matter():
    result = run("--help")
    for flag in ("--gpus", "--routing", "--max-num-seqs", "--kv-cache-bytes", "--tensor-parallel-size"):
        assert flag in result.stdout
    for flag in ("--executor", "--load-format", "--steps-in-flight", "--admin-endpoint"):
        assert flag not in result.stdout
