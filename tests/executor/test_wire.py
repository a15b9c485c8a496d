"""Envelopes there and back, and what is none."""

from __future__ import annotations

import pytest

from ringcore.executor.ring_memory import RingCorruptError
from ringcore.executor.wire import (
    CALL,
    CALLABLE,
    STEP,
    CallHead,
    pack_call,
    pack_reply,
    pack_step,
    unpack_call,
    unpack_reply,
)


def views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


@pytest.mark.parametrize(
    ("head", "method"),
    [
        ((2**40, CALL, None), "stats"),
        ((1, CALL, 0), "état"),
        ((2, CALLABLE, 7), "test.<locals>.<lambda>"),
    ],
)
@pytest.mark.parametrize("by_engine", [False, True])
def test_a_call_there_and_back(head, method, by_engine):
    sent = CallHead(*head, method, by_engine)
    packed = pack_call(sent, [b"body", b"buffer"])
    assert len(packed) == 2
    found, request = unpack_call(views(*packed))
    assert found == sent
    assert [bytes(part) for part in request] == [b"body", b"buffer"]


def test_a_step_names_no_method():
    assert unpack_call(views(*pack_step(5, b"")))[0] == CallHead(5, STEP, None, "execute_model")


def test_a_long_name_is_cut():
    head, _ = unpack_call(views(*pack_call(CallHead(5, CALLABLE, None, "x" * 5000), [b""])))
    assert head.method == "x" * 200


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b""],
        [b"short", b"x"],
        [b"x" * 1000],
        pack_call(CallHead(1, 9, None, "m"), [b"x"]),
        [pack_call(CallHead(1, CALL, None, "abc"), [b""])[0][:-1]],
    ],
)
def test_what_is_no_call(parts):
    with pytest.raises(RingCorruptError):
        unpack_call(views(*parts))


def test_a_reply_there_and_back():
    call_id, kind, is_error, parts = unpack_reply(views(*pack_reply(3, 1, CALL, True, [b"error"])), 1)
    assert (call_id, kind, is_error, [bytes(part) for part in parts]) == (3, CALL, True, [b"error"])


@pytest.mark.parametrize("parts", [[], [b""], [b"x", b"y"], pack_reply(3, 2, CALL, False, [b""])])
def test_what_is_no_reply_of_this_rank(parts):
    with pytest.raises(RingCorruptError):
        unpack_reply(views(*parts), 1)
