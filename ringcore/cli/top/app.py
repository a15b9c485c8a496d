"""The live view, with textual. It shows `View`s and turns keys into calls; all that is shown is made by `panels`.

Two threads besides its own, both daemons, since a hanging engine may hold them for a minute: one polls, one acts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.widgets import DataTable, Footer, Static

from ringcore.cli.top.dialogs import Confirm, EngineList, Help
from ringcore.cli.top.figures import plain
from ringcore.cli.top.monitor import Monitor, View
from ringcore.cli.top.panels import PANELS, REQUEST_COLUMNS, Panel, header, request_cells
from ringcore.cli.top.source import Action, Choice, Engines
from ringcore.errors import RingcoreError

__all__ = ["TopApp"]

_ROWS = {"upper": ("requests", "tokens", "steps"), "lower": ("blocks", "workers")}
_FRAME = 2  # lines


class _PanelView(Static):
    """One of `PANELS`; it draws itself anew for each view and each size."""

    def __init__(self, panel: Panel) -> None:
        super().__init__(id=panel.name, classes="panel")
        self.border_title = panel.title
        self._panel = panel
        self._view: View | None = None

    def show(self, view: View) -> None:
        self._view = view
        self.refresh()

    def render(self) -> Text:
        view, size = self._view, self.content_size
        if view is None or view.sample is None or size.width < 1:
            return Text("")
        lines = self._panel.lines(view, view.sample, size.width, size.height)
        return Text("\n", no_wrap=True, overflow="crop").join(lines)


class TopApp(App[None]):
    """engines: those to choose from. choice: the first one shown; None: it is asked for. interval_s: between two
    samples; None: nothing is polled, and only `show` changes what is shown."""

    CSS_PATH = "app.tcss"
    TITLE = "ringcore top"
    AUTO_FOCUS = None
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "pause/resume"),
        Binding("a", "abort", "abort"),
        Binding("d", "dump", "dump"),
        Binding("s", "sleep", "sleep/wake"),
        Binding("e", "engines", "engines"),
        Binding("q,ctrl+c", "quit", "quit"),
        Binding("question_mark,h", "help", "help", key_display="?"),
    ]

    def __init__(self, engines: Engines, choice: Choice | None, interval_s: float | None = 1.0) -> None:
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (76, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-low"), (34, "-high")]
        self._engines, self._choice, self._interval_s = engines, choice, interval_s
        self._monitor: Monitor | None = None
        self._ids: list[str] = []  # of the table's rows
        self._stopping = threading.Event()

    def compose(self) -> ComposeResult:
        yield Static(id="header")
        with VerticalScroll(id="body"):
            for name, shown in _ROWS.items():
                with Container(id=name):
                    for panel in PANELS:
                        if panel.name in shown:
                            yield _PanelView(panel)
            yield DataTable(id="oldest", cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        table = self._table
        table.border_title = "Slowest requests"
        for name, is_number in REQUEST_COLUMNS:
            table.add_column(Text(name, justify="right" if is_number else "left"))
        table.focus(scroll_visible=False)
        self.set_interval(1.0, self._show_header)
        if self._choice is None:
            self.action_engines()
        else:
            self.choose(self._choice)

    # -----------------------------------------------------------------------------------------------------------
    # Engines and what they tell.

    def choose(self, choice: Choice) -> None:
        """Leaves the engine that is shown for another one, or for itself once more."""
        self._stopping.set()
        self._choice, self._stopping = choice, threading.Event()
        self._monitor = Monitor(choice)
        self.show(self._monitor.view)
        if self._interval_s is not None:
            arguments = self._monitor, self._stopping, self._interval_s
            threading.Thread(target=self._follow, args=arguments, name="top", daemon=True).start()

    def _follow(self, monitor: Monitor, stopping: threading.Event, interval_s: float) -> None:
        while not stopping.is_set():
            view = monitor.poll()
            if not stopping.is_set():
                self.call_later(self._show_of, monitor, view)
            stopping.wait(interval_s)
        monitor.close()

    def _show_of(self, monitor: Monitor, view: View) -> None:
        if monitor is self._monitor:  # another one may have been chosen meanwhile
            self.show(view)

    def show(self, view: View) -> None:
        self._show_header()
        for panel in self.query(_PanelView):
            panel.show(view)
        if view.sample is not None:
            num_lines = _FRAME + 2 + len(view.sample.workers) + (view.sample.workers_error is not None)
            for name in _ROWS["lower"]:
                self.query_one(f"#{name}").styles.height = num_lines
        self.set_class(view.contact in ("silent", "ended"), "-stale")
        self._show_requests(view)

    def _show_header(self) -> None:
        if self._monitor is None:
            return
        lines = header(self._monitor.view, self._monitor.silent_s(), max(10, self.size.width - 2))
        for box in self.query("#header").results(Static):  # none while the screen ends, as the timer may find it
            box.update(Text("\n", no_wrap=True).join(lines))

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#oldest", DataTable)

    def _show_requests(self, view: View) -> None:
        """Fills the table; the cursor stays with its request."""
        table, selected = self._table, self._selected_id
        oldest = [] if view.sample is None else view.sample.engine.requests.oldest
        position, offset = table.cursor_row, table.scroll_offset
        self._ids = [request.request_id for request in oldest]
        table.clear()
        for request in oldest:
            table.add_row(*request_cells(request))
        if selected in self._ids:
            position = self._ids.index(selected)
        if self._ids:
            table.move_cursor(row=min(position, len(self._ids) - 1), scroll=False)
            table.scroll_to(*offset, animate=False, force=True)

    @property
    def _selected_id(self) -> str | None:
        row = self._table.cursor_row
        return self._ids[row] if 0 <= row < len(self._ids) else None

    # -----------------------------------------------------------------------------------------------------------
    # Keys.

    def action_pause(self) -> None:
        sample = self._view.sample
        if sample is not None and sample.engine.health.paused is not None:
            self._act(Action("resume"), "resumed")
        else:
            self._act(Action("pause", ("new",)), "paused: running requests continue, no new one starts")

    def action_abort(self) -> None:
        request_id = self._selected_id
        if request_id is None:
            self._say("no request is selected", is_error=True)
            return
        action = Action("abort", ([request_id],))
        self._confirm(f"Abort the request {plain(request_id, 200)}?", action, "aborted")

    def action_sleep(self) -> None:
        sample = self._view.sample
        if sample is not None and sample.engine.health.state == "sleeping":
            self._act(Action("wake_up"), "awake")
        else:
            question = "Send the engine to sleep? Its requests end with the finish reason abort."
            self._confirm(question, Action("sleep", (1, "abort")), "asleep")

    def action_engines(self) -> None:
        """They are asked for their state, for which a silent one needs a while."""

        def show(choices: Sequence[Choice]) -> None:
            self.push_screen(EngineList(choices), lambda choice: None if choice is None else self.choose(choice))

        threading.Thread(target=lambda: self.call_later(show, self._engines()), name="top", daemon=True).start()

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_dump(self) -> None:
        monitor = self._monitor
        if monitor is not None:
            self._say("writing a dump...")
            self._in_thread(lambda: f"dump: {monitor.dump()}")

    async def action_quit(self) -> None:
        self._stopping.set()
        self.exit()

    @property
    def _view(self) -> View:
        return View("", "connecting") if self._monitor is None else self._monitor.view

    def _confirm(self, question: str, action: Action, done: str) -> None:
        self.push_screen(Confirm(question), lambda is_yes: self._act(action, done) if is_yes else None)

    def _act(self, action: Action, done: str) -> None:
        monitor = self._monitor
        if monitor is None:
            return

        def call() -> str:
            value = monitor.act(action)
            return "it has ended already" if value == [] else done

        self._in_thread(call)

    def _in_thread(self, call: Callable[[], str]) -> None:
        def run() -> None:
            try:
                said = call(), False
            except RingcoreError as error:
                said = error.message, True
            except OSError as error:
                said = str(error), True
            self.call_later(self._say, *said)

        threading.Thread(target=run, name="top act", daemon=True).start()

    def _say(self, text: str, is_error: bool = False) -> None:
        self.notify(plain(text), severity="error" if is_error else "information", timeout=8, markup=False)
