"""The simulation against what can be said of it otherwise: sums by hand, single steps, one replica after the other."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from fake_engines import make_config

from ringcore.errors import CapacityError, ConfigError
from ringcore.testing import FakeSpeculator, Simulator, StepCost, Trace, poisson_trace, write_model_config
from ringcore.testing import replica as replica_module

COST = StepCost(base_s=5e-3, per_token_s=2e-5, per_seq_s=1e-4, per_context_token_s=1e-6, num_hidden_tokens=9.5)
ROUTINGS = ["round-robin", "least-loaded", "prefix-affinity"]


def make_trace(*requests: tuple[float, int, int]) -> Trace:
    """(time, prompt tokens, output tokens)"""
    time_s, prompt, output = (np.array(column) for column in zip(*requests, strict=True))
    none = np.zeros(len(requests), dtype=np.int64)
    return Trace(
        time_s=time_s.astype(np.float64),
        prompt_tokens=prompt,
        output_tokens=output,
        prefix=none - 1,
        prefix_tokens=none,
        priority=none,
    )


def assert_same(result, other) -> None:
    for name in ("ttft_s", "e2e_s"):
        assert np.allclose(getattr(result, name), getattr(other, name), rtol=0, atol=1e-9, equal_nan=True)
    assert np.array_equal(result.records.num_tokens, other.records.num_tokens)
    assert result.num_steps == other.num_steps
    assert result.num_preemptions == other.num_preemptions
    assert result.cache_hit_rate == other.cache_hit_rate
    assert result.requests_by_replica == other.requests_by_replica
    assert result.utilisation == pytest.approx(other.utilisation)
    # A time between tokens on the edge of a bucket may fall on either side of it.
    assert np.abs(result.records.itl.counts - other.records.itl.counts).sum() <= 8
    assert result.records.itl.total == other.records.itl.total


def test_two_requests_by_hand(model_folder):
    """Steps of 1 s. The second request comes in the middle of the first one's third step, and is seen by the fourth."""
    config = make_config(model_folder)
    result = Simulator(config, 1, cost=StepCost(base_s=1.0)).run(make_trace((0.0, 3, 5), (2.5, 2, 4)))
    assert result.ttft_s.tolist() == [1.0, 1.5]
    assert result.e2e_s.tolist() == [5.0, 4.5]
    assert (result.num_steps, result.duration_s, result.utilisation) == (7, 7.0, [1.0])
    assert result.output_tokens_per_s == pytest.approx(9 / 7)
    assert result.prompt_tokens_per_s == pytest.approx(5 / 7)
    assert result.records.itl.total == 4 + 3
    assert result.itl.p50 == pytest.approx(1.0, rel=0.005)
    assert result.requests_per_s == pytest.approx(2 / 7)


def test_drafts_that_are_all_accepted_by_hand(model_folder):
    """Steps of 1 s, and 0.5 s a token after the first: 2 s for the prompt of 3, then up to 3 tokens in a step."""
    config, cost = make_config(model_folder), StepCost(base_s=1.0, per_token_s=0.5, num_hidden_tokens=1)
    speculator = FakeSpeculator(num_drafts=2, acceptance=1.0)
    result = Simulator(config, 1, cost=cost, speculator=speculator).run(make_trace((0.0, 3, 6)))
    assert result.ttft_s.tolist() == [2.0]
    assert result.e2e_s.tolist() == [2.0 + 2.0 + 1.5]  # 1 + 3 + 2 tokens
    assert (result.num_steps, result.records.num_tokens.tolist()) == (3, [6])
    assert result.records.itl.total == 5
    assert result.itl.mean == pytest.approx((2.0 + 1.5) / 5, rel=0.01)


@pytest.mark.parametrize(
    "routing", [*(pytest.param(one, marks=pytest.mark.long_form) for one in ROUTINGS[:-1]), ROUTINGS[-1]]
)
def test_drafts_save_steps_on_every_replica(model_folder, routing):
    """As many tokens, in fewer steps; and the same in one process, in two, and with as many steps at once as may be."""
    config, trace = make_config(model_folder, **SCARCE), busy_trace()
    plain = Simulator(config, 2, routing=routing, cost=COST, num_processes=1).run(trace)
    speculator = FakeSpeculator(num_drafts=3)
    results = [
        Simulator(config, 2, routing=routing, cost=COST, speculator=speculator, **more).run(trace)
        for more in ({"num_processes": 1, "max_steps": 1}, {"num_processes": 1}, {"num_processes": 2})
    ]
    for result in results:
        assert_same(result, results[0])
    assert np.array_equal(results[0].records.num_tokens, plain.records.num_tokens)
    assert results[0].records.itl.total == plain.records.itl.total
    assert results[0].num_steps < 0.8 * plain.num_steps


