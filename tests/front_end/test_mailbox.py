"""What a client has received and nobody has taken yet."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ringcore.engine_core.transport.channel import Received
from ringcore.errors import EngineDeadError
from ringcore.front_end.mailbox import Mailbox
from ringcore.protocol.output_reader import output_columns
from ringcore.protocol.requests import EngineCoreOutput, EngineStats
from ringcore.tracing import Tracer

STATS = EngineStats(1, 0, 0, 9, 0, 0, 0)


def arrived(token: int) -> Received:
    return Received(output_columns([EngineCoreOutput("a", [token], finish_reason="length")], STATS), [])


class Connection(SimpleNamespace):
    """Gives its messages at once; `on_wait` is what another thread does meanwhile."""

    def wait(self, timeout_s: float | None) -> None:
        self.on_wait()

    def death(self) -> None:
        return None

    def messages(self):
        while self.incoming:
            yield self.incoming.pop(0)


def test_what_has_arrived_goes_before_a_death():
    connection = Connection(on_wait=lambda: None, incoming=[arrived(1)])
    mailbox = Mailbox(connection, Tracer())
    mailbox.receive()
    mailbox.mark_dead(EngineDeadError("it ended", process="engine"))
    assert mailbox.take_outputs(None).outputs[0].new_token_ids == [1]
    with pytest.raises(EngineDeadError, match="it ended"):
        mailbox.take_outputs(None)


def test_what_a_thread_receives_after_the_end_is_nobodys():
    connection = Connection(incoming=[arrived(1)])
    mailbox = Mailbox(connection, Tracer())
    connection.on_wait = lambda: mailbox.mark_dead(EngineDeadError("closed", process="engine"))
    mailbox.receive(1.0)  # as a call of another thread does
    assert connection.incoming == []
    with pytest.raises(EngineDeadError, match="closed"):
        mailbox.take_outputs(None)
    assert mailbox.stats == STATS
