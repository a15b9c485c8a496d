"""The page of models: what `ringcore models` says of every type, and what a run of every type has shown.

python -m benchmarks.models_page           writes the tables of docs/models.md from the results
python -m benchmarks.models_page --list    runs `ringcore models` first
python -m benchmarks.models_page --check   fails if the tables are not what the results say

Results are in benchmarks/results/models/: types.json is of `ringcore models`; every other file is of one machine, by
`pytest tests/e2e/test_any_causal_lm.py --all-types --seen FILE`, or by tests/gpu/test_any_causal_lm_on_cuda.py with
the same options. A run of some types, `-k "olmo2 or mamba"`, changes what FILE says of these.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.driver import ROOT, BenchmarkError
from benchmarks.result import write_json

__all__ = ["PAGE", "RESULTS", "Listing", "Seen", "SeenType", "is_current", "main", "note_seen", "read", "tables"]

PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "benchmarks" / "results" / "models"
_TYPES = "types.json"
_OPEN, _CLOSE = "<!-- models -->\n", "<!-- /models -->"
EQUAL = "equal"


class Listing(msgspec.Struct, frozen=True):
    """What `ringcore models` says."""

    transformers: str  # version
    types: list[dict[str, Any]]  # a row of `ringcore models --json` each, without what is empty


class SeenType(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was seen of a type in a tiny random form: "equal", or what else came of it; "" where it was not tried."""

    model_type: str
    commit: str = ""
    refused: str = ""  # the reason
    one_rank: str = ""
    error: float | None = None  # the largest difference of a log-probability from transformers'
    control: float | None = None  # the largest one where transformers runs with wrong boundaries of sequences
    preempted: str = ""
    two_ranks: str = ""


class Seen(msgspec.Struct, frozen=True):
    machine: dict[str, Any]
    date: str  # of the last type, ISO 8601
    command: str
    types: list[SeenType]


