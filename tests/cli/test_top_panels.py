"""What `ringcore top` shows, as text: figures, each panel, one picture; empty, huge and hostile engines."""

from __future__ import annotations

import msgspec
import pytest
from rich.cells import cell_len
from top_samples import (
    HOSTILE,
    FakeSource,
    about,
    blocks,
    choice,
    later,
    request,
    requests,
    sample,
    steps,
)

from ringcore.cli.tables import count
from ringcore.cli.top.figures import bar, duration, plain, share, size, sparkline
from ringcore.cli.top.monitor import HISTORY, Monitor, View
from ringcore.cli.top.panels import PANELS, header, request_cells
from ringcore.cli.top.picture import picture
from ringcore.cli.top.sample import Sample, pace_between
from ringcore.errors import EngineDeadError, RpcTimeoutError
from ringcore.protocol.introspection import StepReport
from ringcore.protocol.messages import EngineHealth

EMPTY = sample(
    has_gpu=False,
    requests=requests(),
    blocks=blocks([(4, 0, 0, 0)] * 3, 4),
    steps=StepReport(0, 0.0, 0.0, 0.0, 0.0),
    num_prefix_query_tokens=0,
    num_prefix_hit_tokens=0,
)


def view_of(*samples: Sample) -> View:
    source = FakeSource(*samples)
    monitor = Monitor(choice(source))
    for _ in samples:
        monitor.poll()
    return monitor.view


def lines(view: View, name: str, width: int = 60, height: int = 8) -> list[str]:
    (panel,) = [panel for panel in PANELS if panel.name == name]
    return [line.plain.rstrip() for line in panel.lines(view, view.sample, width, height)]


# ---------------------------------------------------------------------------------------------------------------
# Figures.


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (count(0), "0"),
        (count(0.46), "0.5"),
        (count(9.97), "10.0"),
        (count(99_999), "99,999"),
        (count(123_456), "123k"),
        (count(999_700), "1.00M"),
        (count(12_345_678), "12M"),
        (share(None), "-"),
        (share(0.614), "61%"),
        (duration(8.5e-7), "850 ns"),
        (duration(43e-6), "43.0 µs"),
        (duration(5.123e-3), "5.12 ms"),
        (duration(0.9996), "1.00 s"),
        (duration(2000), "33m20s"),
        (size(0), "0 B"),
        (size(1.5 * 2**30), "1.50 GiB"),
        (size(2**40 - 1), "1.00 TiB"),
        (size(None), "-"),
        (bar(0.5, 4), "██  "),
        (bar(1e-9, 4), "▏   "),
        (bar(7.0, 4), "████"),
        (bar(0.0, 0), ""),
    ],
)
def test_a_figure(shown, expected):
    assert shown == expected


def test_a_sparkline_keeps_the_newest_at_the_right():
    assert sparkline([1, 2, 4], 5) == ["  ▂▄█"]
    assert sparkline([9, 9, 8, 1, 0], 3) == ["█▁ "]
    assert sparkline([4, 8], 2, 2) == [" █", "██"]
    assert sparkline([], 3) == ["   "]
    assert sparkline([1], 0) == [""]


@pytest.mark.parametrize("width", [0, 1, 2, 7, 20, 60])
def test_a_foreign_text_is_harmless_and_no_wider(width):
    shown = plain(HOSTILE, width)
    assert cell_len(shown) <= width
    assert shown.isprintable()
    whole = plain(HOSTILE)
    assert whole.isprintable()
    assert "[bold]markup[/bold]" in whole
    assert not set(whole) & set("\x1b\x07\x00\r\n\u202e\u0301")


# ---------------------------------------------------------------------------------------------------------------
# Panels.


def test_requests_by_state():
    view = view_of(sample(requests=requests(running=3, waiting=9, preempted=0)))
    assert lines(view, "requests", 33)[:3] == [
        "running        3 ████",
        "waiting        9 ████████████",
        "preempted      0",
    ]
    assert lines(view, "requests", 33)[-1] == "longest wait 14s"


def test_tokens_since_the_sample_before():
    first = sample()
    view = view_of(first, later(first, 2.0, 6000))
    assert lines(view, "tokens", 30, 6) == [
        "generated   3,000/s",
        "computed    21,000/s",
        "prefix hits 61% (43%)",
        "preemptions 17",
        f"{'█':>30}",
        f"{'█':>30}",
    ]
    more = msgspec.structs.replace(later(first).engine, num_preemptions=22)
    assert "preemptions 22, 5/s" in lines(view_of(first, Sample(more)), "tokens")


