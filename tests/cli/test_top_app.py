"""The live view under textual's pilot: keys, dialogs, any size of terminal, an engine that ends; no engine is there."""

from __future__ import annotations

import asyncio
import re

import pytest
from test_top_panels import EMPTY, HOSTILE_SAMPLE, HUGE
from textual.widgets import DataTable, Static
from top_samples import HOSTILE, FakeSource, about, choice, later, request, requests, sample

from ringcore.cli.top.app import TopApp
from ringcore.cli.top.dialogs import Confirm, EngineList, Help
from ringcore.cli.top.source import Action
from ringcore.errors import EngineDeadError, PermissionDeniedError, RpcTimeoutError
from ringcore.protocol.messages import EngineHealth

SIZE = (120, 40)


def played(test, *sources, size=SIZE, engines=(), is_chosen=True):
    """Runs a test with the app, its pilot and a function that polls the engine once and shows the answer."""

    async def play() -> None:
        first = choice(*sources)
        app = TopApp(lambda: [first, *engines], first if is_chosen else None, None)

        def look() -> None:
            app._monitor.poll()
            app.show(app._monitor.view)

        async with app.run_test(size=size) as pilot:
            if is_chosen:
                look()
                await pilot.pause()
            await test(app, pilot, look)

    asyncio.run(play())


def texts(app) -> str:
    """All that is on the screen, by the SVG that textual draws of it."""
    svg = app.export_screenshot()
    found = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    return "".join(found).replace("&#160;", " ").replace("&lt;", "<").replace("&gt;", ">")


def said(app, text) -> bool:
    """Whether a notification says so."""
    return any(text in notification.message for notification in app._notifications)


async def until(pilot, condition) -> None:
    for _ in range(500):
        await pilot.pause(0.01)
        if condition():
            return
    raise AssertionError("it does not come")


@pytest.mark.parametrize(
    ("made", "size"),
    [
        (EMPTY, (1, 1)),
        (EMPTY, (80, 24)),
        (HOSTILE_SAMPLE, (20, 5)),
        (HOSTILE_SAMPLE, (80, 24)),
        (HOSTILE_SAMPLE, (240, 60)),
        (HUGE, (50, 20)),
        (HUGE, (100, 30)),
    ],
)
def test_any_engine_in_any_terminal(made, size):
    async def test(app, pilot, look) -> None:
        shown = app.export_screenshot()
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x1b\x7f\u202e]", shown)
        if size[0] >= 80:
            assert "Slowest requests" in texts(app)
        if made is HOSTILE_SAMPLE and size[0] >= 80:
            assert "[31mred" in texts(app)
        await pilot.resize_terminal(60, 18)
        await pilot.pause()

    played(test, FakeSource(made), size=size)


def test_a_wide_terminal_shows_every_part():
    first = sample()

    async def test(app, pilot, look) -> None:
        look()
        await pilot.pause()
        shown = texts(app)
        for part in ("Qwen3-8B", "ready", "waiting", "6,000/s", "prefix hits", "schedule", "shared 240", "worker 1"):
            assert part in shown
        assert "chatcmpl-00026aac#20" in shown
        assert "91%" in shown

    played(test, FakeSource(first, later(first)), size=(140, 45))


def test_the_cursor_stays_with_its_request():
    numbers = requests([request(3), request(2), request(1)], running=3)
    fewer = requests([request(2), request(1)], running=2)

    async def test(app, pilot, look) -> None:
        await pilot.press("down")
        assert app._selected_id == "request-2"
        look()
        assert app._selected_id == "request-2"
        assert app.query_one("#oldest", DataTable).cursor_row == 0
        look()
        assert app._selected_id is None

    played(test, FakeSource(sample(requests=numbers), sample(requests=fewer), EMPTY))


def test_an_abort_is_asked_for_and_told():
    source = FakeSource(sample(requests=requests([request(3), request(2)], running=2)))

    async def test(app, pilot, look) -> None:
        await pilot.press("down", "a")
        assert isinstance(app.screen, Confirm)
        assert "Abort the request request-2?" in texts(app)
        await pilot.press("n")
        assert source.actions == []
        source.answer = ["request-2"]
        await pilot.press("a", "y")
        await until(pilot, lambda: said(app, "aborted"))
        assert source.actions == [Action("abort", (["request-2"],))]
        source.answer = []
        await pilot.press("a", "enter")
        await until(pilot, lambda: said(app, "it has ended already"))

    played(test, source)