def read(path: Path, kind: type[Any]) -> Any:
    """Raises `BenchmarkError` naming the file where it is not of the kind."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchmarkError(f"{path}: not {kind.__name__} ({error})", path=str(path)) from error


def note_seen(path: Path, model_type: str, machine: Mapping[str, Any], command: str, facts: Mapping[str, Any]) -> None:
    """Adds facts of a type to those of the file, or to none."""
    rows = {row.model_type: row for row in read(path, Seen).types} if path.exists() else {}
    rows[model_type] = msgspec.structs.replace(rows.get(model_type, SeenType(model_type)), **facts)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_json(path, Seen(dict(machine), date, command, [rows[name] for name in sorted(rows)]))


def tables(listing: Listing, seen: Sequence[Seen]) -> str:
    """Markdown that ends in a newline."""
    served = [row for row in listing.types if row["model_impl"] != "refused"]
    refused = [row for row in listing.types if row["model_impl"] == "refused"]
    lines = [_summary(listing, len(served)), "", *map(_machine_line, seen), "", "## Served", ""]
    lines += _table(_served_columns(seen, any(row.get("fused") for row in served)), served)
    lines += ["", "## Refused", ""]
    lines += _table(_refused_columns(seen), refused)
    return "\n".join(lines) + "\n"


Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]  # header -> cell of a row of `ringcore models --json`


def _served_columns(seen: Sequence[Seen], has_fused: bool) -> Columns:
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "type": lambda row: f"`{row['model_type']}`",
        "by": lambda row: row["model_impl"],
        "KV cache": lambda row: ", ".join(row.get("kv_cache", [])),
        "attention": lambda row: ", ".join(kind for kind in row.get("attention", []) if kind not in _KINDS_OF_CACHE),
        "each of two ranks holds": _two_ranks,
        "CUDA graphs": lambda row: row.get("kept_from_graphs") or "yes",
        "GGUF": lambda row: row.get("gguf", ""),
    }
    if has_fused:
        columns["fused"] = lambda row: row.get("fused", "")
    return columns | _seen_columns(seen, _shown)


def _refused_columns(seen: Sequence[Seen]) -> Columns:
    columns: Columns = {
        "type": lambda row: f"`{row['model_type']}`",
        "why": lambda row: row["reason"].replace("|", r"\|"),
        "needs": lambda row: row["needs"],
        "planned": lambda row: "yes" if row.get("is_planned") else "no",
    }
    return {**columns, **_seen_columns(seen, lambda one: "refused" if one.refused else "served")}


_KINDS_OF_CACHE = ("sliding window",)


def _two_ranks(row: Mapping[str, Any]) -> str:
    if row.get("two_ranks_refused"):
        return f"refused: {row['two_ranks_refused']}"
    share = row.get("share_of_two")
    return "" if share is None else f"{share:.0%}"


def _seen_columns(seen: Sequence[Seen], shown: Callable[[SeenType], str]) -> Columns:
    def column(of_types: Mapping[str, SeenType]) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: shown(of_types[row["model_type"]]) if row["model_type"] in of_types else ""

    return {f"seen on {_name(one)}": column({row.model_type: row for row in one.types}) for one in seen}


def _shown(row: SeenType) -> str:
    if row.refused:
        return f"refused: {row.refused}"
    if row.one_rank != EQUAL:
        return f"**{row.one_rank}**"
    others = {"preempted": row.preempted, "two ranks": row.two_ranks}
    also = [name for name, state in others.items() if state == EQUAL]
    wrong = [f"{name} {state}" for name, state in others.items() if state == "failed"]
    numbers = f" ({row.error:.0e}; {row.control:.1f})" if row.error is not None and row.control is not None else ""
    return ", ".join([EQUAL, *also, *(f"**{state}**" for state in wrong)]) + numbers


def _name(seen: Seen) -> str:
    gpus = seen.machine.get("gpus") or []
    return gpus[0].split(",")[0].removeprefix("NVIDIA ") if gpus else "a CPU"


def _summary(listing: Listing, num_served: int) -> str:
    counts = {kind: sum(row["model_impl"] == kind for row in listing.types) for kind in ("native", "transformers")}
    return (
        f"Of {len(listing.types)} types of transformers {listing.transformers}, {num_served} are served, "
        f"{counts['native']} of them by a native class; {len(listing.types) - num_served} are refused."
    )


def _machine_line(seen: Seen) -> str:
    machine, packages = seen.machine, seen.machine["packages"]
    equal = sum(row.one_rank == EQUAL for row in seen.types)
    ranks = sum(row.two_ranks == EQUAL for row in seen.types)
    commits = ", ".join(sorted({row.commit for row in seen.types}))
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages)
    return (
        f"- On {_name(seen)}: {equal} equal, {ranks} of them also on two ranks; {machine['cpu']}, "
        f"{machine['cores']} cores, Python {machine['python']}, {versions}. {seen.date[:10]}, commit {commits}: "
        f"`{seen.command}`"
    )


def _table(columns: Columns, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    lines = [list(columns), ["---"] * len(columns), *cells]
    return [f"| {' | '.join(line)} |" for line in lines]


def _written(page: str, results: Path) -> str:
    """The page with its tables rendered anew. Raises `BenchmarkError` where it has no place for them."""
    head, opened, rest = page.partition(_OPEN)
    _, closed, tail = rest.partition(_CLOSE)
    if not (opened and closed):
        raise BenchmarkError(f"the page has no lines {_OPEN.strip()} and {_CLOSE}")
    files = sorted(path for path in results.glob("*.json") if path.name != _TYPES)
    body = tables(read(results / _TYPES, Listing), [read(path, Seen) for path in files])
    return head + opened + body + closed + tail


def is_current(page: Path = PAGE, results: Path = RESULTS) -> bool:
    return page.read_text() == _written(page.read_text(), results)


def _list(results: Path) -> None:
    rows = []
    command = [sys.executable, "-m", "ringcore.cli", "models", "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        rows = [{name: value for name, value in json.loads(line).items() if value} for line in program.stdout]
    if program.returncode:
        raise BenchmarkError(f"{' '.join(command[1:])}: exit code {program.returncode}")
    from importlib.metadata import version

    write_json(results / _TYPES, Listing(version("transformers"), sorted(rows, key=lambda row: row["model_type"])))


def main(arguments: Sequence[str]) -> int:
    description = "Writes the tables of the page of models."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models_page", description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the tables are not up to date")
    parser.add_argument("--list", action="store_true", help="run `ringcore models` anew, which takes some minutes")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the results are")
    parser.add_argument("page", type=Path, nargs="?", default=PAGE)
    options = parser.parse_args(arguments)
    if options.list:
        _list(options.results)
    if is_current(options.page, options.results):
        return 0
    if options.check:
        print(f"{options.page}: tables are not what the results say; run `python -m benchmarks.models_page`")
        return 1
    options.page.write_text(_written(options.page.read_text(), options.results))
    print(f"{options.page}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
