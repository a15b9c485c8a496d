"""What a client has received and nobody has taken yet."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from ringcore.engine_core.transport.channel import Received
from ringcore.errors import CapacityError, EngineDeadError
from ringcore.front_end.mailbox import Mailbox
from ringcore.protocol.messages import EngineReady, RpcResult
from ringcore.protocol.output_reader import output_columns
from ringcore.protocol.requests import EngineCoreOutput, EngineStats
from ringcore.protocol.wire_errors import wire_error
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


# An engine that was adopted is ready once it has woken up.

READY = EngineReady(9, 16, 144, 64, 2.25, {"start_workers": 3.0}, [], {"engine": 7}, 512)


def waking(*answers: RpcResult) -> Mailbox:
    messages = [Received(one, []) for one in answers]
    mailbox = Mailbox(Connection(on_wait=lambda: None, incoming=messages, is_listening=False), Tracer())
    mailbox.be_ready_after([0, 1], READY, began_s=0.0)
    mailbox.receive()
    return mailbox


def test_an_adopted_engine_is_ready_after_its_last_call():
    assert waking(RpcResult(0, [])).ready is None
    ready = waking(RpcResult(0, []), RpcResult(1, [])).ready
    assert ready.pids == READY.pids
    assert list(ready.phase_seconds) == ["adopt_parked"]


def test_an_adopted_engine_that_cannot_wake_up_is_dead_of_that():
    short = CapacityError("too little memory", needed_bytes=5)
    mailbox = waking(RpcResult(0, [], error=wire_error(short)), RpcResult(1, []))
    assert mailbox.ready is None
    with pytest.raises(CapacityError, match="too little memory"):
        mailbox.check_alive()


def test_an_adopted_engine_that_had_lost_its_workers_has_its_last_report():
    other = msgspec.structs.replace(READY, num_blocks=8)
    assert waking(other, RpcResult(0, []), RpcResult(1, [])).ready.num_blocks == 8
