"""Random changes, failures and writes of one rank's memory, against what its states promise."""

from __future__ import annotations

from typing import Any

import pytest
from device_kinds import PAGE
from fake_virtual_memory import FakeDevice
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rank_memory import LateLink, Rank
from samples import num_examples

from ringcore.errors import CapacityError, InvalidRequestError
from ringcore.worker.memory import arena as arena_module
from ringcore.worker.memory.host_link import LocalLink
from ringcore.worker.memory.host_store import HostBudget, MemoryStore

STATES = {"weights": ("resident", "offloaded", "discarded"), "kv_cache": ("resident", "discarded")}
ALL = list(HealthCheck)  # of which none says anything here
TARGETS = st.fixed_dictionaries({}, optional={tag: st.sampled_from(states) for tag, states in STATES.items()})


class RankMemoryMachine(RuleBasedStateMachine):
    """`states` is what the rank must say; `is_whole`: the weights hold, or will again, what was written last."""

    is_late = False  # whether copies are under way until somebody waits for them

    def __init__(self) -> None:
        super().__init__()
        self.host_free = 1 << 40
        self.copies_left: int | None = None  # until one fails; None: none does
        self.rank = Rank("fake", self._make_store, weights=(300, 9 * PAGE + 7, 4 * PAGE, 50))
        self.states = dict.fromkeys(STATES, "resident")
        self.target: dict[str, str] | None = None  # what is prepared
        self.is_whole, self.seed = True, 0
        self.tenants: list[Any] = []
        self.taken = 0

    def _make_store(self, num_bytes: int, device: FakeDevice) -> MemoryStore:
        link = LateLink(device) if self.is_late else LocalLink()
        copy = link.copy

        def failing_copy(source: Any, out: Any) -> Any:
            if self.copies_left is not None:
                self.copies_left -= 1
                if self.copies_left < 0:
                    self.copies_left = None
                    raise RuntimeError("the copy fails")
            return copy(source, out)

        link.copy = failing_copy  # type: ignore[method-assign]
        return MemoryStore(num_bytes, link, HostBudget(lambda: self.host_free, 1))

    @precondition(lambda self: self.target is None)
    @rule(wanted=TARGETS)
    def prepare(self, wanted: dict[str, str]) -> None:
        try:
            self.rank.memory.prepare(wanted)
        except Exception as error:
            self._check_reason(error, wanted)
        else:
            self.target = wanted

    def _check_reason(self, error: Exception, wanted: dict[str, str]) -> None:
        match error:
            case InvalidRequestError():
                assert (self.states["weights"], wanted.get("weights")) == ("discarded", "offloaded")
            case CapacityError():
                assert self.tenants or self.host_free < 1 << 40, "there is room"
                assert error.details["needed_bytes"] > error.details["available_bytes"]
            case _:
                assert isinstance(error, RuntimeError)
                assert "fails" in str(error)

    @precondition(lambda self: self.target is not None)
    @rule()
    def commit(self) -> None:
        assert self.target is not None
        self.rank.memory.commit()
        was = self.states
        self.states = self.states | self.target
        if self.states["weights"] == "discarded":
            self.is_whole = False
        if was["kv_cache"] == "discarded" and self.states["kv_cache"] == "resident":
            assert not self.rank.pages.any()
        self.target = None

    @rule()
    def roll_back(self) -> None:
        self.rank.memory.roll_back()
        self.target = None

    @precondition(lambda self: self.target is None and self.states["weights"] == "resident")
    @rule()
    def write(self) -> None:
        self.seed += 1
        if self.states["kv_cache"] == "resident":
            self.rank.write(self.seed)
        else:
            for tensor, written in zip(self.rank.weights, self.rank.written, strict=True):
                written.fill_(self.seed % 256)
                tensor.copy_(written)
        self.is_whole = True

    @rule(call=st.sampled_from(["create", "map", "set_access"]), count=st.integers(0, 7))
    def fail(self, call: str, count: int) -> None:
        self.rank.device.fail_after(call, count)

    @rule(host_free=st.sampled_from([0, 4 * PAGE, 1 << 40]), copies_left=st.sampled_from([None, 0, 1, 2]))
    def host(self, host_free: int, copies_left: int | None) -> None:
        self.host_free, self.copies_left = host_free, copies_left

    @rule(num_pages=st.integers(1, 60))
    def another_tenant(self, num_pages: int) -> None:
        if num_pages * PAGE > self.rank.device.free_bytes:
            return
        try:
            self.tenants.append(self.rank.device.create(num_pages * PAGE))
        except RuntimeError:
            return  # that was the call that was to fail
        self.taken += num_pages * PAGE

    @precondition(lambda self: self.tenants)
    @rule()
    def tenants_leave(self) -> None:
        for tenant in self.tenants:
            self.rank.device.release(tenant)
        self.tenants, self.taken = [], 0

    @rule()
    def steps_run(self) -> None:
        if self.rank.memory.is_resident:
            self.rank.device.launch(self.rank.pages)

    @invariant()
    def what_is_mapped_is_accounted(self) -> None:
        rank, device = self.rank, self.rank.device
        assert rank.memory.states == self.states
        mapped = sum(arena.mapped_bytes for arena in rank.arenas.values())
        assert sum(size for size, _ in device.mapped.values()) == mapped
        assert len(device.handles) == len(device.mapped) + len(self.tenants)
        assert device.free_bytes == rank.total_bytes - mapped - self.taken
        assert [tensor.data_ptr() for tensor in (*rank.weights, rank.pages)] == rank.addresses
        if self.target is None:
            for tag, arena in rank.arenas.items():
                assert arena.is_mapped == (self.states[tag] == "resident")

    @invariant()
    def whole_weights_are_as_written(self) -> None:
        if self.is_whole and self.rank.arenas["weights"].is_mapped and self._are_there():
            self.rank.check_weights()

    def _are_there(self) -> bool:
        return self.states["weights"] == "resident" or (self.target or {}).get("weights") == "resident"

    def teardown(self) -> None:
        for call in ("create", "map", "set_access"):
            self.rank.device.fail_after(call, 1000)  # never
        self.host_free, self.copies_left = 1 << 40, None
        self.tenants_leave()
        self.rank.memory.roll_back()
        if self.states["weights"] == "discarded":
            self.is_whole = False
        self.rank.change(weights="resident", kv_cache="resident")
        if self.is_whole:
            self.rank.check_weights()
        self.rank.close()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_MIN_PIECE_BYTES", 2 * PAGE)
    monkeypatch.setattr(arena_module, "_MAX_PIECE_BYTES", 4 * PAGE)


class LateCopiesMachine(RankMemoryMachine):
    is_late = True


SETTINGS = settings(
    max_examples=num_examples(40, 100), stateful_step_count=25, deadline=None, suppress_health_check=ALL
)


class TestRankMemory(RankMemoryMachine.TestCase):
    settings = SETTINGS


class TestLateCopies(LateCopiesMachine.TestCase):
    settings = SETTINGS
