"""`ringcore batch`: a file of requests in, a file of results out."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringcore.batch.options import BatchOptions
from ringcore.cli.options import Progress, batch_options, engine_options, given, none_or, sampling_options, with_options
from ringcore.errors import RingcoreError

if TYPE_CHECKING:
    from ringcore.batch import BatchSummary

__all__ = ["make_batch"]

_CANNOT_RUN = 2


def make_batch() -> Callable[..., None]:
    """The command, with a flag for every option of the job, of the engine, and of the sampling of plain lines."""
    return with_options(batch, [*batch_options(), *sampling_options(), *engine_options()])


def batch(
    input: Annotated[str, typer.Argument(help="a JSONL file, may be .gz or .zst, or a URL")],
    output: Annotated[str, typer.Argument(help="where results go; .gz or .zst compresses them")],
    resume: Annotated[bool, typer.Option("--resume", help="continue a job that was begun")] = False,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help='what "model" of a body may say; repeat it for more names')
    ] = None,
    tool_call_parser: Annotated[str, typer.Option(help="as of 'ringcore serve'")] = "auto",
    reasoning_parser: Annotated[str, typer.Option(help="as of 'ringcore serve'")] = "auto",
    status: Annotated[Path | None, typer.Option(help="a JSON file with the job's state, always whole")] = None,
    chart: Annotated[Path | None, typer.Option(help="a PNG of throughput and KV cache use, at the end")] = None,
    progress: Progress = None,
    **options: Any,
) -> None:
    """Answers every line of a file, and loses none whatever happens.

    A line is a request in OpenAI's batch form (custom_id, method, url, body), or a plain one: prompt, prompt_token_ids
    or messages, and sampling parameters. Every result is appended whole, a journal beside the output tells what is
    done, and --resume continues after any end. A line that is wrong has an error record, and costs no other.

    Ctrl-C or SIGTERM lets requests in flight finish; a second one does not wait. Exit code 0 if every request
    succeeded, 1 if some failed, 2 if the job cannot run, 130 or 143 after Ctrl-C or SIGTERM.

    Examples:

    \b
      ringcore batch requests.jsonl results.jsonl --model path/to/model
      ringcore batch requests.jsonl results.jsonl --model path/to/model --resume
      ringcore batch requests.jsonl results.jsonl --model path/to/model --status status.json --chart chart.png
      ringcore batch requests.jsonl results.jsonl --model path/to/model --ray auto --data-parallel 4
    """
    from ringcore.batch.api import run_job

    try:
        job = BatchOptions(
            served_model_names=tuple(served_model_name or ()),
            tool_call_parser=none_or(tool_call_parser),
            reasoning_parser=none_or(reasoning_parser),
            **given(options, batch_options()),
        )
        if job.ray is not None:
            sys.stdout = sys.stderr  # where Ray's driver tells of lost nodes
        summary = run_job(
            input,
            output,
            given(options, engine_options()),
            job,
            sampling=given(options, sampling_options()),
            resume=resume,
            status=status,
            chart=chart,
            shows_progress=sys.stderr.isatty() if progress is None else progress,
            signals=(signal.SIGINT, signal.SIGTERM),
            on_second_signal=os._exit,  # files are whole at any moment, and child processes end with this one
        )
    except KeyboardInterrupt:  # before it runs
        sys.exit(128 + signal.SIGINT)
    except RingcoreError as error:
        print(f"ringcore: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(_CANNOT_RUN)
    _report(summary)
    sys.exit(summary.exit_code)


def _report(summary: BatchSummary) -> None:
    """On stderr: stdout is a pipeline's."""
    left = summary.num_requests - summary.num_done
    lines = [
        f"{summary.output}: {summary.num_done:,} of {summary.num_requests:,} requests done, {summary.num_failed:,} of "
        f"them failed{f'; {left:,} are left for --resume' if left else ''}",
        f"{summary.prompt_tokens:,} prompt and {summary.output_tokens:,} output tokens in all; this run took "
        f"{summary.elapsed_s:,.1f} s, {summary.cache_hit_rate:.0%} of its prompt tokens were cached",
    ]
    names = {"ttft_s": "to the first token", "e2e_s": "to the last token", "queue_s": "in the queue"}
    for name, quantiles in summary.percentiles.items():
        shown = ", ".join(f"{quantile} {seconds:.3g} s" for quantile, seconds in quantiles.items())
        lines.append(f"{names[name]}: {shown}")
    if summary.num_engine_restarts:
        lines.append(f"engines that died were replaced {summary.num_engine_restarts} times")
    for line in lines:
        print(f"ringcore: {line}", file=sys.stderr)
