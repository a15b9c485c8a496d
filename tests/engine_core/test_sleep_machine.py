"""Random sleeps, wake-ups, failures, requests and new weights, on two ranks whose memory is in arenas of fake devices.

Whatever comes, no address changes, what is mapped is what is accounted, all ranks are in the state that the engine
says, nothing is computed from memory that is not there or holds something else, and every request that was taken and
not aborted gets its tokens in the end.
"""

from __future__ import annotations

import itertools
import random

import pytest
from arena_worker import HOST_BYTES, NUM_WEIGHTS, PAGE
from fake_engine import make_model_folder, next_token
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.errors import CapacityError, InvalidRequestError, RingcoreError, SleepingError, WorkerError
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.testing import FakeExecutor
from ringcore.worker.memory import arena

BOTH = ["weights", "kv_cache"]
AWAY = ("offloaded", "discarded")
NUM_RANKS = 2
modes = st.sampled_from(["keep", "keep", "keep", "wait", "abort"])
ranks = st.integers(0, NUM_RANKS - 1)


class Taken:
    """A request that was taken: its tokens so far, and the weights that the last of them may be of."""

    def __init__(self, prompt: list[int], max_tokens: int) -> None:
        self.tokens, self.num_left, self.weights = list(prompt), max_tokens, 0
        self.reason: str | None = None

    def take(self, token: int, current: int) -> None:
        """Later tokens are of later weights."""
        possible = [w for w in range(self.weights, current + 1) if next_token(self.tokens, w) == token]
        assert possible, "a token that no weights give"
        self.weights = possible[0]
        self.tokens.append(token)
        self.num_left -= 1


