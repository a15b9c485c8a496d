"""The output of a step, or of several, from what their rows sampled."""

from __future__ import annotations

import numpy as np
import pytest

from ringcore.protocol.codec import int_array
from ringcore.protocol.requests import TokenLogprobs
from ringcore.protocol.steps import ModelRunnerOutput, RowError
from ringcore.worker.logits.step_output import SampledRows, make_output

ROWS = int_array([4, 2, 7])


def logprobs(*token_ids: int | None) -> list[TokenLogprobs | None]:
    return [None if token_id is None else TokenLogprobs([token_id], [-1.0], [1]) for token_id in token_ids]


def plain(output: ModelRunnerOutput) -> tuple:
    """Rows, tokens, whose logprobs, and how many of each row."""
    named = output.logprobs and [one and one.token_ids[0] for one in output.logprobs]
    lists = [column if column is None else column.tolist() for column in (output.rows, output.num_gained)]
    return lists[0], output.token_ids.tolist(), named, lists[1]


@pytest.mark.parametrize("failing", [False, True])
def test_one_token_each(failing: bool) -> None:
    step = SampledRows(ROWS, int_array([10, 11, 12]), logprobs(10, None, 12))
    output = make_output(5, 3, [step], {2: RowError(2, "bad")} if failing else {})
    assert output.step == 5
    assert [error.row for error in output.row_errors] == [2] * failing
    expected = ([4, 7], [10, 12], [10, 12], None) if failing else (None, [10, 11, 12], [10, None, 12], None)
    assert plain(output) == expected


@pytest.mark.parametrize("failing", [False, True])
def test_several_steps(failing: bool) -> None:
    steps = [
        SampledRows(ROWS, int_array([10, 11, 12]), logprobs(10, None, 12)),
        SampledRows(ROWS, int_array([20, 21, 22]), logprobs(20, None, 22)),
    ]
    output = make_output(5, 3, steps, {2: RowError(2, "bad")} if failing else {})
    if failing:
        assert plain(output) == ([4, 7], [10, 20, 12, 22], [10, 20, 12, 22], None)
    else:
        assert plain(output) == (None, [10, 20, 11, 21, 12, 22], [10, 20, None, None, 12, 22], None)


@pytest.mark.parametrize("failing", [False, True])
def test_a_number_of_tokens_for_each_row(failing: bool) -> None:
    named = logprobs(10, 11, None, 13, 14, 15)
    step = SampledRows(ROWS, int_array([10, 11, 12, 13, 14, 15]), named, num_gained=np.array([2, 1, 3]))
    output = make_output(5, 4, [step], {2: RowError(2, "bad")} if failing else {})
    if failing:
        assert plain(output) == ([4, 7], [10, 11, 13, 14, 15], [10, 11, 13, 14, 15], [2, 3])
    else:
        assert plain(output) == ([4, 2, 7], [10, 11, 12, 13, 14, 15], [10, 11, None, 13, 14, 15], [2, 1, 3])
    assert output.num_gained is not None
    assert output.num_gained.dtype == np.int32


def test_nothing_sampled() -> None:
    assert plain(make_output(5, 0, [], {})) == (None, [], None, None)
