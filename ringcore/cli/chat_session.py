"""A conversation: its messages, and the commands that change it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ringcore.errors import InvalidRequestError

__all__ = ["COMMANDS", "ChatSession", "MessageReader", "complete_command"]

_BLOCK = '"""'


@dataclass
class ChatSession:
    """messages: without the system's. params: sampling parameters by name."""

    system: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def asked(self) -> list[dict[str, str]]:
        """What the model is given."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.messages]

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def run_command(self, line: str) -> str | None:
        """What a command says; None for one that ends the conversation. Raises `InvalidRequestError`."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return None
        if name not in COMMANDS:
            raise InvalidRequestError(
                f"{name}: no such command; /help lists them, and a message may begin with a space", field="command"
            )
        return COMMANDS[name](self, rest.strip())

    # Each takes what follows its name.

    def _help(self, rest: str) -> str:
        lines = [f"{usage:<24} {doc}" for usage, doc in _USAGE.items()]
        return "\n".join([*lines, f"A line that ends with \\ goes on; so does what is between two lines of {_BLOCK}."])

    def _reset(self, rest: str) -> str:
        self.messages.clear()
        return "the conversation begins anew"

    def _system(self, rest: str) -> str:
        self.system = rest or None
        return "no system message" if self.system is None else "system message set"

    def _params(self, rest: str) -> str:
        for part in rest.split():
            name, equals, text = part.partition("=")
            if not equals:
                raise InvalidRequestError(f"params: {part!r}: give NAME=VALUE, as temperature=0.2", field="params")
            value = _value(text)
            if value is None:
                self.params.pop(name, None)
            else:
                self.params[name] = value
        return " ".join(f"{name}={json.dumps(value)}" for name, value in self.params.items()) or "the model's defaults"

    def _save(self, rest: str) -> str:
        if not rest:
            raise InvalidRequestError("save: give a file, as /save talk.json", field="save")
        saved = {"messages": self.asked(), "params": self.params}
        try:
            Path(rest).expanduser().write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequestError(f"save: {rest!r} cannot be written: {error}", field="save") from error
        return f"saved to {rest}"

    def _load(self, rest: str) -> str:
        try:
            saved = msgspec.json.decode(Path(rest).expanduser().read_bytes(), type=_Saved)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"load: {rest!r} is no saved conversation: {error}", field="load") from error
        messages = saved.messages
        self.system = messages[0]["content"] if messages and messages[0].get("role") == "system" else None
        self.messages = [one for one in messages if one.get("role") != "system"]
        self.params = saved.params
        return f"{len(self.messages)} messages"


class _Saved(msgspec.Struct):
    messages: list[dict[str, str]]
    params: dict[str, Any] = {}


_USAGE = {
    "/reset": "forgets the conversation",
    "/system TEXT": "sets the system message; without TEXT there is none",
    "/params [NAME=VALUE ...]": "sets sampling parameters (null unsets one), and shows them",
    "/save FILE": "writes the conversation as JSON",
    "/load FILE": "goes on with one that was saved",
    "/help": "lists the commands",
    "/exit": "ends, as Ctrl-D does; Ctrl-C stops an answer",
}
COMMANDS: Mapping[str, Callable[[ChatSession, str], str]] = {
    "/help": ChatSession._help,
    "/reset": ChatSession._reset,
    "/system": ChatSession._system,
    "/params": ChatSession._params,
    "/save": ChatSession._save,
    "/load": ChatSession._load,
}


class MessageReader:
    """Puts the lines of a message together. read_line: takes whether the line continues a message; raises `EOFError`
    at the end of the input."""

    def __init__(self, read_line: Callable[[bool], str]) -> None:
        self._read_line = read_line

    def read(self) -> str:
        """The next message or command. Raises `EOFError` once there is none."""
        line = self._read_line(False)
        if line.strip() == _BLOCK:
            return self._read_block()
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._read_line(True))
            except EOFError:
                break
        return "\n".join(lines)

    def _read_block(self) -> str:
        lines: list[str] = []
        try:
            while (line := self._read_line(True)).strip() != _BLOCK:
                lines.append(line)
        except EOFError:
            pass
        return "\n".join(lines)


def _value(text: str) -> Any:
    """JSON, or else the text itself."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text


def complete_command(text: str) -> Sequence[str]:
    """The commands that begin so."""
    return [name for name in (*COMMANDS, "/exit") if name.startswith(text)]
