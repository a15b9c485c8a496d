"""The traces of an engine's processes as one timeline, in the JSON format that Perfetto and Chrome read.

    process         tracks
    --------------  ---------------------------------------------------------------------------
    front end       messages, outputs, the threads that send, and each tokenizer process
    engine          its loop, and the counter of unread bytes in the ring to the workers
    worker N        its steps; its other calls; the device's streams, or the operators of a CPU
    requests        one slice for each request, with its queue, prefill and decode nested in it

Arrows link a request's slices (submit, receive, schedule, update, process outputs), and a step's: broadcast, launch on
every worker, update.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ringcore.tracing import kinds
from ringcore.tracing.tracer import Kind, ProcessTrace

__all__ = ["joined", "timeline"]

Event = dict[str, Any]

_COUNTER = "call ring: unread bytes"


class Slice(NamedTuple):
    """A span, on its track in the file."""

    pid: int
    tid: int
    began_ns: int
    ended_ns: int
    args: Mapping[str, Any]


_Point = tuple[Slice | None, int]  # nanoseconds


class RequestLife(NamedTuple):
    """The moments of a request, in nanoseconds; None: not reached, or not in this trace."""

    args: Mapping[str, Any]
    arrived_ns: int
    received_ns: int  # by the engine
    admitted_ns: int | None
    first_token_ns: int | None
    ended_ns: int | None
    sent: int | None  # of the message with the first token


def timeline(processes: Sequence[ProcessTrace], notes: Sequence[str], version: str) -> dict[str, Any]:
    """The file's contents. notes: what a reader must know, e.g. which process is missing. version: of ringcore."""
    made = _Timeline(processes)
    notes = [
        *notes,
        *(f"{one.process}: its ring was full, its oldest records were dropped" for one in processes if one.is_full),
        *(["the processes are of several hosts, aligned by their wall clocks"] if made.num_hosts > 1 else []),
    ]
    return {
        "traceEvents": made.events(),
        "displayTimeUnit": "ms",
        "otherData": {
            "ringcore": version,
            "clock": "CLOCK_MONOTONIC",
            "began_monotonic_ns": str(made.origin_ns),  # ts=0
            "notes": notes,
        },
    }


def joined(files: Mapping[int, dict[str, Any]], notes: Sequence[str]) -> dict[str, Any]:
    """The timelines of several engines, by the number of each, as one file; that of one engine as it is, with these
    notes too."""
    origins = {number: int(file["otherData"]["began_monotonic_ns"]) for number, file in files.items()}
    first = min(origins, key=origins.__getitem__)
    alone = len(files) == 1
    events: list[Event] = []
    base = 0
    for number, file in files.items():
        shift_us = (origins[number] - origins[first]) / 1e3
        events += file["traceEvents"] if alone else _moved(file["traceEvents"], number, base, shift_us)
        base += max((event["pid"] for event in file["traceEvents"]), default=0)
    their_notes = [
        note if alone else f"replica {number}: {note}"
        for number, file in files.items()
        for note in file["otherData"]["notes"]
    ]
    other = files[first]["otherData"] | {"notes": [*their_notes, *notes]}
    return files[first] | {"traceEvents": events, "otherData": other}


def _moved(events: Iterable[Event], number: int, base: int, shift_us: float) -> Iterator[Event]:
    """Events of one engine, as processes, requests and arrows of its own."""
    for event in events:
        moved = event | {"pid": event["pid"] + base}
        if "ts" in event:
            moved["ts"] = event["ts"] + shift_us
        if "id" in event:
            moved["id"] = f"replica {number}: {event['id']}"
        if event["name"] == "process_name":
            moved["args"] = {"name": f"replica {number}: {event['args']['name']}"}
        elif event["name"] == "process_sort_index":
            moved["args"] = {"sort_index": event["args"]["sort_index"] + base}
        yield moved


