"""Columns of outputs are read back request by request."""

from __future__ import annotations

import msgspec
import numpy as np

from ringcore.protocol.codec import decoder, encoder, int_array
from ringcore.protocol.messages import EngineMessage
from ringcore.protocol.output_reader import OutputReader, output_columns, split_into_messages
from ringcore.protocol.requests import (
    EngineCoreOutput,
    EngineStats,
    OutputColumns,
    PromptLogprobs,
    StartedRequest,
    TokenLogprobs,
)

STATS = EngineStats(3, 2, 1, 9, 0, 0, 0)


def started(row: int, request_id: str, num_cached_tokens: int = 0) -> StartedRequest:
    return StartedRequest(row, request_id, num_cached_tokens, 1.5, 0)


def columns(rows=(), token_ids=(), *, new=(), logprobs=None, others=(), prompts=(), num_gained=None) -> OutputColumns:
    num_gained = num_gained if num_gained is None else int_array(num_gained)
    tokens = int_array(rows), int_array(token_ids), logprobs
    return over_the_wire(OutputColumns(list(new), *tokens, list(others), STATS, list(prompts), num_gained))


def over_the_wire(sent: OutputColumns) -> OutputColumns:
    """As it arrives at the other end."""
    return decoder(EngineMessage).decode(encoder().encode(sent))


def prompt_logprobs(row: int, count: int = 1, num_positions: int = 2) -> PromptLogprobs:
    num = num_positions * (1 + count)
    return PromptLogprobs(
        row, count, np.arange(num, dtype=np.int32), np.linspace(-3, 0, num, dtype=np.float32), int_array([1] * num)
    )


def as_lists(told: PromptLogprobs | None) -> tuple | None:
    return told and (told.row, told.count, told.token_ids.tolist(), told.logprobs.tolist(), told.ranks.tolist())


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


def test_each_row_gains_its_own_number():
    reader = OutputReader()
    new = [started(row, name) for row, name in enumerate("abc")]
    own = [TokenLogprobs([token], [-0.5], [1]) for token in (2, 3, 4)]
    logprobs = [None, *own, None, None]
    sent = columns([0, 1, 2], [1, 2, 3, 4, 5, 6], new=new, logprobs=logprobs, num_gained=[1, 3, 2])
    outputs = reader.read(sent)
    assert tokens(outputs) == [("a", [1]), ("b", [2, 3, 4]), ("c", [5, 6])]
    assert [output.logprobs for output in outputs] == [None, own, None]


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


def test_prompt_logprobs_go_to_the_row_that_asked():
    new = [started(0, "a"), started(1, "b")]
    last = EngineCoreOutput("c", [3], finish_reason="length", prompt_logprobs=prompt_logprobs(7))
    a, b, c = OutputReader().read(columns([1, 0], [4, 5], new=new, prompts=[prompt_logprobs(0)], others=[last]))
    assert [output.request_id for output in (a, b, c)] == ["b", "a", "c"]
    assert a.prompt_logprobs is None
    assert as_lists(b.prompt_logprobs) == as_lists(prompt_logprobs(0))
    assert b.prompt_logprobs.logprobs.dtype == np.float32
    assert as_lists(c.prompt_logprobs) == as_lists(prompt_logprobs(7))


def test_most_columns_are_one_message():
    sent = columns([0], [7], new=[started(0, "a")], logprobs=[TokenLogprobs([7], [-1.0], [1])])
    assert list(split_into_messages(sent)) == [sent]


def test_rows_with_numbers_of_their_own_go_in_several_messages():
    wide = [TokenLogprobs([i, *range(400_000)], [-0.5] * 400_001, [1] * 400_001) for i in range(3)]
    new = [started(0, "a"), started(1, "b")]
    sent = columns([1, 0], [4, 5, 6], new=new, logprobs=wide, num_gained=[2, 1])
    messages = list(split_into_messages(sent))
    assert len(messages) > 2
    reader = OutputReader()
    assert [one for message in messages for one in reader.read(over_the_wire(message))] == OutputReader().read(sent)


def test_large_vocabularies_go_in_several_messages_that_say_the_same():
    wide = TokenLogprobs(list(range(300_000)), [-0.5] * 300_000, list(range(300_000)))
    new = [started(row, name) for row, name in enumerate("abcd")]
    others = [EngineCoreOutput("e", [9], [wide], "length"), EngineCoreOutput("f", [8], finish_reason="length")]
    logprobs = [wide, None, wide, None]
    sent = columns(
        [2, 0, 1, 3], [4, 5, 6, 7], new=new, logprobs=logprobs, others=others, prompts=[prompt_logprobs(3, 300_000, 2)]
    )
    messages = [encoder().encode(message) for message in split_into_messages(sent)]
    assert max(map(len, messages)) < 20 << 20
    reader, one_by_one = OutputReader(), []
    for message in messages:
        one_by_one += reader.read(decoder(EngineMessage).decode(message))
    at_once = OutputReader().read(sent)
    for outputs in (one_by_one, at_once):
        told = [as_lists(output.prompt_logprobs) for output in outputs]
        assert [one is not None for one in told] == [False, False, False, True, False, False]
    bare = [
        [msgspec.structs.replace(one, prompt_logprobs=None) for one in outputs] for outputs in (one_by_one, at_once)
    ]
    assert bare[0] == bare[1]