def test_an_idle_engine_begins_with_the_arrival(model_folder):
    config = make_config(model_folder)
    result = Simulator(config, 1, cost=StepCost(base_s=1.0)).run(make_trace((0.0, 3, 2), (10.25, 2, 1)))
    assert result.e2e_s.tolist() == [2.0, 1.0]
    assert result.duration_s == 11.25
    assert result.utilisation == [pytest.approx(3 / 11.25)]


def test_a_request_at_the_very_moment_a_step_begins_is_in_it(model_folder):
    config = make_config(model_folder)
    result = Simulator(config, 1, cost=StepCost(base_s=1.0)).run(make_trace((0.0, 3, 4), (2.0, 2, 1)))
    assert result.ttft_s.tolist() == [1.0, 1.0]


SCARCE = {"num_blocks_override": 40, "max_model_len": 128, "max_num_seqs": 6}
CASES = {
    "room for all": {"max_model_len": 256, "max_num_seqs": 12},
    "few blocks": SCARCE,
    "few blocks, no cache": SCARCE | {"enable_prefix_caching": False},
    "chunks": {"max_model_len": 256, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 40},
    "priorities": SCARCE | {"scheduling_policy": "priority", "preempt_lower_priority": True, "max_skip_ahead": 2},
}


def busy_trace(seed: int = 0) -> Trace:
    trace = poisson_trace(80, 40.0, prompt_tokens=30, output_tokens=25, num_prefixes=3, prefix_tokens=18, seed=seed)
    trace.priority[:] = np.arange(80) % 3
    return trace


@pytest.mark.parametrize("routing", ROUTINGS[::-1])  # of the sample, the one by prefixes has a cache
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled
def test_the_result_is_that_of_single_steps(model_folder, case, routing):
    config = make_config(model_folder, **CASES[case])
    options = {"routing": routing, "cost": COST, "num_processes": 1}
    fast = Simulator(config, 3, **options).run(busy_trace())
    slow = Simulator(config, 3, **options, max_steps=1).run(busy_trace())
    assert_same(fast, slow)
    assert fast.num_advances < slow.num_advances == slow.num_steps
    if CASES[case].get("num_blocks_override"):
        assert fast.num_preemptions > 0, "the case does not test what it is for"


@pytest.mark.parametrize("routing", ["least-loaded", "prefix-affinity"])
@pytest.mark.parametrize("num_drafts", [0, 7])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled
def test_loads_are_those_of_replicas_that_all_run_along(model_folder, monkeypatch, case, num_drafts, routing):
    """A replica runs only when it may matter; here each runs up to every arrival."""
    config, speculator = make_config(model_folder, **CASES[case]), FakeSpeculator(num_drafts, 0.95)
    lazy = Simulator(config, 3, routing=routing, cost=COST, speculator=speculator).run(busy_trace(1))
    monkeypatch.setattr(
        replica_module.Replica,
        "next_end_s",
        lambda self: self._clock.now() if self._core.has_unfinished else math.inf,
    )
    every = Simulator(config, 3, routing=routing, cost=COST, speculator=speculator).run(busy_trace(1))
    assert_same(lazy, every)


@pytest.mark.parametrize("layers", ["sliding", "mixed"])
def test_windows(tmp_path, layers):
    """With blocks for all. (With few, a window that slides in single steps frees blocks earlier.)"""
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24}
    if layers == "mixed":
        changes = {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
            "sliding_window": 24,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "hidden_activation": "gelu_pytorch_tanh",
        }
    config = make_config(write_model_config(tmp_path, **changes), max_model_len=256, max_num_seqs=8)
    fast = Simulator(config, 2, cost=COST, num_processes=1).run(busy_trace())
    assert_same(fast, Simulator(config, 2, cost=COST, num_processes=1, max_steps=1).run(busy_trace()))
    assert fast.num_finished == 80


