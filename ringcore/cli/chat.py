"""`ringcore chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ringcore.cli.options import engine_options, given, sampling_options, with_options
from ringcore.errors import ConfigError, RingcoreError

if TYPE_CHECKING:
    import asyncio

    from ringcore.cli.chat_backends import ChatBackend, Piece
    from ringcore.cli.chat_session import ChatSession, MessageReader

__all__ = ["make_chat"]

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def make_chat() -> Callable[..., None]:
    """The command, with a flag for every sampling parameter and engine option."""
    return with_options(chat, [*sampling_options(), *_engine_flags()])


def _engine_flags() -> list[Any]:
    return [option for option in engine_options() if option.name != "model"]


def chat(
    model: Annotated[
        str | None, typer.Option(help="a model folder, a .gguf file or a hub id; with --url the service's name for it")
    ] = None,
    url: Annotated[str | None, typer.Option(help="a service with OpenAI's interface")] = None,
    api_key: Annotated[str | None, typer.Option(help="the key for --url; visible to other users")] = None,
    system: Annotated[str | None, typer.Option(help="the system message")] = None,
    **options: Any,
) -> None:
    """Talks to a model in this process, or behind a URL. Reasoning is shown dim, where the terminal can.

    Ctrl-C stops an answer, Ctrl-D ends. /help lists the commands: /reset, /system, /params, /save, /load.
    If the input is no terminal each of its lines is a message.

    Examples:

    \b
      ringcore chat --model ./model --temperature 0.7
      ringcore chat --url http://127.0.0.1:8000 --system "Answer in one sentence."
      echo "Why is the sky blue?" | ringcore chat --model ./model --max-tokens 200
    """
    if model is None and url is None:
        raise ConfigError("model: give --model, or --url", option="model", value=None)
    engine = given(options, _engine_flags())
    if url is not None and engine:
        name = next(iter(engine))
        raise ConfigError(
            f"{name}: an option of an engine in this process; leave it out, or --url", option=name, value=engine[name]
        )
    import asyncio

    from ringcore.cli.chat_session import ChatSession, MessageReader
    from ringcore.params.sampling_params import SamplingParams

    params = given(options, sampling_options())
    SamplingParams(**params)  # raises before a model is loaded
    terminal = _Terminal(sys.stdin, sys.stdout)
    with asyncio.Runner() as runner:
        opening = _opened(model, url, api_key, engine)
        backend = runner.run(opening.__aenter__())
        try:
            _talk(runner, backend, ChatSession(system, params), MessageReader(terminal.read_line), terminal)
        finally:
            runner.run(opening.__aexit__(None, None, None))


@asynccontextmanager
async def _opened(
    model: str | None, url: str | None, api_key: str | None, engine: dict[str, Any]
) -> AsyncIterator[ChatBackend]:
    from ringcore.cli.chat_backends import EngineChat, UrlChat

    if url is not None:
        from ringcore.http_client import OpenAIClient

        async with OpenAIClient(url, api_key) as client:
            yield UrlChat(client, model or (await client.model_names())[0])
        return
    from ringcore.front_end.async_engine import AsyncEngine

    assert model is not None, "checked before"
    async with AsyncEngine(model, **engine) as started:
        yield EngineChat(started)


def _talk(
    runner: asyncio.Runner, backend: ChatBackend, session: ChatSession, reader: MessageReader, terminal: _Terminal
) -> None:
    """Until the end of the input, or /exit."""
    while True:
        try:
            message = reader.read()
        except KeyboardInterrupt:  # drops the line, as a shell does
            terminal.end_line()
            continue
        except EOFError:
            terminal.end_line()
            return
        try:
            if message.startswith("/"):
                said = session.run_command(message)
                if said is None:
                    return
                terminal.tell(said)
            elif message.strip():
                _answer(runner, backend, session, message, terminal)
        except RingcoreError as error:
            terminal.tell(f"ringcore: {error.message}")


def _answer(
    runner: asyncio.Runner, backend: ChatBackend, session: ChatSession, message: str, terminal: _Terminal
) -> None:
    """Ctrl-C cuts the answer off; what came of it stays in the conversation, and a failed one is forgotten."""
    session.add("user", message)
    pieces: list[str] = []
    try:
        runner.run(_show(backend, session, pieces, terminal))
    except KeyboardInterrupt:
        terminal.tell(" (stopped)")
    except RingcoreError:
        session.messages.pop()
        terminal.end_line()
        raise
    session.add("assistant", "".join(pieces))


async def _show(backend: ChatBackend, session: ChatSession, pieces: list[str], terminal: _Terminal) -> None:
    """Fills `pieces` with the answer, without its reasoning."""
    async for piece in backend.answer(session.asked(), session.params):
        if not piece.is_reasoning:
            pieces.append(piece.text)
        terminal.show(piece)
    terminal.end_line()


class _Terminal:
    """Reads and writes, with prompts and colours where both ends are a terminal."""

    def __init__(self, source: TextIO, sink: TextIO) -> None:
        self._source, self._sink = source, sink
        self._is_terminal = source.isatty() and sink.isatty()
        self._is_dim = False
        self._is_within_line = False
        if self._is_terminal:
            _use_readline()

    def read_line(self, continues: bool) -> str:
        if self._is_terminal:
            self._is_within_line = True
            line = input("… " if continues else "> ")
            self._is_within_line = False
            return line
        line = self._source.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")

    def show(self, piece: Piece) -> None:
        if self._is_terminal and piece.is_reasoning != self._is_dim:
            self._is_dim = piece.is_reasoning
            self._sink.write(_DIM if self._is_dim else f"{_PLAIN}\n")
        self._is_within_line = True
        self._sink.write(piece.text)
        self._sink.flush()

    def end_line(self) -> None:
        if self._is_dim:
            self._sink.write(_PLAIN)
        if self._is_within_line:
            self._sink.write("\n")
        self._is_dim = self._is_within_line = False
        self._sink.flush()

    def tell(self, text: str) -> None:
        """A line of the program's own."""
        self._sink.write(f"{_DIM}{text}{_PLAIN}" if self._is_terminal else text)
        self._is_within_line = True
        self.end_line()


def _use_readline() -> None:
    """Line editing and history, where Python has readline; Tab completes commands."""
    with suppress(ImportError):
        import readline

        from ringcore.cli.chat_session import complete_command

        def complete(text: str, state: int) -> str | None:
            return [*complete_command(text), None][state] if readline.get_begidx() == 0 else None

        readline.set_completer_delims(" ")
        readline.set_completer(complete)
        readline.parse_and_bind("tab: complete")
