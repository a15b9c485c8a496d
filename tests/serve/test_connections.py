"""Which connection gives way, without a socket."""

from __future__ import annotations

import random

import pytest

from ringcore.errors import ConfigError
from ringcore.serve.connections import Connections, State
from ringcore.serve.descriptors import NUM_RESERVED, fit_connections


class Fake:
    """A connection that notes how it ended."""

    def __init__(self, register: Connections, peer: str = "10.0.0.1") -> None:
        self.is_evicted = False
        self.refusal = register.admit(self, peer)

    def evict(self) -> None:
        assert not self.is_evicted
        self.is_evicted = True


def test_the_oldest_without_a_head_gives_way():
    register = Connections(3, None)
    idle, first, second = (Fake(register) for _ in range(3))
    register.set_state(idle, State.BUSY)
    register.set_state(idle, State.IDLE)
    third = Fake(register)
    assert [c.is_evicted for c in (idle, first, second, third)] == [False, True, False, False]
    assert third.refusal is None
    assert len(register) == 3


def test_then_the_longest_idle_one():
    register = Connections(2, None)
    early, late = Fake(register), Fake(register)
    for one in (early, late, early):
        register.set_state(one, State.BUSY)
        register.set_state(one, State.IDLE)
    new = Fake(register)
    assert [c.is_evicted for c in (early, late, new)] == [False, True, False]


def test_where_all_are_busy_a_new_one_is_refused():
    register = Connections(2, None)
    busy = [Fake(register) for _ in range(2)]
    for one in busy:
        register.set_state(one, State.BUSY)
    reserved = [Fake(register) for _ in range(NUM_RESERVED)]
    assert {one.refusal.status for one in reserved} == {503}
    assert reserved[0].refusal.headers["Retry-After"] == "1"
    register.set_state(reserved[0], State.BUSY)
    more = [Fake(register) for _ in range(NUM_RESERVED)]
    assert all(one.is_evicted for one in reserved)  # the busy one too: in the reserve the oldest gives way
    assert not any(one.is_evicted for one in (*busy, *more))
    assert len(register) == 2 + NUM_RESERVED
    register.remove(busy[0])
    assert Fake(register).refusal is None


def test_a_peer_has_its_own_bound():
    register = Connections(10, 2)
    first, second = Fake(register), Fake(register)
    other = Fake(register, "10.0.0.2")
    third = Fake(register)
    assert [c.is_evicted for c in (first, second, other, third)] == [True, False, False, False]
    for one in (second, third):
        register.set_state(one, State.BUSY)
    fourth = Fake(register)
    assert fourth.refusal.status == 429
    assert "max_connections_per_peer=2" in fourth.refusal.message
    assert Fake(register, "10.0.0.2").refusal is None
    register.remove(second)
    assert Fake(register).refusal is None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_per_peer", [None, 1, 3])
def test_whatever_happens_the_bounds_hold(seed, max_per_peer):
    rng = random.Random(seed)
    limit = rng.randrange(1, 6)
    register, living = Connections(limit, max_per_peer), []
    for _ in range(1500):
        action = rng.random()
        living = [c for c in living if not c.is_evicted or rng.random() < 0.5]  # closed a while after
        if action < 0.4 or not living:
            living.append(Fake(register, f"10.0.0.{rng.randrange(3)}"))
        elif action < 0.8:
            register.set_state(rng.choice(living), rng.choice([State.BUSY, State.IDLE]))
        else:
            register.remove(living.pop(rng.randrange(len(living))))
        members = [c for c in living if not c.is_evicted]
        assert len([c for c in members if c.refusal is None]) <= limit
        assert len(register) == len(members) <= limit + NUM_RESERVED
    for one in living:
        register.remove(one)
        register.remove(one)
    assert len(register) == 0
    assert not register._by_peer


def test_as_many_as_there_are_descriptors(monkeypatch):
    monkeypatch.setattr("os.listdir", lambda _: ["0"] * 50)
    for limit, fitting in ((1024, 1024 - 50 - 128), (-1, 4096), (1 << 20, 4096)):
        monkeypatch.setattr("resource.getrlimit", lambda _, limit=limit: (limit, limit))
        assert fit_connections(4096) == fitting
    monkeypatch.setattr("resource.getrlimit", lambda _: (100, 100))
    with pytest.raises(ConfigError, match="RLIMIT_NOFILE=100 leaves no descriptor") as caught:
        fit_connections(4096)
    assert caught.value.details["option"] == "max_connections"
