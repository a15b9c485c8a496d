"""Columns of outputs are read back request by request."""

from __future__ import annotations

from ringcore.engine_core.output_reader import OutputReader, output_columns
from ringcore.protocol import (
    EngineCoreOutput,
    EngineMessage,
    EngineStats,
    OutputColumns,
    StartedRequest,
    TokenLogprobs,
    decoder,
    encoder,
    int_array,
)

STATS = EngineStats(3, 2, 1, 9, 0, 0, 0)


def started(row: int, request_id: str, num_cached_tokens: int = 0) -> StartedRequest:
    return StartedRequest(row, request_id, num_cached_tokens, 1.5, 0)


def columns(rows=(), token_ids=(), *, new=(), logprobs=None, others=()) -> OutputColumns:
    """As it arrives at the other end of the wire."""
    sent = OutputColumns(list(new), int_array(rows), int_array(token_ids), logprobs, list(others), STATS)
    return decoder(EngineMessage).decode(encoder().encode(sent))


def tokens(outputs: list[EngineCoreOutput]) -> list[tuple[str, list[int]]]:
    return [(output.request_id, output.new_token_ids) for output in outputs]


def test_a_row_stands_for_its_request_until_another_gets_it():
    reader = OutputReader()
    assert tokens(reader.read(columns([2, 0], [7, 8], new=[started(0, "a"), started(2, "b")]))) == [
        ("b", [7]),
        ("a", [8]),
    ]
    assert tokens(reader.read(columns([0], [9]))) == [("a", [9])]
    assert tokens(reader.read(columns([0], [5], new=[started(0, "c")]))) == [("c", [5])]


def test_started_and_ended_before_anything_was_told():
    reader = OutputReader()
    new = [started(0, "a"), started(0, "b")]
    assert tokens(reader.read(columns([0], [4], new=new))) == [("b", [4])]


def test_what_is_known_of_the_start_is_in_every_output():
    reader = OutputReader()
    for outputs in (reader.read(columns([1], [7], new=[started(1, "a", 16)])), reader.read(columns([1], [8]))):
        (output,) = outputs
        assert (output.num_cached_tokens, output.first_scheduled_s, output.num_preemptions) == (16, 1.5, 0)


def test_several_steps_in_one():
    reader = OutputReader()
    outputs = reader.read(columns([0, 1], [1, 2, 3, 4, 5, 6], new=[started(0, "a"), started(1, "b")]))
    assert tokens(outputs) == [("a", [1, 2, 3]), ("b", [4, 5, 6])]


def test_logprobs_go_to_those_who_asked():
    one, two = TokenLogprobs([4], [-0.5], [1]), TokenLogprobs([5], [-0.25], [1])
    new = [started(0, "a"), started(1, "b")]
    a, b = OutputReader().read(columns([0, 1], [3, 3, 4, 5], new=new, logprobs=[None, None, one, two]))
    assert a.logprobs is None
    assert b.logprobs == [one, two]


def test_last_outputs_come_last():
    last = EngineCoreOutput("b", [3], finish_reason="length")
    outputs = OutputReader().read(columns([0], [7], new=[started(0, "a")], others=[last]))
    assert tokens(outputs) == [("a", [7]), ("b", [3])]
    assert OutputReader().read(output_columns([last], STATS)) == [last]
