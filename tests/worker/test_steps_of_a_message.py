"""A message's steps: which of them a wait reads, and when the message is done."""

from __future__ import annotations

import numpy as np

from ringcore.worker.logits.step_output import SampledRows
from ringcore.worker.runner.step_launcher import LaunchedSteps


class Step:
    """Row 3 samples `token`."""

    def __init__(self, token: int) -> None:
        self._token = token
        self.is_done, self.num_reads = False, 0

    def done(self) -> bool:
        return self.is_done

    def read(self) -> None:
        self.num_reads += 1

    def sampled(self) -> SampledRows:
        assert self.num_reads, "not read"
        return SampledRows(np.array([3], dtype=np.int32), np.array([self._token], dtype=np.int32), None)


def launched(steps: list[Step], *, is_output_rank: bool = True) -> LaunchedSteps:
    message = LaunchedSteps(8, 1, is_output_rank)
    message.launched += steps
    return message


def test_it_is_done_with_its_last_step() -> None:
    steps = [Step(5), Step(6)]
    message = launched(steps)
    steps[0].is_done = True
    assert not message.done()
    steps[1].is_done = True
    assert message.done()
    assert launched([]).done()


def test_the_first_ones_are_read() -> None:
    steps = [Step(5), Step(6), Step(7)]
    message = launched(steps)
    for count, reads in ((-2, [0, 0, 0]), (0, [0, 0, 0]), (1, [1, 0, 0]), (2, [2, 1, 0])):
        message.read(count)
        assert [step.num_reads for step in steps] == reads


def test_the_result_is_of_all() -> None:
    output = launched([Step(5), Step(6)]).result()
    assert output is not None
    assert (output.step, output.rows, output.token_ids.tolist()) == (8, None, [5, 6])


def test_a_rank_without_output_waits_too() -> None:
    """What reading does to its pages, and the device's failure, are its own."""
    steps = [Step(5), Step(6)]
    assert launched(steps, is_output_rank=False).result() is None
    assert [step.num_reads for step in steps] == [1, 1]