class Machine(RuleBasedStateMachine):
    """The states here are what the engine's have to be."""

    folder = ""

    @initialize(depth=st.sampled_from([1, 2]), seed=st.integers(0, 1 << 20))
    def start(self, depth, seed) -> None:
        self.rng = random.Random(seed)
        config = EngineConfig.from_options(
            model=self.folder,
            load_format="dummy",
            max_model_len=64,
            block_size=4,
            kv_cache_bytes=60 * 256,
            max_num_batched_tokens=16,
            max_num_seqs=5,
            steps_in_flight=depth,
            enable_sleep_mode=True,
            tensor_parallel_size=NUM_RANKS,
        )
        self.core = EngineCore(config, FakeExecutor(config, worker_factory="arena_worker:create_worker"))
        self.workers = self.core._executor._workers
        self.weights, self.kv_cache, self.is_held, self.is_updating = "resident", "resident", False, False
        self.version, self.num_new = 0, 0  # of the weights; and how many of the next one have come
        self.needs_all = False
        self.taken: dict[str, Taken] = {}
        self.ids = itertools.count()
        self.tenants: dict[int, int] = {}  # by rank, a handle
        self.is_paused = False

    # ------------------------------------------------------------------------------------------------------------
    # What the engine has to be.

    @property
    def serves(self) -> bool:
        return self.weights == self.kv_cache == "resident" and not self.is_held

    @property
    def takes_requests(self) -> bool:
        return self.weights == self.kv_cache == "resident"

    def receive(self, outputs) -> None:
        for output in outputs:
            taken = self.taken[output.request_id]
            for token in output.new_token_ids:
                taken.take(token, self.version)
            if output.finish_reason:
                taken.reason = output.finish_reason
                assert taken.reason == "abort" or taken.num_left == 0

    def drain(self, max_steps: int = 2000) -> None:
        while self.core.has_unfinished and max_steps:
            self.receive(self.core.step().outputs)
            max_steps -= 1
        assert max_steps, "it does not come to an end"

    def unfinished(self) -> list[Taken]:
        return [taken for taken in self.taken.values() if taken.reason is None]

    # ------------------------------------------------------------------------------------------------------------
    # Requests.

    @rule(
        length=st.integers(1, 20),
        max_tokens=st.integers(1, 12),
        alike=st.booleans(),
        count=st.integers(1, 3),
        num_steps=st.integers(0, 4),
    )
    def add_some(self, length, max_tokens, alike, count, num_steps) -> None:
        for _ in range(count):
            self.add(length, max_tokens, alike)
        self.step(num_steps)

    def add(self, length, max_tokens, alike) -> None:
        prompt = [3] * length if alike else [self.rng.randrange(90) for _ in range(length)]
        id_ = f"r{next(self.ids)}"
        request = EngineCoreRequest(id_, prompt, SamplingParams(max_tokens=max_tokens), arrival_s=0.0)
        if not self.takes_requests:
            with pytest.raises(SleepingError):
                self.core.add_request(request)
            return
        self.core.add_request(request)
        self.taken[id_] = Taken(prompt, max_tokens)

    @rule(num_steps=st.integers(1, 6))
    def compute(self, num_steps) -> None:
        self.step(num_steps)

    def step(self, num_steps) -> None:
        for _ in range(num_steps):
            self.receive(self.core.step().outputs)

    @rule()
    def abort(self) -> None:
        ids = [id_ for id_, taken in self.taken.items() if taken.reason is None]
        self.receive(self.core.abort(self.rng.sample(ids, min(2, len(ids)))))

    @rule(pauses=st.sampled_from([False, False, False, True]))
    def pause_or_resume(self, pauses) -> None:
        self.is_paused = pauses
        if pauses:
            self.core.pause(self.rng.choice(["new", "all"]))
        else:
            self.core.resume()

    @rule(preempt=st.booleans())
    def reset_prefix_cache(self, preempt) -> None:
        self.core.reset_prefix_cache(preempt)

    # ------------------------------------------------------------------------------------------------------------
    # Sleep and wake-up, and what goes wrong.

    def waits_behind_a_pause(self, mode: str) -> bool:
        unfinished = self.core.stats().num_running + self.core.stats().num_waiting
        return mode == "wait" and unfinished > 0 and (self.is_paused or not self.serves)

    @rule(level=st.sampled_from([0, 1, 1, 2]), mode=modes, fails_on=st.none() | ranks)
    def sleep(self, level, mode, fails_on) -> None:
        self.sleep_now(level, mode, fails_on)

    def sleep_now(self, level, mode, fails_on) -> None:
        if self.waits_behind_a_pause(mode):
            mode = "keep"
        copies = level == 1 and self.weights == "resident"
        if copies and fails_on is not None:
            self.workers[fails_on].host_bytes = 0
            with pytest.raises(CapacityError, match="sleep_directory") as caught:
                self.core.sleep(level, mode)
            assert list(caught.value.failures) == [fails_on]
            self.workers[fails_on].host_bytes = HOST_BYTES
            return
        report = self.core.sleep(level, mode)
        self.is_held |= level == 0
        if level:
            self.kv_cache = "discarded"
            kept = "offloaded" if level == 1 else "discarded"
            self.weights = {"resident": kept, "stale": "discarded", "offloaded": kept}.get(self.weights, "discarded")
            self.is_updating = False
        assert report.states == {"weights": self.weights, "kv_cache": self.kv_cache}

    @rule(tags=st.sampled_from([None, BOTH, ["weights"], ["kv_cache"]]), num_steps=st.integers(0, 4))
    def wake_up(self, tags, num_steps) -> None:
        self.wake(tags, None, "", 0)
        self.step(num_steps)

    @rule(level=st.sampled_from([0, 1, 1, 1, 2]), mode=modes, num_steps=st.integers(0, 6))
    def sleep_and_wake_up(self, level, mode, num_steps) -> None:
        self.sleep_now(level, mode, None)
        self.wake(None, None, "", 0)
        self.step(num_steps)

    @rule(
        tags=st.sampled_from([None, ["weights"], ["kv_cache"]]),
        rank=ranks,
        call=st.sampled_from(["create", "map", "set_access"]),
        after=st.integers(0, 3),
    )
    def fail_to_wake_up(self, tags, rank, call, after) -> None:
        self.wake(tags, rank, call, after)

    def wake(self, tags, rank, call, after) -> None:
        """rank: the one of which a call of the driver fails, after some; or nothing does."""
        waking = [tag for tag in BOTH if tag in (tags or BOTH) and getattr(self, tag) in AWAY]
        has_room = all(  # also where a tenant is: it has what was free when it came
            worker.device.free_bytes >= sum(worker.mapped_bytes[tag] for tag in waking) for worker in self.workers
        )
        if rank is not None:
            self.workers[rank].device.fail_after(call, after)
        try:
            self.core.wake_up(tags)
        except (CapacityError, WorkerError) as error:
            assert rank is not None or not has_room, error  # noqa: PT017
        else:
            assert has_room
            for tag in waking:
                is_lost = tag == "weights" and self.weights == "discarded"
                setattr(self, tag, "stale" if is_lost else "resident")
            if not {self.weights, self.kv_cache} & set(AWAY):
                self.is_held = False
        finally:
            if rank is not None:
                self.workers[rank].device._failing.clear()

    @precondition(lambda self: self.kv_cache in AWAY and not self.tenants)
    @rule(rank=ranks)
    def another_takes_the_memory(self, rank) -> None:
        device = self.workers[rank].device
        self.tenants[rank] = device.create(device.free_bytes // PAGE * PAGE)

    @precondition(lambda self: bool(self.tenants))
    @rule()
    def another_gives_it_back(self) -> None:
        for rank, handle in self.tenants.items():
            self.workers[rank].device.release(handle)
        self.tenants.clear()

    # ------------------------------------------------------------------------------------------------------------
    # New weights.

    @rule(mode=modes)
    def start_update(self, mode) -> None:
        if self.waits_behind_a_pause(mode):
            mode = "keep"
        if self.weights in AWAY or self.is_updating:
            with pytest.raises(SleepingError if self.weights in AWAY else InvalidRequestError):
                self.core.start_weight_update(mode)
            return
        self.core.start_weight_update(mode)
        self.needs_all, self.is_updating, self.weights, self.num_new = self.weights == "stale", True, "stale", 0

    @precondition(lambda self: self.is_updating)
    @rule(share=st.sampled_from([1, 2, 3]))
    def update_a_part(self, share) -> None:
        self.core.update_weights({"kind": "ipc", "number": self.version + 1, "count": NUM_WEIGHTS // share})
        self.num_new += NUM_WEIGHTS // share

    @rule()
    def fail_to_update(self) -> None:
        with pytest.raises(InvalidRequestError, match="the weights are stale" if self.is_updating else "no weight"):
            self.core.update_weights({"kind": "ipc", "number": -1, "count": 10})
        self.is_updating = False

    @rule()
    def finish_update(self) -> None:
        is_whole = self.num_new >= NUM_WEIGHTS
        if self.is_updating and not is_whole and (self.num_new or not self.needs_all):
            return  # weights of two kinds are no error of the engine's, and nothing to compute with
        try:
            self.core.finish_weight_update()
        except InvalidRequestError:
            assert not self.is_updating or not is_whole
            self.is_updating = False
        else:
            assert self.is_updating
            assert is_whole
            self.is_updating, self.weights, self.version = False, "resident", self.version + 1

    @rule()
    def reload(self) -> None:
        try:
            self.core.reload_weights(f"/models/{self.version + 1}")
        except SleepingError:
            assert self.weights in AWAY
        else:
            self.is_updating, self.weights, self.version = False, "resident", self.version + 1

    # ------------------------------------------------------------------------------------------------------------
    # Always.

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "core"):
            return
        states = {"weights": self.weights, "kv_cache": self.kv_cache}
        health = self.core.health()
        assert health.memory == states
        assert (health.state == "sleeping") == (not self.serves)
        assert self.core.is_sleeping() == (self.is_held or bool(set(states.values()) & set(AWAY)))
        assert self.core.stats().is_sleeping == (not self.serves)
        self.core._scheduler.check()
        for worker in self.workers:
            worker.check()
            assert worker.rank_memory.states == {tag: "resident" if s == "stale" else s for tag, s in states.items()}

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        if self.tenants:
            self.another_gives_it_back()
        self.core.resume()
        self.core.wake_up()
        if self.weights in ("stale", "discarded"):
            self.version += 1
            self.core.reload_weights(f"/models/{self.version}")
        self.weights = self.kv_cache = "resident"
        self.drain()
        assert not self.unfinished()
        assert {worker.read_weights() for worker in self.workers} == {self.version}
        self.core.shutdown()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    monkeypatch.setattr(arena, "_MIN_PIECE_BYTES", PAGE)
    monkeypatch.setattr(arena, "_MAX_PIECE_BYTES", 2 * PAGE)


@pytest.mark.timeout(300)
def test_random_sleeps_failures_requests_and_updates(tmp_path, is_long):
    Machine.folder = make_model_folder(tmp_path)
    case = Machine.TestCase()
    case.settings = settings(
        max_examples=2000 if is_long else 30,
        stateful_step_count=40,
        deadline=None,
        phases=list(Phase) if is_long else [Phase.explicit, Phase.reuse, Phase.generate],  # to shrink takes minutes
        suppress_health_check=list(HealthCheck),
    )
    case.runTest()


def test_what_is_computed_from_the_wrong_memory_is_noticed(tmp_path):
    """Of the fakes: a page that was not computed, and weights that are not all the same."""
    Machine.folder = make_model_folder(tmp_path)
    for spoil in (lambda worker: worker.slots.zero_(), lambda worker: worker.parameters[:10].fill_(1)):
        machine = Machine()
        machine.start(1, 0)
        machine.add(10, 5, True)
        machine.step(2)
        spoil(machine.workers[0])
        with pytest.raises(RingcoreError, match="a step failed"):
            machine.step(1)
