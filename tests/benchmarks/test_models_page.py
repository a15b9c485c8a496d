"""The page of models is what the results say."""

from __future__ import annotations

import pytest

from benchmarks import models_page
from benchmarks.driver import BenchmarkError
from benchmarks.models_page import Listing, Seen, note_seen, read
from benchmarks.result import write_json

MACHINE = {"cpu": "a CPU of ours", "cores": 2, "python": "3.11", "packages": {"torch": "2.13", "transformers": "5.23"}}
GPU = MACHINE | {"gpus": ["NVIDIA H200, 143771 MiB, 570, 1980 MHz, 3201 MHz"]}
TYPES = [
    {
        "model_type": "gemma2",
        "model_impl": "transformers",
        "kv_cache": ["full", "sliding window"],
        "attention": ["sliding window", "softcap"],
        "tensor_parallel": True,
        "share_of_two": 0.5,
    },
    {"model_type": "flint", "model_impl": "transformers", "two_ranks_refused": "its sinks"},
    {"model_type": "llama", "model_impl": "native", "gguf": "llama", "kept_from_graphs": "it asks the host"},
    {"model_type": "mamba", "model_impl": "refused", "reason": "in a|b", "needs": "state layers", "is_planned": True},
    {"model_type": "bloom", "model_impl": "refused", "reason": "its own", "needs": "an interface"},
]


@pytest.fixture
def results(tmp_path):
    write_json(tmp_path / "types.json", Listing("5.23", TYPES))
    return tmp_path


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "models.md"
    path.write_text("# Models\n\n<!-- models -->\nold\n<!-- /models -->\n\nAfter.\n")
    return path


def rows(page) -> dict[str, list[str]]:
    lines = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").replace(r"\|", "/").split("|")] for line in lines]
    return {first.strip("`"): rest for first, *rest in cells}


def run(page, results, *options) -> int:
    return models_page.main([*options, "--results", str(results), str(page)])


def test_the_tables_say_what_becomes_of_each_type(page, results):
    assert run(page, results) == 0
    assert page.read_text().startswith(
        "# Models\n\n<!-- models -->\nOf 5 types of transformers 5.23, 3 are served, 1 of"
    )
    assert page.read_text().endswith("<!-- /models -->\n\nAfter.\n")
    assert rows(page) == {
        "gemma2": ["transformers", "full, sliding window", "softcap", "50%", "yes", ""],
        "flint": ["transformers", "", "", "refused: its sinks", "yes", ""],
        "llama": ["native", "", "", "", "it asks the host", "llama"],
        "mamba": ["in a/b", "state layers", "yes"],
        "bloom": ["its own", "an interface", "no"],
    }


def test_what_was_seen_on_each_machine(page, results):
    equal = {"one_rank": "equal", "error": 2e-6, "control": 3.14, "commit": "abc"}
    note_seen(results / "cpu.json", "gemma2", MACHINE, "pytest --all-types", {"one_rank": "failed"})
    note_seen(results / "cpu.json", "gemma2", MACHINE, "pytest --all-types", equal)
    note_seen(results / "cpu.json", "gemma2", MACHINE, "pytest --all-types", {"preempted": "equal"})
    note_seen(results / "cpu.json", "llama", MACHINE, "pytest --all-types", equal | {"two_ranks": "failed"})
    note_seen(results / "cpu.json", "mamba", MACHINE, "pytest --all-types", {"refused": "why"})
    note_seen(results / "h200.json", "flint", GPU, "pytest --all-types", {"one_rank": "failed"})
    run(page, results)
    assert {name: cells[-2:] for name, cells in rows(page).items()} == {
        "gemma2": ["equal, preempted (2e-06; 3.1)", ""],
        "flint": ["", "**failed**"],
        "llama": ["equal, **two ranks failed** (2e-06; 3.1)", ""],
        "mamba": ["refused", ""],
        "bloom": ["", ""],
    }
    assert "- On a CPU: 2 equal, 0 of them also on two ranks; a CPU of ours, 2 cores" in page.read_text()
    assert "- On H200: 0 equal" in page.read_text()


def test_a_page_that_is_not_what_the_results_say_is_found(page, results, capsys):
    old = page.read_text()
    assert run(page, results, "--check") == 1
    assert "tables are not what the results say" in capsys.readouterr().out
    assert page.read_text() == old
    run(page, results)
    assert run(page, results, "--check") == 0
    note_seen(results / "cpu.json", "gemma2", MACHINE, "pytest", {"one_rank": "equal"})
    assert run(page, results, "--check") == 1


def test_how_much_is_ours_has_a_column_where_it_is_known(page, results):
    write_json(results / "types.json", Listing("5.23", [TYPES[0] | {"fused": "all but the experts"}]))
    run(page, results)
    assert rows(page)["gemma2"][-1] == "all but the experts"


def test_broken_files_are_named(page, results):
    (results / "cpu.json").write_text("{}")
    with pytest.raises(BenchmarkError, match=r"cpu\.json: not Seen"):
        run(page, results)
    page.write_text("no place")
    with pytest.raises(BenchmarkError, match="no lines"):
        run(page, results)


def test_notes_are_kept_in_the_order_of_types(results):
    for name in ("olmo2", "afmoe"):
        note_seen(results / "cpu.json", name, MACHINE, "pytest", {"one_rank": "equal"})
    assert [row.model_type for row in read(results / "cpu.json", Seen).types] == ["afmoe", "olmo2"]


def test_the_page_of_this_project_is_current():
    assert models_page.is_current()
