"""One call to several engines of this host at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from ringcore.cli.call_values import as_json, in_words
from ringcore.cli.engine_call import EngineCall, explained
from ringcore.cli.tables import printable
from ringcore.errors import RingcoreError
from ringcore.front_end.admin_client import AdminClient
from ringcore.front_end.local_engines import LocalEngine

__all__ = ["EngineAnswer", "call_each", "check_answers"]


class EngineAnswer(NamedTuple):
    """values: of each rank; rank None: the engine's own. error: in place of them."""

    engine: LocalEngine
    values: dict[int | None, Any]
    error: RingcoreError | None = None

    def in_words(self) -> list[str]:
        lines = [f"failed: {printable(self.error.message)}"] if self.error is not None else in_words(self.values)
        return [printable(str(self.engine)), *(f"  {line}" for line in lines)]

    def as_json(self) -> list[str]:
        """An object for each rank, or one with the error."""
        whose = {"pid": self.engine.pid or self.engine.name.pid, "engine_id": self.engine.engine_id}
        if self.error is not None:
            return [as_json(whose | {"error": {"type": type(self.error).__name__, "message": self.error.message}})]
        return [as_json(whose | {"rank": rank, "value": value}) for rank, value in self.values.items()]


def call_each(call: EngineCall, engines: Sequence[LocalEngine]) -> Iterator[EngineAnswer]:
    """The answer of each, in their order; an engine that fails, or does not answer, delays none of the others."""
    with ThreadPoolExecutor(len(engines), thread_name_prefix="call") as threads:
        yield from threads.map(partial(_answer, call), engines)


def _answer(call: EngineCall, engine: LocalEngine) -> EngineAnswer:
    try:
        with AdminClient.local(engine) as client:
            return EngineAnswer(engine, call.on(client))
    except RingcoreError as error:
        return EngineAnswer(engine, {}, explained(error, engine))


def check_answers(answers: Sequence[EngineAnswer]) -> None:
    """Raises the error of the only engine, or one that counts those that failed."""
    errors = [one.error for one in answers if one.error is not None]
    if len(answers) == 1 and errors:
        raise errors[0]
    if errors:
        raise RingcoreError(f"{len(errors)} of {len(answers)} engines failed: {errors[0].message}")