class _Timeline:
    """The slices of all processes by kind, and the events made of them. Times are those of the first process's host."""

    def __init__(self, processes: Sequence[ProcessTrace]) -> None:
        self._processes = processes
        self._requests_pid = len(processes) + 1
        self.num_hosts = len({one.host for one in processes})
        self._slices: defaultdict[str, list[Slice]] = defaultdict(list)
        self._moments: defaultdict[str, list[Slice]] = defaultdict(list)
        self._names: list[tuple[str, Slice]] = []
        self._tids: defaultdict[int, dict[str, int]] = defaultdict(dict)  # by process: the threads by name
        for pid, one in enumerate(processes, start=1):
            self._read(pid, one, _shift_ns(processes[0], one))
        self.origin_ns = min([one.began_ns for one in processes], default=0)
        self._lives = self._read_lives()

    def _read(self, pid: int, process: ProcessTrace, shift_ns: int) -> None:
        tids = self._tids[pid]
        for span in process.spans():
            kind, args = span.kind, dict(zip(span.kind.args, span.args, strict=False))
            if kind.form == "span" and span.ended_ns < process.began_ns:
                continue  # of a step that was in flight
            if kind.form == "span":
                tids.setdefault(str(span.track), len(tids) + 1)
            tid = tids.get(str(span.track), 0)
            began_ns = max(span.began_ns, process.began_ns) + shift_ns  # a request may have arrived long before
            one = Slice(pid, tid, began_ns, max(began_ns, span.ended_ns + shift_ns), args)
            match kind.form:
                case "span":
                    self._slices[kind.name].append(one)
                    self._names.append((kind.name, one))
                case "request":
                    self._moments[kind.name].append(one)
        for found in self._slices.values():
            found.sort(key=lambda one: one.began_ns)

    def _read_lives(self) -> dict[str, RequestLife]:
        """By request id."""

        def first(kind: Kind) -> dict[str, Slice]:
            found: dict[str, Slice] = {}
            for one in sorted(self._moments[kind.name], key=lambda one: one.began_ns):
                found.setdefault(one.args["id"], one)
            return found

        admitted, first_tokens, ended = first(kinds.ADMITTED), first(kinds.FIRST_TOKEN), first(kinds.ENDED)
        lives = {}
        for id_, arrived in first(kinds.ARRIVED).items():
            moments = [table.get(id_) for table in (admitted, first_tokens, ended)]
            args = {name: value for one in [arrived, *moments] if one is not None for name, value in one.args.items()}
            sent = args.pop("sent", None)
            admitted_ns, first_ns, ended_ns = (
                None if one is None else max(one.began_ns, arrived.began_ns) for one in moments
            )
            lives[id_] = RequestLife(args, arrived.began_ns, arrived.ended_ns, admitted_ns, first_ns, ended_ns, sent)
        return lives

    # -----------------------------------------------------------------------------------------------------------
    # Events.

    def events(self) -> list[Event]:
        """Slices before the arrows that are bound to them; both by time."""
        timed = [*self._slice_events(), *self._counter_events(), *self._request_events()]
        timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
        arrows = sorted([*self._step_arrows(), *self._request_arrows()], key=lambda event: float(event["ts"]))
        return [*self._name_events(), *timed, *arrows]

    def _us(self, at_ns: int) -> float:
        return (at_ns - self.origin_ns) / 1e3

    def _name_events(self) -> Iterator[Event]:
        def named(what: str, pid: int, name: str, tid: int = 0) -> Event:
            return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}

        def placed(what: str, pid: int, place: int, tid: int = 0) -> Event:
            return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"sort_index": place}}

        for pid, one in enumerate(self._processes, start=1):
            yield named("process_name", pid, f"{one.process} (pid {one.pid})")
            yield placed("process_sort_index", pid, pid)
            for track, tid in self._tids[pid].items():
                yield named("thread_name", pid, track, tid)
                yield placed("thread_sort_index", pid, 0 if track in ("loop", "steps") else tid, tid)
        yield named("process_name", self._requests_pid, "requests")
        yield placed("process_sort_index", self._requests_pid, self._requests_pid)

    def _slice_events(self) -> Iterator[Event]:
        enqueued = self._by_arg(kinds.ENQUEUE, "step")
        for name, one in self._names:
            dur = (one.ended_ns - one.began_ns) / 1e3
            where = {"pid": one.pid, "tid": one.tid, "ts": self._us(one.began_ns), "dur": dur}
            args = dict(one.args)
            if name == kinds.LAUNCH.name and (source := enqueued.get(one.args["step"])) is not None:
                args["lag_us"] = (one.began_ns - source.began_ns) / 1e3  # of this reader, behind the ring's writer
            yield {"ph": "X", "cat": "ringcore", "name": name, **where, "args": args}

    def _counter_events(self) -> Iterator[Event]:
        for one in self._slices[kinds.ENQUEUE.name]:
            value = {"bytes": one.args["unread_bytes"]}
            yield {"ph": "C", "name": _COUNTER, "pid": one.pid, "ts": self._us(one.ended_ns), "args": value}

    def _request_events(self) -> Iterator[Event]:
        """Nested asynchronous slices. What has not ended reaches to the end of the trace."""
        end_ns = max((one.ended_ns for _, one in self._names), default=self.origin_ns)
        for number, life in enumerate(self._lives.values()):
            last_ns = life.ended_ns or max(end_ns, life.first_token_ns or 0, life.admitted_ns or 0, life.arrived_ns)
            parts = [("request", life.arrived_ns, last_ns), ("queue", life.arrived_ns, life.admitted_ns or last_ns)]
            if life.admitted_ns is not None:
                parts.append(("prefill", life.admitted_ns, life.first_token_ns or last_ns))
            if life.first_token_ns is not None:
                parts.append(("decode", life.first_token_ns, last_ns))
            for name, began_ns, ended_ns in parts:
                shared = {"cat": "request", "id": str(number), "name": name, "pid": self._requests_pid, "tid": 0}
                args = life.args if name == "request" else {}
                yield {"ph": "b", **shared, "ts": self._us(began_ns), "args": args}
                yield {"ph": "e", **shared, "ts": self._us(min(ended_ns, last_ns))}

    # -----------------------------------------------------------------------------------------------------------
    # Arrows: from slice to slice, each bound to the one that contains its time.

    def _step_arrows(self) -> Iterator[Event]:
        """From a step's broadcast to its launch on each worker; from one that replies to the update."""
        replying = {one.pid for one in self._slices[kinds.REPLY.name]}
        broadcasts, updates = self._by_arg(kinds.BROADCAST, "step"), self._by_arg(kinds.UPDATE, "step")
        for launch in self._slices[kinds.LAUNCH.name]:
            step = launch.args["step"]
            update = updates.get(step) if launch.pid in replying else None
            points = [(one, 0) for one in (broadcasts.get(step), launch, update)]
            yield from self._arrow("step", f"{step} of {launch.pid}", points)

    def _request_arrows(self) -> Iterator[Event]:
        submits = {id_: one for one in self._slices[kinds.SUBMIT.name] for id_ in one.args["ids"]}
        receiving, scheduling, updating = map(self._enclosing, (kinds.RECEIVE, kinds.SCHEDULE, kinds.UPDATE))
        for id_, life in self._lives.items():
            points = [
                (submits.get(id_), 0),
                receiving(life.received_ns),
                scheduling(life.admitted_ns),
                updating(life.first_token_ns),
                (self._reader_of(life), 0),
            ]
            yield from self._arrow("request", id_, points)

    def _by_arg(self, kind: Kind, name: str) -> dict[Any, Slice]:
        return {one.args[name]: one for one in self._slices[kind.name]}

    def _enclosing(self, kind: Kind) -> Callable[[int | None], _Point]:
        """-> a function that finds the slice of this kind at a moment."""
        slices = self._slices[kind.name]

        def find(at_ns: int | None) -> _Point:
            index = -1 if at_ns is None else bisect.bisect_right(slices, at_ns, key=lambda one: one.began_ns) - 1
            return (None, 0) if at_ns is None or index < 0 else (slices[index], at_ns)

        return find

    def _reader_of(self, life: RequestLife) -> Slice | None:
        """The front end's slice that processed the first token's message."""
        if life.first_token_ns is None:
            return None
        for kind in (kinds.PROCESS_OUTPUTS, kinds.READ_OUTPUTS):
            slices = self._slices[kind.name]
            index = bisect.bisect_left(slices, life.first_token_ns, key=lambda one: one.began_ns)
            found = next((one for one in slices[index:] if one.args["sent"] == life.sent), None)
            if found is not None:
                return found
        return None

    def _arrow(self, name: str, id_: str, points: Iterable[_Point]) -> Iterator[Event]:
        """points: slices, with the least time of the arrow in each; it never goes back in time."""
        known: list[tuple[Slice, int]] = []
        for one, at_ns in points:
            at_ns = max(at_ns, one.began_ns if one else 0, known[-1][1] if known else 0)
            if one is not None and at_ns <= one.ended_ns:
                known.append((one, at_ns))
        for place, (one, at_ns) in enumerate(known if len(known) > 1 else []):
            phase = {"ph": "s"} if place == 0 else {"ph": "t"} if place < len(known) - 1 else {"ph": "f", "bp": "e"}
            where = {"pid": one.pid, "tid": one.tid, "ts": self._us(at_ns)}
            yield {**phase, "cat": name, "name": name, "id": f"{name} {id_}", **where}


def _shift_ns(reference: ProcessTrace, other: ProcessTrace) -> int:
    """What to add to the other's times. 0 on one host, whose processes have one clock."""
    if other.host == reference.host:
        return 0
    return (other.taken_unix_ns - other.taken_ns) - (reference.taken_unix_ns - reference.taken_ns)
