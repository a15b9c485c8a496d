"""The benchmarks' command line.

python -m benchmarks                                          lists the benchmarks
python -m benchmarks throughput --peer vllm=PYTHON            runs one beside a peer, PYTHON being its interpreter
python -m benchmarks startup --json benchmarks/results/startup.json
python -m benchmarks report                                   writes the tables and the chart of the documents
python -m benchmarks report --check                           fails if they are not up to date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import BENCHMARKS, report
from benchmarks.harness import PEER_MODES, PEERS, Plan, engine_specs, load_benchmark, run_benchmark
from benchmarks.machine import shown_path
from benchmarks.result import Result, merge_results, read_result, with_condition, write_result
from ringcore.errors import RingcoreError

DEFAULT_MODEL = Path("~/.cache/ringcore/smollm2-135m")


def main(arguments: Sequence[str]) -> int:
    try:
        match list(arguments):
            case [] | ["-h" | "--help"]:
                print(__doc__, _listing(), sep="\n")
                return 0
            case ["report", *options]:
                return _report(options)
            case [name, *options]:
                return _run(name, options)
    except RingcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    raise AssertionError("argument lists are empty or have a first element")


def _listing() -> str:
    lines = ["Benchmarks (`python -m benchmarks NAME --help` for the options of one):"]
    return "\n".join(lines + [f"  {name:<14}{_description(name)}" for name in BENCHMARKS])


def _description(name: str) -> str:
    return (load_benchmark(name).__doc__ or "").strip().splitlines()[0]


def _run(name: str, arguments: Sequence[str]) -> int:
    benchmark = load_benchmark(name)
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=_description(name))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result, every sample, to FILE")
    parser.add_argument("--merge", action="store_true", help="keep what FILE holds and this run does not measure again")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="vllm, transformers or llama_cpp, with the interpreter of its environment; may be repeated",
    )
    parser.add_argument(
        "--peer-env",
        action="append",
        default=[],
        metavar="NAME:VARIABLE=VALUE",
        help="a setting for a peer's environment, e.g. to let it use every core; may be repeated",
    )
    parser.add_argument("--peer-mode", choices=PEER_MODES, default="eager", help="how vllm runs (default: eager)")
    parser.add_argument(
        "--rounds",
        "--blocks",
        type=int,
        default=benchmark.default_rounds,
        help=f"counted rounds, after what warms up (default: {benchmark.default_rounds})",
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help=f"a model folder (default: {DEFAULT_MODEL})")
    parser.add_argument("--commit", metavar="HASH", help="the commit of the code, where it is a copy without git")
    parser.add_argument("--beside", metavar="TEXT", help="what else ran on the machine meanwhile; told with the result")
    benchmark.add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: give at least 1")
    model = options.model.expanduser().absolute()
    if benchmark.needs_model and not model.is_dir():
        parser.error(f"--model {options.model}: no such folder; `make setup` makes the default one")
    specs = engine_specs(options.peer, options.peer_mode, options.peer_env)
    plan = Plan(specs, model, options.rounds, options)
    old = read_result(options.json) if options.merge and options.json is not None and options.json.exists() else None

    def with_beside(result: Result) -> Result:
        return with_condition(result, f"Meanwhile on this machine: {options.beside}.") if options.beside else result

    def write(result: Result) -> None:
        if options.json is not None:
            result = with_beside(result)
            write_result(options.json, result if old is None else merge_results(old, result))

    result = run_benchmark(name, plan, _shown_command(name, arguments), options.commit, write)
    print(report.render(with_beside(result)), end="")
    return 0


def _shown_command(name: str, arguments: Sequence[str]) -> str:
    """The command as others can give it: where this machine keeps its environments and results is nobody's matter."""
    shown = ["python -m benchmarks", name]
    for argument in arguments:
        head, equals, value = argument.rpartition("=")
        if "/" not in value:
            shown.append(argument)
        elif head.removeprefix("--peer=") in PEERS:
            shown.append(f"{head}=PYTHON")
        else:
            shown.append(head + equals + shown_path(value))
    return " ".join(shown)


def _report(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks report", description="Writes the tables and the chart of the documents."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is not up to date")
    parser.add_argument("--results", type=Path, default=report.RESULTS, metavar="DIR", help="where the results are")
    parser.add_argument(
        "documents",
        type=Path,
        nargs="*",
        default=list(report.DOCUMENTS),
        help="default: README.md, RESULTS.md, the chart",
    )
    options = parser.parse_args(arguments)
    results = report.read_results(options.results)
    if options.check:
        stale = report.outdated(options.documents, results)
        for path in stale:
            print(f"{shown_path(path)}: tables are not what the results say; run `python -m benchmarks report`")
        return 1 if stale else 0
    for path in report.update(options.documents, results):
        print(f"{shown_path(path)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
