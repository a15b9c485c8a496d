"""What an engine can be asked about itself, and the end of a request by its id."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from fake_engine import expected, make_model_folder
from mortal_executor import MortalExecutor

from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.engine_core.admin.step_times import StepTimes
from ringcore.errors import InvalidRequestError
from ringcore.kv_cache.block_pool import BlockPool
from ringcore.kv_cache.occupancy import Occupancy
from ringcore.protocol.introspection import MAX_ID_CHARS, MAX_STEPS, EngineSnapshot
from ringcore.protocol.requests import EngineCoreRequest

CACHE_BYTES = 256  # of a block: 4 tokens, 1 head of 4 floats, K and V, 2 layers


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def make_core(folder, clock=None, num_blocks=40, **options):
    options = {"max_model_len": 64, "block_size": 4, "kv_cache_bytes": (num_blocks + 1) * CACHE_BYTES} | options
    config = EngineConfig.from_options(model=folder, load_format="dummy", **options)
    return EngineCore(config, MortalExecutor(config, holds=True), clock=clock or Clock())


def add(core, request_id, prompt, arrival_s=100.0, priority=0, **params):
    params = SamplingParams(**({"max_tokens": 8, "ignore_eos": True} | params))
    core.add_request(EngineCoreRequest(request_id, prompt, params, arrival_s=arrival_s, priority=priority))


def call(core, name, *args, **kwargs):
    return core.engine_call(name)(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------
# Requests.


def test_requests_by_state_the_oldest_first(folder):
    clock = Clock()
    core = make_core(folder, clock, max_num_seqs=2, steps_in_flight=1)
    add(core, "a", [1] * 9, arrival_s=90.0)
    add(core, "b", [2] * 3, arrival_s=95.0, priority=3)
    add(core, "c", [3] * 2, arrival_s=99.0)
    for _ in range(3):
        core.step()
    clock.now_s = 110.0
    found = call(core, "requests")
    assert found.num_by_state == {"running": 2, "waiting": 1, "preempted": 0, "held": 0, "compiling": 0, "loading": 0}
    a, b, c = found.oldest
    assert (a.request_id, a.state, a.age_s, a.waiting_s, a.first_scheduled_s) == ("a", "running", 20.0, None, 10.0)
    assert (a.num_prompt_tokens, a.num_generated_tokens, a.max_generated_tokens) == (9, 3, 8)
    assert (a.num_computed_tokens, a.num_blocks, a.num_cached_tokens, a.num_preemptions) == (11, 3, 0, 0)
    assert (b.num_blocks, b.priority, b.age_s) == (2, 3, 15.0)
    assert (c.state, c.waiting_s, c.num_generated_tokens, c.num_blocks, c.first_scheduled_s) == (
        "waiting",
        11.0,
        0,
        0,
        None,
    )
    assert [one.request_id for one in call(core, "requests", 2).oldest] == ["a", "b"]
    assert call(core, "requests", limit=0).oldest == []


def test_a_preempted_request_keeps_its_tokens_and_counts(folder):
    core = make_core(folder, num_blocks=6, max_model_len=24, steps_in_flight=1)
    add(core, "a", [1] * 8, max_tokens=16)
    add(core, "b", [2] * 8, max_tokens=16)
    while not core.stats().num_preemptions:
        core.step()
    found = call(core, "requests")
    assert found.num_by_state["preempted"] == 1
    (b,) = [one for one in found.oldest if one.state == "preempted"]
    assert (b.request_id, b.num_preemptions, b.num_blocks) == ("b", 1, 0)
    assert b.num_generated_tokens == 5  # 8 + 4 tokens in 3 blocks, and one sampled of them


def test_cached_tokens_of_a_shared_prefix(folder):
    core = make_core(folder, steps_in_flight=1)
    add(core, "a", [5] * 12)
    core.step()
    core.step()
    add(core, "b", [5] * 12)
    core.step()
    _, b = call(core, "requests").oldest
    assert b.num_cached_tokens == 11  # the last token of a cached prompt is computed again
    assert call(core, "kv_blocks").num_shared == 3


def test_a_long_id_is_cut_and_bounds_are_checked(folder):
    core = make_core(folder)
    add(core, "x" * 5000, [1])
    (found,) = call(core, "requests").oldest
    assert len(found.request_id) == MAX_ID_CHARS
    for name, bad in [
        ("requests", 1001),
        ("requests", -1),
        ("requests", "20"),
        ("kv_blocks", 5000),
        ("step_times", True),
    ]:
        with pytest.raises(InvalidRequestError, match="give a number from 0 to"):
            call(core, name, bad)


# ---------------------------------------------------------------------------------------------------------------
# Blocks.


def test_blocks_by_use_sum_up(folder):
    core = make_core(folder, steps_in_flight=1)
    add(core, "a", [5] * 12, max_tokens=2)
    add(core, "b", [6] * 7, max_tokens=30)
    while core.stats().num_running + core.stats().num_waiting > 1:
        core.step()
    core.step()
    whole, cells = call(core, "kv_blocks", 1), call(core, "kv_blocks", 40)
    assert (whole.num_blocks, whole.blocks_per_cell, len(whole.cells)) == (40, 40, 1)
    assert whole.num_cached == 3  # of a, which has ended
    assert whole.num_used == core.engine_call("requests")().oldest[0].num_blocks
    assert whole.num_free == 40 - whole.num_cached - whole.num_used
    assert whole.num_free + whole.num_cached == core.stats().num_free_blocks
    assert [sum(column) for column in zip(*cells.cells, strict=True)] == list(whole.cells[0])
    assert (cells.blocks_per_cell, len(cells.cells)) == (1, 40)


@pytest.mark.parametrize(("num_blocks", "max_cells", "sizes"), [(10, 4, [3, 3, 3, 1]), (8, 100, [1] * 8), (5, 1, [5])])
def test_cells_of_a_pool(num_blocks, max_cells, sizes):
    pool = BlockPool(num_blocks + 1)
    ids = pool.allocate(3)
    pool.cache(0, ids[:2], [b"x", b"y"])
    pool.touch(ids[:1])
    pool.free(ids[1:])
    per_cell, counts = Occupancy(pool, []).count_cells(max_cells)
    assert (per_cell, counts.sum(axis=1).tolist()) == (sizes[0], sizes)
    assert counts.sum(axis=0).tolist() == [num_blocks - 2, 1, 0, 1]
    if per_cell == 1:
        assert counts[:3].tolist() == [[0, 0, 0, 1], [0, 1, 0, 0], [1, 0, 0, 0]]


# ---------------------------------------------------------------------------------------------------------------
# Steps.


def test_the_parts_of_a_step_and_the_rates():
    clock = Clock()
    times = StepTimes(clock)
    assert times.report(10).num_steps == 0
    times.record((4, 100.0, 100.1, 100.3, 103.5, 104.0, 0, 6, 0, 2, 1, 1))
    times.record((4, 101.0, 101.1, 101.3, 104.5, 105.0, 1, 6, 0, 2, 1, 1))  # launched while the first runs
    times.record_send(0.25)
    clock.now_s = 106.0
    report = times.report(1)
    assert (report.num_steps, report.window_s) == (2, 10.0)
    rates = report.scheduled_tokens_per_s, report.generated_tokens_per_s, report.steps_per_s
    assert rates == pytest.approx((1.2, 0.4, 0.2))
    p50 = {name: round(spread.p50_s, 6) for name, spread in report.parts.items()}
    assert p50 == {"step": 2.5, "schedule": 0.1, "launch": 0.2, "wait": 3.2, "update": 0.5, "send": 0.25}
    assert report.parts["step"].max_s == 4.0
    assert {name: [round(value, 6) for value in column] for name, column in report.last.items()} == {
        "age_s": [1.0],
        "step_s": [1.0],
        "schedule_s": [0.1],
        "launch_s": [0.2],
        "wait_s": [3.2],
        "update_s": [0.5],
        "num_scheduled_tokens": [6.0],
        "num_sampled_tokens": [2.0],
    }
    clock.now_s = 130.0
    assert times.report(0).steps_per_s == 0.0


def test_a_full_ring_bounds_the_window():
    clock = Clock()
    times = StepTimes(clock)
    for number in range(MAX_STEPS + 500):
        clock.now_s = 100.0 + number / 1024
        now_s = clock.now_s
        times.record((4, *[now_s - 1e-4] * 3, now_s, now_s, number, 2, number, 1, 1, 1))
    report = times.report(MAX_STEPS)
    assert report.num_steps == len(report.last["age_s"]) == MAX_STEPS
    assert report.window_s == pytest.approx(1.0, rel=0.01)
    assert report.generated_tokens_per_s == pytest.approx(1024, rel=0.01)
    assert report.scheduled_tokens_per_s == pytest.approx(2048, rel=0.01)
    assert set(report.last["num_scheduled_tokens"]) == {2.0}
    assert times.num_tokens == (2 * (MAX_STEPS + 500), MAX_STEPS + 500)
    assert np.diff(report.last["age_s"]).max() < 0  # the newest last


def test_tokens_are_counted_as_the_engine_computes_them(folder):
    core = make_core(folder)
    add(core, "a", [1] * 9, max_tokens=5)
    while core.has_unfinished:
        core.step()
    found = call(core, "snapshot")
    assert (found.num_scheduled_tokens, found.num_generated_tokens) == (9 + 4, 5)
    assert found.num_steps == found.steps.num_steps == 5


# ---------------------------------------------------------------------------------------------------------------
# All of it; the end of a request.


def test_a_snapshot_survives_the_wire(folder):
    core = make_core(folder)
    add(core, "a", [1] * 9)
    core.step()
    core.pause("new")
    found = call(core, "snapshot", 5, 8, 3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=EngineSnapshot) == found
    assert (found.health.paused, found.health.state, len(found.blocks.cells)) == ("new", "ready", 8)
    assert (found.about.model, found.about.num_blocks, found.about.max_num_seqs) == (folder, 40, 256)
    assert (found.num_draft_tokens, found.num_accepted_tokens) == (None, None), "it has no drafts"
    assert found.cpu_s > 0
    assert found.resident_bytes > 1 << 20
    assert "Thread" in call(core, "stack") or "thread" in call(core, "stack")


def test_asking_changes_nothing(folder):
    plain, asked = make_core(folder), make_core(folder)
    for core in (plain, asked):
        for index in range(4):
            add(core, f"r{index}", [index + 1] * (5 + index))
    outputs = {plain: [], asked: []}
    while plain.has_unfinished:
        for core in (plain, asked):
            outputs[core] += core.step().outputs
        for name in ("snapshot", "requests", "kv_blocks", "step_times", "about", "stack"):
            call(asked, name)
        asked._scheduler.check()
    assert [(one.request_id, one.new_token_ids) for one in outputs[plain]] == [
        (one.request_id, one.new_token_ids) for one in outputs[asked]
    ]


def test_an_aborted_request_tells_its_reader_and_leaves_the_others(folder):
    core = make_core(folder, steps_in_flight=2)
    add(core, "a", [1, 2], max_tokens=6)
    add(core, "b", [3, 4], max_tokens=6)
    first = core.step().outputs
    assert call(core, "abort", ["b", "nobody"]) == ["b"]
    assert call(core, "abort", "b") == []
    outputs = []
    while core.has_unfinished:
        outputs += core.step().outputs
    assert [(one.finish_reason, one.new_token_ids) for one in outputs if one.request_id == "b"] == [("abort", [])]
    tokens = [token for one in [*first, *outputs] if one.request_id == "a" for token in one.new_token_ids]
    assert tokens == expected([1, 2], 6)
    core._scheduler.check()


def test_an_abort_while_nothing_may_run(folder):
    core = make_core(folder)
    add(core, "a", [1, 2])
    core.pause("all")
    assert call(core, "abort", "a") == ["a"]
    assert core.has_unfinished
    (output,) = core.step().outputs
    assert (output.request_id, output.finish_reason) == ("a", "abort")


@pytest.mark.parametrize("ids", [None, 5, [1], {"a": 1}])
def test_ids_that_are_none(folder, ids):
    with pytest.raises(InvalidRequestError, match="request_ids: give an id"):
        call(make_core(folder), "abort", ids)
