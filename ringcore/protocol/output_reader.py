"""Converts `OutputColumns` into outputs per request, and splits columns that exceed a message."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from ringcore.protocol.requests import EngineCoreOutput, EngineStats, OutputColumns, StartedRequest, TokenLogprobs

__all__ = ["OutputReader", "output_columns", "split_into_messages"]

_ENTRIES_PER_MESSAGE = 1 << 20  # up to 20 MB; a message has at most 64 MiB


class OutputReader:
    """Reads every `OutputColumns` of one engine, in order; it keeps the mapping from rows to requests."""

    def __init__(self) -> None:
        self._started: dict[int, StartedRequest] = {}  # by row

    def read(self, columns: OutputColumns) -> list[EngineCoreOutput]:
        """The outputs of each request; requests that ended come last."""
        for started in columns.started:
            self._started[started.row] = started
        rows, token_ids, logprobs = columns.rows.tolist(), columns.token_ids.tolist(), columns.logprobs
        starts = map(self._started.__getitem__, rows)
        if logprobs is None and columns.num_gained is None and len(rows) == len(token_ids):  # the common case
            outputs = [_output(started, [one], None) for started, one in zip(starts, token_ids, strict=True)]
        else:
            outputs, end = [], 0
            for started, num_gained in zip(starts, _num_gained(columns), strict=True):
                begin, end = end, end + num_gained
                outputs.append(_output(started, token_ids[begin:end], logprobs and logprobs[begin:end]))
        for one in columns.prompt_logprobs:
            index = rows.index(one.row)
            outputs[index] = msgspec.structs.replace(outputs[index], prompt_logprobs=one)
        for pooled in columns.pooled:
            index = rows.index(pooled.row)
            outputs[index] = msgspec.structs.replace(outputs[index], pooled=pooled)
        return outputs + columns.others


def _output(
    started: StartedRequest, token_ids: list[int], logprobs: list[TokenLogprobs | None] | None
) -> EngineCoreOutput:
    given = [one for one in logprobs if one is not None] or None if logprobs else None
    return EngineCoreOutput(
        started.request_id,
        token_ids,
        given,
        None,
        None,
        started.num_cached_tokens,
        started.first_scheduled_s,
        started.num_preemptions,
    )


def split_into_messages(columns: OutputColumns) -> Iterator[OutputColumns]:
    """Equivalent columns, each small enough for one message; only log-probabilities over large vocabularies, and many
    pooled prompts, need more than one.
    """
    if _num_entries(columns) <= _ENTRIES_PER_MESSAGE:
        yield columns
        return
    yield msgspec.structs.replace(
        columns, rows=_NONE, token_ids=_NONE, logprobs=None, others=[], prompt_logprobs=[], num_gained=None, pooled=[]
    )
    end = 0
    for index, (row, num_gained) in enumerate(zip(columns.rows.tolist(), _num_gained(columns), strict=True)):
        begin, end = end, end + num_gained
        yield msgspec.structs.replace(
            columns,
            started=[],
            rows=columns.rows[index : index + 1],
            token_ids=columns.token_ids[begin:end],
            logprobs=columns.logprobs and columns.logprobs[begin:end],
            others=[],
            prompt_logprobs=[one for one in columns.prompt_logprobs if one.row == row],
            num_gained=None,
            pooled=[one for one in columns.pooled if one.row == row],
        )
    for other in columns.others:
        yield output_columns([other], columns.stats)


def _num_gained(columns: OutputColumns) -> list[int]:
    """The number of new tokens of each row."""
    num_rows = len(columns.rows)
    if columns.num_gained is None:
        return [len(columns.token_ids) // max(num_rows, 1)] * num_rows
    num_gained: list[int] = columns.num_gained.tolist()
    return num_gained


def _num_entries(columns: OutputColumns) -> int:
    """Number of log-probability entries of prompts and completions, and of pooled numbers."""
    positions = [one for one in columns.logprobs or () if one is not None]
    prompts, pooled = list(columns.prompt_logprobs), list(columns.pooled)
    for other in columns.others:
        positions += other.logprobs or ()
        prompts += [other.prompt_logprobs] if other.prompt_logprobs is not None else []
        pooled += [other.pooled] if other.pooled is not None else []
    num_logprobs = sum(len(one.token_ids) for one in positions) + sum(len(one.token_ids) for one in prompts)
    return num_logprobs + sum(len(one.values) for one in pooled)


def output_columns(others: list[EngineCoreOutput], stats: EngineStats) -> OutputColumns:
    """Columns with outputs that no step produced."""
    return OutputColumns([], _NONE, _NONE, None, others, stats)


_NONE = np.zeros(0, dtype=np.int32)
