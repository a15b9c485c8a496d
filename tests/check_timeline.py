"""What a trace file must be so that Perfetto and Chrome show it: a check of its own, event by event."""

from __future__ import annotations

from collections import Counter, defaultdict

_KEYS = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "ts", "args"},
    "b": {"name", "cat", "id", "pid", "tid", "ts", "args"},
    "e": {"name", "cat", "id", "pid", "tid", "ts"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "t": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}
_SLACK_US = 0.002  # times are nanoseconds, written as microseconds


def check_timeline(file: dict) -> None:
    events = file["traceEvents"]
    assert set(file) == {"traceEvents", "displayTimeUnit", "otherData"}
    for event in events:
        assert set(event) - {"ph"} == _KEYS[event["ph"]], event
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    slices = [event for event in events if event["ph"] == "X"]
    _check_nesting(slices)
    _check_tracks_are_named(events)
    _check_arrows(events, slices)
    _check_requests([event for event in events if event["ph"] in "be"])


def _by_track(slices: list[dict]) -> dict[tuple[int, int], list[dict]]:
    tracks = defaultdict(list)
    for event in slices:
        tracks[event["pid"], event["tid"]].append(event)
    return tracks


def _check_nesting(slices: list[dict]) -> None:
    """Slices of a track are in the order of their begin, and nested or disjoint."""
    for track in _by_track(slices).values():
        assert [one["ts"] for one in track] == sorted(one["ts"] for one in track)
        open_until: list[float] = []
        for one in track:
            while open_until and open_until[-1] <= one["ts"] + _SLACK_US:
                open_until.pop()
            end = one["ts"] + one["dur"]
            assert not open_until or end <= open_until[-1] + _SLACK_US, f"it reaches out of its parent: {one}"
            open_until.append(end)


def _check_tracks_are_named(events: list[dict]) -> None:
    names = Counter(
        (event["name"], event["pid"], event["tid"])
        for event in events
        if event["ph"] == "M" and "_name" in event["name"]
    )
    assert set(names.values()) == {1}
    for event in events:
        assert names["process_name", event["pid"], 0] == 1, event
        if event["ph"] == "X":
            assert names["thread_name", event["pid"], event["tid"]] == 1, event


def _check_arrows(events: list[dict], slices: list[dict]) -> None:
    """Each begins once and ends once, never goes back in time, and is in a slice wherever it is bound."""
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    tracks = _by_track(slices)
    for points in arrows.values():
        assert [point["ph"] for point in points] == ["s", *"t" * (len(points) - 2), "f"], points
        assert [point["ts"] for point in points] == sorted(point["ts"] for point in points)
        for point in points:
            track = tracks[point["pid"], point["tid"]]
            assert any(one["ts"] <= point["ts"] <= one["ts"] + one["dur"] + _SLACK_US for one in track), point


def _check_requests(events: list[dict]) -> None:
    """Queue, prefill and decode follow each other inside of the request."""
    requests = defaultdict(dict)
    for event in events:
        requests[event["id"]].setdefault(event["name"], {})[event["ph"]] = event["ts"]
    for parts in requests.values():
        outer = parts["request"]
        assert all(set(one) == {"b", "e"} and one["b"] <= one["e"] for one in parts.values())
        at = outer["b"]
        for name in ("queue", "prefill", "decode"):
            if name in parts:
                assert parts[name]["b"] == at
                at = parts[name]["e"]
        assert at == outer["e"]
        assert set(parts) <= {"request", "queue", "prefill", "decode"}