def test_drafts_where_the_engine_has_any():
    first = sample(num_draft_tokens=4000, num_accepted_tokens=1000)
    more = later(first, num_draft_tokens=5000, num_accepted_tokens=1800)
    assert lines(view_of(first, more), "tokens", 40)[4] == "drafts      80% right (36% of 5,000)"
    assert (
        lines(view_of(sample(num_draft_tokens=0, num_accepted_tokens=0)), "tokens")[4] == "drafts      - right (- of 0)"
    )


def test_the_first_sample_has_the_engines_own_rates():
    assert lines(view_of(sample()), "tokens")[:3] == [
        "generated   6,120/s",
        "computed    41,000/s",
        "prefix hits - (43%)",
    ]


def test_parts_of_steps_as_many_columns_as_fit():
    view = view_of(sample(steps=steps()))
    assert lines(view, "steps", 44)[:4] == [
        "           median      90%      99%      max",
        "step      5.10 ms  6.63 ms  10.2 ms  28.1 ms",
        "schedule  48.0 µs  62.4 µs  96.0 µs   264 µs",
        "launch    31.0 µs  40.3 µs  62.0 µs   170 µs",
    ]
    assert lines(view, "steps", 20)[1] == "step      5.10 ms"
    assert lines(view, "steps", 3)[1] == "step      5.10 ms"


def test_a_block_map_shows_what_most_blocks_of_a_character_are():
    cells = [(0, 0, 0, 4)] * 2 + [(0, 0, 4, 0)] * 3 + [(1, 3, 0, 0)] * 2 + [(4, 0, 0, 0)] * 3
    view = view_of(sample(blocks=blocks(cells, 4)))
    assert lines(view, "blocks", 60) == ["▓ shared 8  █ in use 12  ▒ cached 6  · free 14  of 40", "▓▓███▒▒···"]
    assert lines(view, "blocks", 4, 4)[1:] == ["▓▓██", "█▒▒·", "··"]
    assert lines(view, "blocks", 5, 2)[1:] == ["▓██··"]  # two cells each; of equals the more used one
    assert lines(view, "blocks", 40)[0] == "▓ 8  █ 12  ▒ 6  · 14  of 40"


def test_processes_with_a_gpu_and_without():
    first = sample()
    view = view_of(first, later(first))
    assert lines(view, "workers", 60) == [
        "            CPU  resident  GPU     GPU memory  KV cache",
        "engine      62%   410 MiB    -              -         -",
        "worker 0    98%  3.20 GiB  91% 71.5 GiB (90%)  55.0 GiB",
        "worker 1    98%  3.20 GiB  91% 71.5 GiB (90%)  55.0 GiB",
    ]
    assert lines(view_of(sample(has_gpu=False)), "workers", 50)[0].split() == [
        "CPU",
        "resident",
        "KV",
        "cache",
        "weights",
    ]
    silent = Sample(first.engine, [], "no answer within 1 s")
    assert lines(view_of(silent), "workers")[-1] == "workers: no answer within 1 s"


@pytest.mark.parametrize(
    ("health", "says"),
    [
        (EngineHealth("ready", paused="new"), "ready · paused (new requests)"),
        (EngineHealth("sleeping", memory={"weights": "offloaded", "kv_cache": "discarded"}), "kv cache discarded"),
        (EngineHealth("stalled", oldest_step_s=31.0), "stalled · step in flight for 31.0 s"),
        (
            EngineHealth("ready", num_restarts=2, restart_cause="worker 0\x1b[2J died"),
            "restarted 2x: worker 0\ufffd[2J died",
        ),
    ],
)
def test_the_engines_health(health, says):
    assert says in header(view_of(sample(health=health)), 0.0, 200)[1].plain


def test_the_header_says_what_happened_to_the_engine():
    first = sample()
    cases = [
        (RpcTimeoutError("the process is stopped", method="x"), "no answer for 12s: the process is stopped"),
        (EngineDeadError("it was killed", process="engine"), "ended: it was killed"),
    ]
    for error, says in cases:
        view = view_of(first, error)
        top, below = (line.plain for line in header(view, 12.0, 100))
        assert below == says
        assert top.startswith("Qwen3-8B  cuda, 2 workers · pid 4711 · up 2h13m")
        assert view.sample is first
    assert header(View("x", "connecting"), 0.0, 50)[1].plain == "connecting..."


def test_a_request_in_cells():
    shown = [cell.plain for cell in request_cells(request(3, state="waiting", waiting_s=21.9, priority=-2))]
    assert shown == ["22s", "waiting", "request-3", "12/256", "300", "21", "64", "0", "22s", "-2"]
    long = request_cells(request(1, request_id="chatcmpl-" + "0" * 60 + "#17.0"))[2].plain
    assert long.startswith("chatcmpl-000")
    assert long.endswith("0000#17.0")
    assert cell_len(long) == 36
    assert request_cells(request(1, request_id="\x1b[2Ja\u202e"))[2].plain == "\ufffd[2Ja\ufffd"


