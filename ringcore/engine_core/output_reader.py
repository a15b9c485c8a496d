"""Columns of outputs, request by request again."""

from __future__ import annotations

import numpy as np

from ringcore.protocol import EngineCoreOutput, EngineStats, OutputColumns, StartedRequest, TokenLogprobs

__all__ = ["OutputReader", "output_columns"]


class OutputReader:
    """Reads every `OutputColumns` of one engine, in their order: it keeps which request each row stands for."""

    def __init__(self) -> None:
        self._started: dict[int, StartedRequest] = {}  # by row

    def read(self, columns: OutputColumns) -> list[EngineCoreOutput]:
        """What each request gained, those that ended last."""
        for started in columns.started:
            self._started[started.row] = started
        rows, token_ids, logprobs = columns.rows.tolist(), columns.token_ids.tolist(), columns.logprobs
        num_steps = len(token_ids) // max(len(rows), 1)
        outputs = []
        for index, row in enumerate(rows):
            new = slice(index * num_steps, (index + 1) * num_steps)
            outputs.append(self._output(self._started[row], token_ids[new], logprobs and logprobs[new]))
        return outputs + columns.others

    def _output(
        self, started: StartedRequest, token_ids: list[int], logprobs: list[TokenLogprobs | None] | None
    ) -> EngineCoreOutput:
        return EngineCoreOutput(
            request_id=started.request_id,
            new_token_ids=token_ids,
            logprobs=[one for one in logprobs if one is not None] or None if logprobs else None,
            num_cached_tokens=started.num_cached_tokens,
            first_scheduled_s=started.first_scheduled_s,
            num_preemptions=started.num_preemptions,
        )


def output_columns(others: list[EngineCoreOutput], stats: EngineStats) -> OutputColumns:
    """Outputs that came of no step."""
    return OutputColumns([], _NONE, _NONE, None, others, stats)


_NONE = np.zeros(0, dtype=np.int32)
