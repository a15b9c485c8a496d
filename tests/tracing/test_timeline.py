"""The timeline of several processes, and the check that every file of the tests must pass."""

from __future__ import annotations

import copy

import pytest
from check_timeline import check_timeline

from ringcore.tracing import ProcessTrace, kinds
from ringcore.tracing.timeline import timeline
from ringcore.tracing.tracer import Span

US = 1000
STEP = 5, 1, 1, 0, 3, 1


def process(name, spans, *, host="a", taken_ns=900 * US, unix_ns=5_000_000 * US, is_full=False):
    """spans: kind, track, begin and end in microseconds, arguments."""
    notes = [Span(kind, track, begin * US, end * US, args) for kind, track, begin, end, *args in spans]
    return ProcessTrace(name, 10, host, 0, 10**18, taken_ns, unix_ns, is_full, [], [], notes, {})


FRONT_END = process(
    "front end",
    [
        (kinds.TOKENIZE, "tokenizer 3", 5, 8, 12),
        (kinds.SUBMIT, "sender", 10, 20, 1, ["r"]),
        (kinds.READ_OUTPUTS, "main", 75, 78, 6),
        (kinds.PROCESS_OUTPUTS, "main", 80, 90, 6, 1, 1),
    ],
)
ENGINE = process(
    "engine",
    [
        (kinds.ARRIVED, "requests", 4, 25, "r", 3),
        (kinds.RECEIVE, "main", 15, 30),
        (kinds.ADMITTED, "main", 31, 31, "r", 0, 2, 0),
        (kinds.SCHEDULE, "main", 30, 35, 5, 3),
        (kinds.ENQUEUE, "main", 37, 39, 5, 100, 128),
        (kinds.BROADCAST, "main", 35, 40, 5),
        (kinds.FIRST_TOKEN, "main", 65, 65, "r", 6),
        (kinds.UPDATE, "main", 62, 70, 5, 6),
        (kinds.ENDED, "main", 100, 100, "r", "length"),
    ],
)
WORKERS = [
    process("worker 0", [(kinds.LAUNCH, "main", 45, 55, *STEP), (kinds.REPLY, "main", 56, 58)]),
    process("worker 1", [(kinds.LAUNCH, "main", 46, 55, *STEP)]),
]


def made(*processes):
    file = timeline(processes, [], "1.0")
    check_timeline(file)
    return file


def arrows(file, name):
    found = {}
    for event in file["traceEvents"]:
        if event["ph"] in "stf" and event["name"] == name:
            found.setdefault(event["id"], []).append((event["pid"], event["ts"]))
    return found


def request_parts(file):
    return {
        event["name"]: (event["ts"], end["ts"])
        for event in file["traceEvents"]
        if event["ph"] == "b"
        for end in file["traceEvents"]
        if end["ph"] == "e" and (end["id"], end["name"]) == (event["id"], event["name"])
    }


def test_a_request_from_the_front_end_and_back():
    file = made(FRONT_END, ENGINE, *WORKERS)
    assert list(arrows(file, "request").values()) == [[(1, 10.0), (2, 25.0), (2, 31.0), (2, 65.0), (1, 80.0)]]
    assert request_parts(file) == {
        "request": (4.0, 100.0),
        "queue": (4.0, 31.0),
        "prefill": (31.0, 65.0),
        "decode": (65.0, 100.0),
    }
    (request,) = [one for one in file["traceEvents"] if one["ph"] == "b" and one["name"] == "request"]
    assert request["args"] == {
        "id": "r", "prompt_tokens": 3, "row": 0, "cached_tokens": 2, "preemptions": 0, "reason": "length"
    }  # fmt: skip


def test_a_step_to_every_worker_and_back_from_the_one_that_replies():
    file = made(FRONT_END, ENGINE, *WORKERS)
    assert sorted(arrows(file, "step").values()) == [[(2, 35.0), (3, 45.0), (2, 62.0)], [(2, 35.0), (4, 46.0)]]
    launches = [one["args"] for one in file["traceEvents"] if one["name"] == "launch"]
    assert [one["lag_us"] for one in launches] == [8.0, 9.0]
    assert (launches[0]["step"], launches[0]["tokens"], launches[0]["new_requests"]) == (5, 3, 1)


def test_a_request_that_has_not_ended_reaches_to_the_end():
    unfinished = process("engine", [(kinds.ARRIVED, "requests", 4, 25, "r", 3), (kinds.RECEIVE, "main", 15, 300)])
    assert request_parts(made(unfinished)) == {"request": (4.0, 300.0), "queue": (4.0, 300.0)}


def test_one_that_arrived_before_the_trace_begins_with_it():
    began = process("engine", [(kinds.ARRIVED, "requests", -5_000, 1, "r", 3), (kinds.RECEIVE, "main", 15, 30)])
    assert request_parts(made(began))["request"] == (0.0, 30.0)


def test_hosts_are_aligned_by_their_wall_clocks():
    """The other host's monotonic clock is 400 us ahead of this one's, its wall clock is the same."""
    far = process("worker 0", [(kinds.LAUNCH, "main", 445, 455, *STEP)], host="b", taken_ns=1300 * US)
    file = made(ENGINE, far)
    assert list(arrows(file, "step").values()) == [[(1, 35.0), (2, 45.0)]]
    assert any("several hosts" in note for note in file["otherData"]["notes"])


def test_dropped_records_are_told():
    file = made(process("engine", [(kinds.RECEIVE, "main", 15, 30)], is_full=True))
    assert file["otherData"]["notes"] == ["engine: its ring was full, its oldest records were dropped"]


def test_nothing_recorded():
    assert [event["ph"] for event in made(process("engine", []))["traceEvents"]] == ["M"] * 4


def change(ph, name=None, **fields):
    def apply(events) -> None:
        next(event for event in events if event["ph"] == ph and name in (None, event["name"])).update(fields)

    return apply


@pytest.mark.parametrize(
    "spoil",
    [
        lambda events: events.append(events[-1]),  # an arrow that ends twice
        change("X", "receive", dur=18.0),
        change("X", tid=77),
        change("X", ts=-1.0),
        change("f", ts=1.0),
        change("t", pid=99),
        change("e", ts=2000.0),
        change("M", pid=99),
        lambda events: events.remove(next(event for event in events if event["ph"] == "e")),
        change("b", unknown=1),
    ],
)
def test_the_check_finds_what_is_wrong(spoil):
    file = copy.deepcopy(made(FRONT_END, ENGINE, *WORKERS))
    spoil(file["traceEvents"])
    with pytest.raises(AssertionError):
        check_timeline(file)
