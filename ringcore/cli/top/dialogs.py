"""The screens over the view: a question, the engines to choose from, and help. Every text is shown as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from ringcore.cli.top.figures import plain
from ringcore.cli.top.source import Choice

__all__ = ["Confirm", "EngineList", "Help"]

_HELP = """\
p  pause: running requests go on, no new one starts; again: resume
a  abort the selected request: its reader gets the finish reason abort
d  dump: state and stacks of all processes, as JSON in this folder
s  sleep: give device memory back; again: wake up
e  choose another engine
q  quit; the engine goes on
up, down: select a request; tab: scroll what does not fit

Requests   held: while it is found out which request kills workers
           compiling: their grammar is
Tokens     generated: sampled; computed: all of a step, prompts too
           prefix hits: found in the cache, now (and since the start)
           drafts: of speculative decoding, those that were accepted
Steps      launch: to the workers; wait: for them; send: to the client
           step: from the end of one to the end of the next
KV cache   a character shows what most of its blocks are
Processes  CPU of one core; GPU figures are of the whole card"""


class Confirm(ModalScreen[bool]):
    """y or enter: yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y,enter", "close(True)", "yes"),
        Binding("n,escape,q", "close(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__(classes="dialog")
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(Text(f"{self._question}\n\ny  yes    n  no"))

    def action_close(self, is_yes: bool) -> None:
        self.dismiss(is_yes)


class EngineList(ModalScreen[Choice | None]):
    AUTO_FOCUS = "OptionList"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "close", "close")]

    def __init__(self, choices: Sequence[Choice]) -> None:
        super().__init__(classes="dialog")
        self._choices = choices

    def compose(self) -> ComposeResult:
        if not self._choices:
            yield Static(Text("no engine of this user runs here\n\nescape  close"))
            return
        options = [
            Option(Text(f"{plain(one.name, 40)}  ").append(plain(one.description, 100), style="grey58"))
            for one in self._choices
        ]
        yield OptionList(*options)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._choices[event.option_index])

    def action_close(self) -> None:
        self.dismiss(None)


class Help(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,h,enter", "close", "close")]

    def __init__(self) -> None:
        super().__init__(classes="dialog")

    def compose(self) -> ComposeResult:
        yield Static(Text(_HELP))

    def action_close(self) -> None:
        self.dismiss(None)