def test_without_a_request_there_is_nothing_to_abort():
    async def test(app, pilot, look) -> None:
        await pilot.press("a")
        await until(pilot, lambda: said(app, "no request is selected"))

    played(test, FakeSource(EMPTY))


def test_pause_and_sleep_do_the_opposite_of_what_is():
    paused = sample(health=EngineHealth("ready", paused="all"))
    asleep = sample(health=EngineHealth("sleeping"))
    source = FakeSource(sample(), paused, asleep)

    async def test(app, pilot, look) -> None:
        await pilot.press("p")
        await until(pilot, lambda: len(source.actions) == 1)
        await pilot.press("s", "n")
        await pilot.press("s", "y")
        await until(pilot, lambda: len(source.actions) == 2)
        look()
        await pilot.press("p")
        await until(pilot, lambda: len(source.actions) == 3)
        look()
        await pilot.press("s")
        await until(pilot, lambda: len(source.actions) == 4)
        assert source.actions == [
            Action("pause", ("new",)),
            Action("sleep", (1, "abort")),
            Action("resume"),
            Action("wake_up"),
        ]

    played(test, source)


def test_a_refusal_is_shown_as_it_is():
    source = FakeSource(sample())
    source.answer = PermissionDeniedError("[red]the key has no scope[/] \x1b[2J")

    async def test(app, pilot, look) -> None:
        await pilot.press("p")
        await until(pilot, lambda: said(app, "[red]the key has no scope"))
        source.answer = OSError(28, "No space left on device")
        await pilot.press("d")
        await until(pilot, lambda: said(app, "No space left on device"))
        source.answer = None
        await pilot.press("d")
        await until(pilot, lambda: said(app, "dump: dump.json"))
        assert source.num_dumps == 2

    played(test, source, size=(160, 40))


def test_an_engine_that_ends_leaves_its_picture_and_another_one_can_be_chosen():
    ends = FakeSource(sample(), RpcTimeoutError("the process is stopped", method="x"), EngineDeadError("it was killed"))
    other = choice(FakeSource(sample(about=about(model="/models/other"))), name="other")

    async def test(app, pilot, look) -> None:
        look()
        await pilot.pause()
        assert "the process is stopped" in texts(app)
        assert "chatcmpl-00026aac#20" in texts(app)
        look()
        await pilot.pause()
        assert "ended: it was killed" in texts(app)
        assert "chatcmpl-00026aac#20" in texts(app)
        await pilot.press("p")
        await until(pilot, lambda: said(app, "press e to choose another one"))
        await pilot.press("e")
        await until(pilot, lambda: isinstance(app.screen, EngineList))
        await pilot.press("down", "enter")
        await until(pilot, lambda: not isinstance(app.screen, EngineList))
        assert "connecting..." in texts(app)
        look()
        await pilot.pause()
        assert "other  " in texts(app)
        assert "ended" not in str(app.query_one("#header", Static).render())

    played(test, ends, engines=[other])


def test_without_a_choice_there_is_a_list():
    hostile = choice(FakeSource(sample()), name=HOSTILE)

    async def test(app, pilot, look) -> None:
        await until(pilot, lambda: isinstance(app.screen, EngineList))
        assert "[bold]markup" in texts(app)
        await pilot.press("escape")
        await pilot.press("p", "a", "d", "question_mark")  # nothing is there yet
        assert isinstance(app.screen, Help)
        await pilot.press("escape", "e")
        await until(pilot, lambda: isinstance(app.screen, EngineList))
        await pilot.press("enter")
        await until(pilot, lambda: not isinstance(app.screen, EngineList))
        look()
        await pilot.pause()
        assert "Qwen3-8B" in texts(app)

    played(test, FakeSource(sample()), engines=[hostile], is_chosen=False)


def test_it_follows_an_engine_until_it_quits():
    source = FakeSource(sample(), later(sample()))
    first = choice(source)

    async def play() -> None:
        app = TopApp(lambda: [first], first, 0.01)
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: len(source.samples) == 1 and "chatcmpl-00026aac#20" in app._ids)
            await pilot.press("q")
        for _ in range(6000):
            await asyncio.sleep(0.01)
            if source.is_closed:
                return
        raise AssertionError("the connection is left open")

    asyncio.run(play())
