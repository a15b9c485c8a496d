"""A step: put together by the scheduler, then in flight until the workers' answer is taken in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ringcore.protocol import NewRequest, SchedulerOutput, int_array
from ringcore.scheduler.request import Request, RequestStatus

__all__ = ["Share", "StepInFlight", "StepPlan", "tokens_reached"]


class Share(NamedTuple):
    """One request's part of a step, as it was when the step was scheduled."""

    request: Request
    epoch: int
    row: int
    num_tokens: int
    num_computed_tokens: int  # after the step
    samples: bool

    @property
    def is_void(self) -> bool:
        """Whether the request was preempted or has ended since."""
        return self.epoch != self.request.epoch


class StepInFlight(NamedTuple):
    step: int
    shares: list[Share]

    def check(self, max_num_batched_tokens: int) -> None:
        num_tokens = sum(share.num_tokens for share in self.shares)
        assert 0 < num_tokens <= max_num_batched_tokens, f"step {self.step} has {num_tokens} tokens"
        assert len({share.row for share in self.shares}) == len(self.shares), f"step {self.step} has a row twice"


def tokens_reached(steps: Iterable[StepInFlight]) -> dict[str, int]:
    """The computed tokens of each unfinished request in these steps after the last of them, by request id.

    One that was preempted since its step was scheduled is among them: the workers execute the step all the same.
    """
    reached: dict[str, int] = {}
    for share in (share for step in steps for share in step.shares):
        if share.request.status is not RequestStatus.FINISHED:
            request_id = share.request.request_id
            reached[request_id] = max(reached.get(request_id, 0), share.num_computed_tokens)
    return reached


@dataclass(slots=True)
class StepPlan:
    """What goes into a step, within `token_budget`: what is left of it, in tokens."""

    token_budget: int
    shares: list[Share] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)
    new_block_rows: list[int] = field(default_factory=list)
    new_block_ids: list[int] = field(default_factory=list)

    def add(self, request: Request, num_tokens: int) -> None:
        """Gives the request's next `num_tokens` a place, and counts as done what the step will have done."""
        assert request.row is not None
        assert 0 < num_tokens <= self.token_budget
        request.num_computed_tokens += num_tokens
        samples = request.num_computed_tokens == request.num_total_tokens
        request.num_pending += samples
        self.token_budget -= num_tokens
        self.shares.append(Share(request, request.epoch, request.row, num_tokens, request.num_computed_tokens, samples))

    def append_blocks(self, request: Request, block_ids: list[int]) -> None:
        assert request.row is not None
        self.new_block_rows += [request.row] * len(block_ids)
        self.new_block_ids += block_ids

    def to_output(self, step: int, finished_rows: list[int]) -> SchedulerOutput:
        return SchedulerOutput(
            step=step,
            finished_rows=int_array(finished_rows),
            new_requests=self.new_requests,
            new_block_rows=int_array(self.new_block_rows),
            new_block_ids=int_array(self.new_block_ids),
            rows=int_array([share.row for share in self.shares]),
            num_scheduled_tokens=int_array([share.num_tokens for share in self.shares]),
        )
