"""The state of weights and KV cache: what changes for each sleep and wake-up, and what is refused meanwhile."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from ringcore.engine_core.memory.methods import MemoryMethods
from ringcore.engine_core.memory.states import MemoryStates
from ringcore.errors import InvalidRequestError, SleepingError
from ringcore.protocol.codec import decoder, encoder
from ringcore.protocol.messages import ClientMessage, Operate
from ringcore.protocol.operations import OPERATIONS, Sleep, UpdateWeights, WakeUp, operation_of


def states_after(*changes):
    """Of levels and tags, one after the other, each confirmed."""
    states = MemoryStates()
    for change in changes:
        states.confirm(states.sleep_target(change) if isinstance(change, int) else states.wake_target(change))
    return states


BOTH = ["weights", "kv_cache"]


@pytest.mark.parametrize(
    ("changes", "weights", "kv_cache"),
    [
        ([], "resident", "resident"),
        ([0], "resident", "resident"),
        ([1], "offloaded", "discarded"),
        ([1, 1], "offloaded", "discarded"),
        ([2], "discarded", "discarded"),
        ([1, 2], "discarded", "discarded"),
        ([2, 1], "discarded", "discarded"),
        ([1, BOTH], "resident", "resident"),
        ([1, ["weights"]], "resident", "discarded"),
        ([1, ["kv_cache"]], "offloaded", "resident"),
        ([1, ["kv_cache"], ["weights"]], "resident", "resident"),
        ([1, ["kv_cache"], 1], "offloaded", "discarded"),
        ([1, ["weights"], 2], "discarded", "discarded"),
        ([2, BOTH], "stale", "resident"),
        ([2, ["kv_cache"]], "discarded", "resident"),
        ([2, BOTH, BOTH], "stale", "resident"),
        ([2, BOTH, 1], "discarded", "discarded"),
        ([2, BOTH, 2], "discarded", "discarded"),
        ([BOTH], "resident", "resident"),
    ],
)
def test_changes(changes, weights, kv_cache):
    states = states_after(*changes)
    assert states.as_dict() == {"weights": weights, "kv_cache": kv_cache}
    is_away = {weights, kv_cache} & {"offloaded", "discarded"}
    assert states.is_sleeping == bool(is_away)
    assert states.serves == (weights == kv_cache == "resident")
    assert states.not_resident().keys() == {tag for tag, state in states.as_dict().items() if state in is_away}


def test_a_change_that_was_made_has_nothing_left_to_do():
    for changes in itertools.product([1, 2, BOTH, ["weights"], ["kv_cache"]], repeat=3):
        states = states_after(*changes)
        last = changes[-1]
        assert (states.sleep_target(last) if isinstance(last, int) else states.wake_target(last)) == {}


def test_weights_come_before_pages():
    assert list(states_after(1).wake_target(["kv_cache", "weights"])) == BOTH


def test_the_lightest_sleep_is_a_hold():
    states = MemoryStates()
    states.is_stopped = True
    assert states.is_sleeping
    assert not states.serves
    states.check_takes_requests()  # they queue


def test_an_update_and_its_failure():
    states = states_after(2, ["weights"])
    states.check_takes_weights()
    states.begin_update()
    states.fail_update()
    assert (states["weights"], states.is_updating) == ("stale", False)
    states.begin_update()
    states.end_update()
    assert (states["weights"], states.is_updating) == ("resident", False)
    states.confirm(states.wake_target(BOTH))
    assert states.serves


def test_sleep_ends_an_update():
    states = MemoryStates()
    states.begin_update()
    states.confirm(states.sleep_target(1))
    assert (states["weights"], states.is_updating) == ("discarded", False)


@pytest.mark.parametrize(
    ("make", "remedy", "tags"),
    [
        (lambda: states_after(1), "wake_up", ["kv_cache", "weights"]),
        (lambda: states_after(1, ["weights"]), "wake_up", ["kv_cache"]),
        (lambda: states_after(2, BOTH), "reload_weights", ["weights"]),
    ],
)
def test_requests_are_refused_with_the_remedy(make, remedy, tags):
    with pytest.raises(SleepingError, match=rf"call {remedy}\(") as caught:
        make().check_takes_requests()
    assert caught.value.details == {"tags": tags, "remedy": remedy}


def test_requests_are_refused_in_an_update():
    states = MemoryStates()
    states.begin_update()
    with pytest.raises(SleepingError, match=r"in progress: call finish_weight_update\(\) first"):
        states.check_takes_requests()


def test_weights_need_their_memory():
    with pytest.raises(SleepingError, match=r"weights discarded; call wake_up\(\['weights'\]\) first"):
        states_after(2, ["kv_cache"]).check_takes_weights()


@pytest.mark.parametrize("level", [-1, 3, 1.0, "1", None, True])
def test_a_level_that_is_none(level):
    with pytest.raises(InvalidRequestError, match="level="):
        operation_of("sleep", [level], {})


@pytest.mark.parametrize("tags", [[], "weights", ["weight"], ["weights", "graphs"], 3, [None]])
def test_tags_that_are_none(tags):
    with pytest.raises(InvalidRequestError, match="'weights', 'kv_cache'"):
        operation_of("wake_up", [tags], {})


def test_no_tags_are_all():
    assert operation_of("wake_up", [], {}) == operation_of("wake_up", [None], {}) == WakeUp()
    assert list(states_after(2, []).wake_target(None)) == BOTH


def test_each_operation_is_a_method_of_every_front_end():
    methods = {name for name, member in vars(MemoryMethods).items() if callable(member) and name[0] != "_"}
    assert set(OPERATIONS) == methods - {"is_sleeping"}


@pytest.mark.parametrize("operation", [Sleep(2, "wait"), WakeUp(["weights"]), UpdateWeights({"kind": "x", "n": b"1"})])
def test_an_operation_arrives_as_it_was_sent_and_is_checked(operation):
    sent = encoder().encode(Operate(1, operation, 2.5))
    assert decoder(ClientMessage).decode(sent) == Operate(1, operation, 2.5)
    with pytest.raises(msgspec.ValidationError, match=r"\$.operation"):
        decoder(ClientMessage).decode(encoder().encode(Operate(1, Sleep(7))))
