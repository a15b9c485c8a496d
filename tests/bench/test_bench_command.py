"""`ringcore bench`, as typed in the guide."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from fake_engine import make_model_folder
from raw_service import RawService

from ringcore.cli import main

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "benchmarking.md"
FAKE = ["--load-format", "dummy", "--executor", "fake_engine:FakeMultiproc", "--max-model-len", "256"]
SMALL = ["--num-prompts", "6", "--prompt-tokens", "20", "--output-tokens", "4"]


@pytest.fixture(scope="module")
def service():
    with RawService() as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def run(capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *args])
    printed = capsys.readouterr()
    return caught.value.code or 0, printed.out, printed.err


def table(out: str) -> dict[str, float]:
    pairs = (line.rsplit(None, 1) for line in out.splitlines() if not line.startswith("---"))
    return {name.rstrip(":"): float(value) for name, value in pairs}


def test_a_service_under_load(capsys, service, tmp_path):
    chart, file = tmp_path / "load.png", tmp_path / "load.json"
    flags = ["--request-rate", "200", "--num-warmups", "2", "--goodput", "ttft:60000", "--api-key", "secret"]
    service.bodies.clear()
    code, out, _ = run(
        capsys, "serve", "--url", service.url, *SMALL, *flags, "--chart", str(chart), "--json", str(file)
    )
    assert code == 0
    figures = table(out)
    assert (figures["Successful requests"], figures["Failed requests"]) == (6, 0)
    assert figures["Total generated tokens"] == 24
    assert figures["Request goodput (req/s), ttft 60000 ms"] == figures["Request throughput (req/s)"]
    assert 0 < figures["Median TTFT (ms)"] <= figures["P99 TTFT (ms)"]
    assert figures["Mean TTFT from sent (ms)"] <= figures["Mean TTFT (ms)"]
    assert len(service.bodies) == 8  # with the warm-up
    assert chart.read_bytes().startswith(b"\x89PNG")
    saved = json.loads(file.read_text())
    assert saved["completed"] == 6
    assert saved["median_ttft_ms"] == pytest.approx(figures["Median TTFT (ms)"], abs=0.01)
    assert [len(one["text_times"]) for one in saved["requests"]] == [4] * 6
    assert "secret" not in file.read_text()


def test_a_model_in_this_process(capsys, folder, tmp_path):
    file = tmp_path / "load.json"
    flags = ["--max-concurrency", "2", "--prefix-tokens", "16", "--block-size", "8", "--json", str(file)]
    code, out, _ = run(capsys, "serve", "--model", folder, *FAKE, *SMALL, *flags)
    assert code == 0
    figures = table(out)
    assert (figures["Total input tokens"], figures["Total generated tokens"]) == (120, 24)
    assert figures["Peak concurrent requests"] == 2
    assert json.loads(file.read_text())["engine_options"]["block_size"] == 8
    code, out, _ = run(capsys, "throughput", "--model", folder, *FAKE, *SMALL, "--chat")
    assert table(out)["Total input tokens"] == 6 * (len("user:;A:") + 20)
    assert table(out)["Peak concurrent requests"] == 6
    assert "TTFT" not in out  # whole answers


def test_batches(capsys, service, tmp_path):
    file = tmp_path / "latency.json"
    flags = ["--batch-size", "3", "--num-iters", "4", "--num-warmups", "1", *SMALL[2:], "--json", str(file)]
    service.bodies.clear()
    code, out, _ = run(capsys, "latency", "--url", service.url, *flags)
    assert code == 0
    assert table(out)["Batches"] == 4
    assert len(service.bodies) == 3 * 5
    saved = json.loads(file.read_text())
    assert len(saved["latencies"]) == 4
    assert saved["avg_latency"] == pytest.approx(sum(saved["latencies"]) / 4)
    assert list(saved["percentiles"]) == ["50", "90", "95", "99"]


def test_failures_are_told(capsys, service, tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "FAULT-status"}\n{"prompt": "FAULT-error", "max_tokens": 3}\n{"prompt": "a"}\n')
    code, out, err = run(capsys, "serve", "--url", service.url, "--dataset", str(file))
    assert code == 0
    figures = table(out)
    assert (figures["Successful requests"], figures["  http 503"], figures["  error in stream"]) == (1, 1, 1)
    assert "ringcore: http 503: status 503" in err
    file.write_text('{"prompt": "FAULT-status"}\n')
    code, _, _ = run(capsys, "throughput", "--url", service.url, "--dataset", str(file))
    assert code == 1  # nothing was measured


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["serve"], "give --model, or --url"),
        (["serve", "--url", "http://127.0.0.1:9", "--dtype", "float32"], "dtype: an option of an engine"),
        (["serve", "--url", "http://127.0.0.1:9", "--request-rate", "0"], "request_rate=0.0: give a number above 0"),
        (["serve", "--url", "http://127.0.0.1:9", "--goodput", "ttft"], "goodput='ttft'"),
        (["serve", "--url", "http://127.0.0.1:9", "--percentiles", "50,101"], "percentiles='50,101'"),
        (["serve", "--url", "http://127.0.0.1:9", "--json", "/no/such/x.json"], "there is no such folder"),
        (["latency", "--url", "http://127.0.0.1:9", "--batch-size", "0"], "batch_size=0: give at least 1"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_asked(capsys, args, says):
    code, _, err = run(capsys, *args)
    assert code == 2
    (line,) = err.splitlines()
    assert says in line


def test_without_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    code, _, err = run(capsys, "serve", "--url", "http://127.0.0.1:9")
    assert code == 2
    assert "url: needs aiohttp: pip install 'ringcore[bench]'" in err


def test_the_commands_of_the_guide(capsys, service, folder, tmp_path, monkeypatch):
    """As typed, with a service at another port, a model without weights, and fewer requests."""
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(folder)
    Path("requests.jsonl").write_text('{"prompt": "Water boils at", "max_tokens": 4}\n')
    commands = re.findall(r"^    (ringcore bench .*(?:\\\n.*)*)", GUIDE.read_text(), re.M)
    assert len(commands) >= 5
    for command in commands:
        args = shlex.split(command.replace("\\\n", " ").replace("http://127.0.0.1:8000", service.url))[2:]
        few = [] if "--dataset" in args or args[0] == "latency" else ["--num-prompts", "4"]
        few += ["--num-iters", "2", "--num-warmups", "0"] if args[0] == "latency" else []
        few += ["--prompt-tokens", "24", "--output-tokens", "4"]
        few += ["--prefix-tokens", "8"] if "--prefix-tokens" in args else []
        few += ["--request-rate", "400"] if "--request-rate" in args else []
        code, out, err = run(capsys, *args, *few, *(FAKE if "--model" in args else []))
        assert code == 0, (command, err)
        assert out, command
    assert Path("load.png").read_bytes().startswith(b"\x89PNG")