# ---------------------------------------------------------------------------------------------------------------
# The whole.

HOSTILE_SAMPLE = sample(
    requests=requests([request(number, request_id=HOSTILE) for number in (2, 1)], running=2),
    about=about(model="/x/" + HOSTILE),
    health=EngineHealth("ready", num_restarts=1, restart_cause=HOSTILE),
)
HUGE = sample(
    requests=requests([request(number) for number in range(1000, 0, -1)], running=4096, waiting=1_234_567),
    blocks=blocks([(0, 0, 900, 100)] * 4096, 1000),
    num_generated_tokens=10**15,
)


@pytest.mark.parametrize("width", [10, 40, 80, 120, 300])
@pytest.mark.parametrize("made", [EMPTY, HOSTILE_SAMPLE, HUGE, sample()], ids=["empty", "hostile", "huge", "busy"])
def test_a_picture_of_any_engine_fits(made, width):
    shown = picture(view_of(made), 0.0, width)
    assert shown.endswith("\n")
    for line in shown.splitlines():
        assert cell_len(line) <= width
        assert line.isprintable()


def test_a_picture_of_an_idle_engine():
    assert picture(view_of(EMPTY), 0.0, 80).splitlines() == [
        "Qwen3-8B  cpu, 2 workers · pid 4711 · up 2h13m · 32,768 tokens a request, 256 a…",
        "ready · step in flight for 3.10 ms",
        "",
        "Requests",
        "  running        0",
        "  waiting        0",
        "  preempted      0",
        "  held           0",
        "  compiling      0",
        "  longest wait 14s",
        "",
        "Tokens",
        "  generated   0/s",
        "  computed    0/s",
        "  prefix hits - (-)",
        "  preemptions 17",
        "",
        "Steps",
        "  no step yet",
        "",
        "KV cache blocks",
        "  ▓ shared 0  █ in use 0  ▒ cached 0  · free 12  of 12",
        "  ···",
        "",
        "Processes",
        "              CPU  resident  KV cache   weights",
        "  engine        -   410 MiB         -         -",
        "  worker 0      -  3.20 GiB  55.0 GiB  7.60 GiB",
        "  worker 1      -  3.20 GiB  55.0 GiB  7.60 GiB",
    ]


# ---------------------------------------------------------------------------------------------------------------
# Two samples, and the monitor.


def test_there_is_no_pace_between_two_engines_or_backwards():
    first = sample()
    second = later(first)
    assert pace_between(first, second) is not None
    assert pace_between(second, first) is None
    assert pace_between(first, first) is None
    assert pace_between(sample(about=about(pids={"engine": 1})), second) is None


def test_a_replaced_worker_has_no_cpu_share_yet():
    first = sample()
    second = later(first)
    young = msgspec.structs.replace(second.workers[1], usage={"cpu_s": 1.0})
    pace = pace_between(first, Sample(second.engine, [second.workers[0], young]))
    assert list(pace.worker_cpu) == [0]


def test_a_monitor_connects_again_and_forgets_the_rates_of_another_engine():
    first = sample()
    dies, lives = (
        FakeSource(first, later(first), EngineDeadError("gone")),
        FakeSource(sample(about=about(pids={"engine": 2}))),
    )
    monitor = Monitor(choice(dies, lives))
    contacts = [monitor.poll().contact for _ in range(3)]
    assert contacts == ["live", "live", "ended"]
    assert dies.is_closed
    assert len(monitor.view.token_rates) == 1
    assert monitor.poll().contact == "live"
    assert monitor.view.token_rates == ()
    monitor.close()
    assert lives.is_closed
    assert monitor.poll().contact == "ended"  # nobody is left to connect to
    assert monitor.view.sample is not None


def test_silence_is_counted_and_history_is_bounded():
    clock = [0.0]
    first = sample()
    source = FakeSource(first, *[RpcTimeoutError("hangs", method="x")] * 2)
    monitor = Monitor(choice(source), now=lambda: clock[0])
    clock[0] = 3.0
    assert monitor.silent_s() == 3.0
    monitor.poll()
    clock[0] = 10.0
    assert monitor.poll().contact == "silent"
    assert monitor.silent_s() == 7.0
    assert not source.is_closed
    later_on = first
    source.samples = [later_on := later(later_on) for _ in range(HISTORY + 50)]
    for _ in range(HISTORY + 50):
        monitor.poll()
    assert len(monitor.view.token_rates) == HISTORY
