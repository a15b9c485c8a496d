"""Quarantine: finds the poison request that kills the workers by running each suspect alone, one after the other.

When the workers die, every request with tokens in a step in flight is a suspect. Once new workers have started:

    state of a request       suspect  runs
    neighbour                no       no    it ran, or was queued before a suspect, when the workers died
    awaits its trial         yes      no
    on trial                 yes      yes   alone in its steps, up to its target
    cleared                  no       no    it has computed all tokens of the steps that died, and the workers live

A suspect on trial that kills the workers has killed them twice, the second time alone in the batch: it is refused. All
other requests wait in the order in which they ran, and run together again in that order when no suspect is left.

No other request's step is in flight during a trial. So a trial begins only when no step is in flight (a request aborted
on trial leaves one), and stops at its target: the step that clears the suspect is its last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ringcore.scheduler.request import Request, RequestStatus
from ringcore.scheduler.request_queue import RequestQueue
from ringcore.scheduler.running_table import RunningTable
from ringcore.scheduler.step import StepInFlight

__all__ = ["Quarantine", "trial_targets"]


class Quarantine:
    """The requests held until the trials end, the suspects among them, and the suspect on trial. While it is not open,
    requests go to the queue `waiting`.

    Invariant: the keys of `_targets` are the suspects, all of them in `_held`; `on_trial` is one of them or None. The
    suspect on trial stays in `_held`, in its place.
    """

    def __init__(self, waiting: RequestQueue) -> None:
        self._waiting = waiting
        self._held: dict[str, Request] = {}  # in the order of admission
        self._targets: dict[str, int] = {}  # tokens that must be confirmed to be cleared, by request id
        self.on_trial: Request | None = None

    @property
    def is_open(self) -> bool:
        """Whether a suspect is left. If so, only the suspect on trial runs."""
        return bool(self._targets)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    def open(self, targets: Mapping[str, int]) -> None:
        """Begins with these suspects, if any, by their targets. All are in the waiting queue, and no request is held.

        Holds every request from the front of the queue to the last suspect, which keeps their order.
        """
        assert not self._held, "a quarantine ends before the next one"
        self._targets = dict(targets)
        missing = set(targets)
        while missing:
            request = self._waiting.pop()
            self._held[request.request_id] = request
            missing.discard(request.request_id)

    def requeue(self, request: Request) -> None:
        """Puts a preempted request back into the waiting queue; a held one stays held."""
        if request.request_id not in self._held:
            self._waiting.add(request)

    def begin_trial(self) -> Request:
        """Puts the oldest suspect on trial."""
        assert self.on_trial is None
        self.on_trial = next(request for request in self._held.values() if request.request_id in self._targets)
        return self.on_trial

    def interrupt_trial(self) -> None:
        """The trial must begin again: the workers died while the suspect was in no step."""
        self.on_trial = None

    def num_tokens_left(self, num_computed_tokens: int) -> int:
        """Tokens from `num_computed_tokens` to the target of the suspect on trial."""
        assert self.on_trial is not None
        return max(self._targets[self.on_trial.request_id] - num_computed_tokens, 0)

    def clear(self, num_confirmed_tokens: int) -> Request | None:
        """Clears the suspect on trial if its confirmed tokens reach its target; it stays held."""
        suspect = self.on_trial
        if suspect is None or num_confirmed_tokens < self._targets[suspect.request_id]:
            return None
        self.on_trial = None
        del self._targets[suspect.request_id]
        return suspect

    def discard(self, request: Request) -> None:
        """Removes a finished request, in any state."""
        if self.on_trial is request:
            self.on_trial = None
        self._held.pop(request.request_id, None)
        self._targets.pop(request.request_id, None)

    def release(self) -> None:
        """Puts all held requests back into the waiting queue; no suspect is left."""
        assert not self.is_open
        while self._held:
            self._waiting.add(self._held.popitem()[1])

    def check(self, running: RunningTable, in_flight: Collection[int]) -> None:
        """Asserts the invariants. `in_flight`: the runs of unfinished requests in steps in flight."""
        assert self._targets.keys() <= self._held.keys(), "a suspect is not held"
        for request_id, request in self._held.items():
            assert (request.status is RequestStatus.RUNNING) == (request is self.on_trial), f"{request_id} runs untried"
        if not self.is_open:
            assert self.on_trial is None, "on trial, and not a suspect"
            return
        assert running.in_order() == [one for one in [self.on_trial] if one is not None], "not alone on trial"
        if self.on_trial is not None:
            assert set(in_flight) <= set(running.run.tolist()), "a step holds more than the trial"
            target = self._targets[self.on_trial.request_id]
            assert running.confirmed[0] < target, "it reached its target and is not cleared"
            assert running.computed[0] <= target, "scheduled past its target"


def trial_targets(
    in_flight: Sequence[StepInFlight], num_executed: int, unfinished: Iterable[Request], running: RunningTable
) -> dict[str, int]:
    """The suspects after workers died that had received the oldest `num_executed` of the steps in flight.

    By request id, the computed tokens that each unfinished request of these steps would have had after them. A request
    preempted since is a suspect too: the workers still execute the step.
    """
    executed = {run for step in in_flight[:num_executed] for run, _ in step.tokens_by_run()}
    unexecuted: dict[int, int] = {}
    for run, count in (pair for step in in_flight[num_executed:] for pair in step.tokens_by_run()):
        unexecuted[run] = unexecuted.get(run, 0) + count
    return {
        request.request_id: _num_scheduled_tokens(request, running) - unexecuted.get(request.run, 0)
        for request in unfinished
        if request.run is not None and request.run in executed
    }


def _num_scheduled_tokens(request: Request, running: RunningTable) -> int:
    if request.status is RequestStatus.RUNNING:
        return int(running.computed[running.position_of(request)])
    return request.num_tokens_when_preempted