def test_processes_change_nothing(model_folder):
    config = make_config(model_folder, **SCARCE)
    one = Simulator(config, 3, cost=COST, num_processes=1).run(busy_trace())
    two = Simulator(config, 3, cost=COST, num_processes=2).run(busy_trace())
    assert_same(one, two)
    assert two.refused == one.refused


def test_what_stops_a_process_is_raised(model_folder):
    config = make_config(model_folder, num_blocks_override=3)
    with pytest.raises(CapacityError, match="one request of 64 tokens"):
        Simulator(config, 2, cost=COST, num_processes=2).run(make_trace((0.0, 3, 5), (1.0, 3, 5)))


def test_a_prefix_is_found_where_it_was_before(model_folder):
    """Four prefixes over four replicas: by affinity each is computed once, by turns once on each replica."""
    config = make_config(model_folder)
    trace = poisson_trace(80, 5.0, prompt_tokens=2, output_tokens=2, num_prefixes=4, prefix_tokens=32)
    hits = {
        routing: Simulator(config, 4, routing=routing, load_bound=None, cost=COST).run(trace).cache_hit_rate
        for routing in ("round-robin", "prefix-affinity")
    }
    assert hits["prefix-affinity"] > hits["round-robin"] > 0.3
    computed = (1 - hits["prefix-affinity"]) * trace.prompt_tokens.sum()
    own = trace.prompt_tokens.sum() - 80 * 32
    assert computed == pytest.approx(4 * 32 + own, abs=1e-6)


def test_refused_and_cut_short(model_folder):
    """64 tokens at most: a prompt of 64 leaves room for no token, one of 60 for 4."""
    config = make_config(model_folder)
    result = Simulator(config, 1, cost=COST).run(make_trace((0.0, 64, 2), (0.1, 60, 9), (0.2, 70, 1), (0.3, 5, 5)))
    assert result.refused == {"InvalidRequestError (prompt_token_ids)": 2}
    assert "has 64 tokens and max_model_len is 64" in result.refusals["InvalidRequestError (prompt_token_ids)"]
    assert (result.num_requests, result.num_finished, result.num_cut) == (4, 2, 1)
    assert result.records.num_tokens.tolist() == [0, 4, 0, 5]
    assert np.isnan(result.ttft_s).tolist() == [True, False, True, False]


def test_all_refused(model_folder):
    result = Simulator(make_config(model_folder), 2, cost=COST).run(make_trace((0.0, 99, 2), (1.0, 99, 2)))
    assert result.num_finished == 0
    assert math.isnan(result.ttft.p99)
    assert result.to_dict()["ttft"]["p99"] is None
    assert ("TTFT", "p50 -  p90 -  p99 -  max -") in result.table()


def test_the_summary_is_plain_data(model_folder):
    result = Simulator(make_config(model_folder), 2, cost=COST, num_processes=1).run(busy_trace())
    summary = json.loads(json.dumps(result.to_dict()))
    assert summary["num_finished"] == result.num_finished
    assert summary["ttft"]["p90"] == result.ttft.p90
    assert len(summary["utilisation"]) == 2
    assert "records" not in summary


def test_more_replicas_make_it_faster(model_folder):
    config = make_config(model_folder, max_model_len=256)
    p99 = [Simulator(config, n, routing="least-loaded", cost=COST).run(busy_trace()).ttft.p99 for n in (1, 2, 4)]
    assert p99[0] > p99[1] > p99[2]


def test_the_cost_is_computed_where_none_is_given(model_folder):
    simulator = Simulator(make_config(model_folder), 1, hardware="h100")
    spec = simulator.config.model.spec
    assert simulator.cost == StepCost.from_model(spec, "h100")
    assert simulator.run(make_trace((0.0, 3, 5))).ttft_s[0] == pytest.approx(simulator.cost.base_s, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_replicas": 0}, "num_replicas=0"),
        ({"routing": "fastest"}, "routing='fastest'"),
        ({"hardware": "abacus"}, "hardware='abacus'"),
        ({"routing": "prefix-affinity", "load_bound": 0.5}, "load_bound=0.5"),
    ],
)
def test_what_cannot_be_simulated(model_folder, arguments, says):
    with pytest.raises(ConfigError, match=says):
        Simulator(make_config(model_folder), **{"num_replicas": 1} | arguments)
