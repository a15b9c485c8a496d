"""Arrival traces: arrival times and lengths of requests. JSONL, one request a line:

    {"time": 0.25, "prompt_tokens": 512, "output_tokens": 200}
    {"time": 0.31, "prompt_tokens": 900, "output_tokens": 40, "prefix_id": "support", "prefix_tokens": 600}
    {"time": 0.40, "prompt_tokens": 80, "output_tokens": 10, "priority": 1}

time: seconds from the start of the trace. prefix_id: requests with the same id share their first `prefix_tokens`
tokens; the whole prompt if that is omitted. priority: as a request's, lower first.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from ringcore.errors import InvalidRequestError
from ringcore.testing.jsonl import bad_line, read_jsonl

__all__ = ["NO_PREFIX", "Trace", "poisson_trace", "read_trace", "write_trace"]

NO_PREFIX = -1
MAX_TOKENS = 10**8  # of a prompt or an output; larger values mean a broken file


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    time: float
    prompt_tokens: int
    output_tokens: int
    prefix_id: str | None = None
    prefix_tokens: int | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in arrival order, as columns of equal length."""

    time_s: np.ndarray  # [n] float64, ascending
    prompt_tokens: np.ndarray  # [n] int64
    output_tokens: np.ndarray  # [n] int64
    prefix: np.ndarray  # [n] int64: an index into prefix_ids; -1 for none
    prefix_tokens: np.ndarray  # [n] int64: how many tokens are shared; 0 for none
    priority: np.ndarray  # [n] int64
    prefix_ids: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.time_s)

    def part(self, indices: np.ndarray) -> Trace:
        """The requests `indices`, in order."""
        return Trace(
            time_s=self.time_s[indices],
            prompt_tokens=self.prompt_tokens[indices],
            output_tokens=self.output_tokens[indices],
            prefix=self.prefix[indices],
            prefix_tokens=self.prefix_tokens[indices],
            priority=self.priority[indices],
            prefix_ids=self.prefix_ids,
        )


def read_trace(file: str | os.PathLike[str]) -> Trace:
    """The requests of a trace file, sorted by time; blank lines are skipped.

    Raises `InvalidRequestError` naming file, line and field.
    """
    where = f"trace {os.fspath(file)!r}"
    lines = [_checked(line, where, number) for number, line in read_jsonl(file, _Line, "trace")]
    if not lines:
        raise InvalidRequestError(f"{where}: has no requests", field="trace", value=os.fspath(file))
    return _as_columns(lines)


def _checked(line: _Line, where: str, number: int) -> _Line:
    if not 0 <= line.time < math.inf:
        raise bad_line(where, number, "time", f"is {line.time}; give seconds, 0 or more")
    for name, tokens in (("prompt_tokens", line.prompt_tokens), ("output_tokens", line.output_tokens)):
        if not 1 <= tokens <= MAX_TOKENS:
            raise bad_line(where, number, name, f"is {tokens}; give 1 to {MAX_TOKENS}")
    if line.prefix_tokens is not None:
        if line.prefix_id is None:
            raise bad_line(where, number, "prefix_tokens", "has no prefix_id; give the id of the shared prefix")
        if not 1 <= line.prefix_tokens <= line.prompt_tokens:
            most = f"1 to prompt_tokens, {line.prompt_tokens}"
            raise bad_line(where, number, "prefix_tokens", f"is {line.prefix_tokens}; give {most}")
    return line


def _as_columns(lines: list[_Line]) -> Trace:
    lines.sort(key=lambda line: line.time)
    index = {id_: i for i, id_ in enumerate(dict.fromkeys(x.prefix_id for x in lines if x.prefix_id is not None))}

    def column(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    return Trace(
        time_s=np.array([line.time for line in lines], dtype=np.float64),
        prompt_tokens=column([line.prompt_tokens for line in lines]),
        output_tokens=column([line.output_tokens for line in lines]),
        prefix=column([NO_PREFIX if x.prefix_id is None else index[x.prefix_id] for x in lines]),
        prefix_tokens=column([0 if x.prefix_id is None else x.prefix_tokens or x.prompt_tokens for x in lines]),
        priority=column([line.priority for line in lines]),
        prefix_ids=list(index),
    )


def write_trace(trace: Trace, file: str | os.PathLike[str]) -> None:
    """Writes a trace file for `read_trace`."""
    encoder = msgspec.json.Encoder()
    columns = (
        trace.time_s,
        trace.prompt_tokens,
        trace.output_tokens,
        trace.prefix,
        trace.prefix_tokens,
        trace.priority,
    )
    with Path(file).open("wb") as sink:
        for time_s, prompt, output, prefix, prefix_tokens, priority in zip(*(c.tolist() for c in columns), strict=True):
            has_prefix = prefix != NO_PREFIX
            line = _Line(
                time=time_s,
                prompt_tokens=prompt,
                output_tokens=output,
                prefix_id=trace.prefix_ids[prefix] if has_prefix else None,
                prefix_tokens=prefix_tokens if has_prefix else None,
                priority=priority,
            )
            sink.write(encoder.encode(line) + b"\n")


def poisson_trace(
    num_requests: int,
    requests_per_s: float,
    *,
    prompt_tokens: int = 500,
    output_tokens: int = 200,
    num_prefixes: int = 0,
    prefix_tokens: int = 0,
    seed: int = 0,
) -> Trace:
    """Poisson arrivals at a mean rate, with exponential prompt and output lengths of these means.

    With prefixes each request begins with one of `num_prefixes` prefixes of `prefix_tokens` tokens, chosen by Zipf's
    law; its own prompt tokens are added to it. Raises `InvalidRequestError`.
    """
    for name, value in (
        ("num_requests", num_requests),
        ("prompt_tokens", prompt_tokens),
        ("output_tokens", output_tokens),
    ):
        if value < 1:
            raise InvalidRequestError(f"{name}={value}: give at least 1", field=name, value=value)
    if not 0 < requests_per_s < math.inf:
        raise InvalidRequestError(
            f"requests_per_s={requests_per_s}: give a rate above 0", field="requests_per_s", value=requests_per_s
        )
    if (num_prefixes > 0) != (prefix_tokens > 0):
        raise InvalidRequestError(
            f"num_prefixes={num_prefixes} and prefix_tokens={prefix_tokens}: give both, or neither",
            field="prefix_tokens",
            value=prefix_tokens,
        )
    random = np.random.default_rng(seed)

    def lengths(mean: int) -> np.ndarray:
        return 1 + random.exponential(max(mean - 1, 0), num_requests).round().astype(np.int64)

    time_s = np.cumsum(random.exponential(1 / requests_per_s, num_requests))
    own, output = lengths(prompt_tokens), lengths(output_tokens)
    prefix = np.full(num_requests, NO_PREFIX, dtype=np.int64)
    if num_prefixes:
        weights = 1 / np.arange(1, num_prefixes + 1)
        prefix = random.choice(num_prefixes, num_requests, p=weights / weights.sum()).astype(np.int64)
    shared = np.full(num_requests, prefix_tokens, dtype=np.int64)
    return Trace(
        time_s=time_s,
        prompt_tokens=own + shared,
        output_tokens=output,
        prefix=prefix,
        prefix_tokens=shared,
        priority=np.zeros(num_requests, dtype=np.int64),
        prefix_ids=[f"prefix-{i}" for i in range(num_prefixes)],
    )
