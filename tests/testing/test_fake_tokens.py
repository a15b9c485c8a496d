"""Which tokens a fake worker gives, seen through the real engine."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engines import add, drain, make_config, make_core

from ringcore.engine_core.core import EngineCore
from ringcore.errors import ConfigError
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.testing import FakeExecutor, FakeSpeculator, StepCost, VirtualClock, write_model_config
from ringcore.testing.tokens import SeededTokens


def generate(folder, *, tokens=None, prompt=(5, 6, 7), options=None, **params):
    core = make_core(make_config(folder, **options or {}), tokens=tokens)
    add(core, "a", list(prompt), **params)
    return drain(core)["a"]


def test_seeded_tokens_depend_on_seed_and_position_alone():
    source = SeededTokens(1000)
    rows, seeds = np.array([0, 1]), np.array([7, 8])
    run = source.sample(rows, seeds, np.array([3, 50]), 40)
    assert run.shape == (2, 40)
    singles = [source.sample(rows[::-1], seeds[::-1], np.array([50, 3]) + i, 1)[::-1] for i in range(40)]
    assert np.array_equal(run, np.concatenate(singles, axis=1))
    assert not np.array_equal(run[0], run[1])


def test_seeded_tokens_are_spread_over_the_vocabulary():
    sampled = SeededTokens(10).sample(np.arange(100), np.arange(100), np.zeros(100, dtype=np.int64), 100)
    counts = np.bincount(sampled.reshape(-1), minlength=10)
    assert counts.sum() == 10_000
    assert 850 < counts.min() <= counts.max() < 1150  # five standard deviations


@pytest.mark.parametrize("seed", [0, 2**62])
def test_any_seed_is_one(model_folder, seed):
    tokens, reason, _ = generate(model_folder, seed=seed, max_tokens=6)
    assert (len(tokens), reason) == (6, "length")
    assert all(0 <= token < 1000 for token in tokens)


def test_a_function_sees_the_tokens_so_far(model_folder):
    seen = []

    def script(tokens, position, seed):
        seen.append((list(tokens), position, seed))
        return sum(tokens) % 1000

    tokens, *_ = generate(model_folder, tokens=script, seed=9, max_tokens=3)
    assert tokens == [18, 36, 72]
    assert seen == [([5, 6, 7], 3, 9), ([5, 6, 7, 18], 4, 9), ([5, 6, 7, 18, 36], 5, 9)]


def test_a_written_completion_ends_with_the_models_end_of_text(model_folder):
    assert generate(model_folder, tokens=[10, 11], ignore_eos=False, max_tokens=9) == ([10, 11, 2], "stop", None)


def test_completions_by_prompt(model_folder):
    script = {(5, 6, 7): [20, 21], (8,): [30]}
    assert generate(model_folder, tokens=script, ignore_eos=False, max_tokens=9)[0] == [20, 21, 2]
    assert generate(model_folder, tokens=script, prompt=[8], ignore_eos=False, max_tokens=9)[0] == [30, 2]
    assert generate(model_folder, tokens=script, prompt=[9], ignore_eos=False, max_tokens=9)[0] == [2]


def test_min_tokens_bars_stop_tokens(model_folder):
    """Token 2 ends a text; where it may not come yet, 3 comes."""
    got = generate(model_folder, tokens=[2, 2, 2, 2], ignore_eos=False, min_tokens=2, max_tokens=9)
    assert got == ([3, 3, 2], "stop", None)


def test_min_tokens_bars_seeded_tokens_too(tmp_path):
    """Of a vocabulary of four tokens three are barred."""
    folder = write_model_config(tmp_path, vocab_size=4)
    tokens, reason, _ = generate(
        folder, prompt=[0], ignore_eos=False, stop_token_ids=[0, 3], min_tokens=20, max_tokens=40
    )
    assert tokens[:19] == [1] * 19
    assert reason == "stop"


def test_log_probabilities(model_folder):
    core = make_core(make_config(model_folder), tokens=[998, 4])
    add(core, "a", [1], logprobs=3, max_tokens=2)
    add(core, "b", [1], max_tokens=2)
    outputs = [output for _ in range(2) for output in core.step().outputs]
    (first, second) = [entry for output in outputs if output.request_id == "a" for entry in output.logprobs]
    assert first.token_ids == [998, 998, 999, 0]
    assert first.ranks == [1, 1, 2, 3]
    assert first.logprobs == [-np.log(1000)] * 4
    assert second.token_ids[0] == 4
    assert all(output.logprobs is None for output in outputs if output.request_id == "b")


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_preempted_request_gets_the_same_tokens(model_folder, steps_in_flight):
    """A pool of 6 blocks of 4 with two 8-token prompts: the second is preempted, and computed again later."""
    alone = {name: generate(model_folder, prompt=[ord(name)] * 8, seed=3, max_tokens=8)[0] for name in "ab"}
    config = make_config(model_folder, num_blocks_override=6, max_model_len=16, steps_in_flight=steps_in_flight)
    core = make_core(config)
    for name in "ab":
        add(core, name, [ord(name)] * 8, seed=3, max_tokens=8)
    got = drain(core)
    assert core.stats().num_preemptions > 0
    assert {name: tokens for name, (tokens, *_) in got.items()} == alone


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("scarce", [False, True])
def test_drafts_change_no_token(model_folder, steps_in_flight, scarce):
    """With logprobs, preemptions, a script that ends by itself, and as few steps as the accepted drafts save."""
    options = {"max_model_len": 48, "steps_in_flight": steps_in_flight}
    options |= {"num_blocks_override": 16} if scarce else {}
    texts, num_steps = [], []
    for speculator in (FakeSpeculator(), FakeSpeculator(num_drafts=4, acceptance=0.8)):
        config, clock = make_config(model_folder, **options), VirtualClock()
        fake = FakeExecutor(config, clock=clock, speculator=speculator)
        core = EngineCore(config, fake, clock=clock.now, max_gain=speculator.max_gain)
        core.clock = clock
        for i in range(6):
            add(core, f"{i}", [i + 1] * (3 * i + 2), seed=i, max_tokens=20 + i, ignore_eos=False, logprobs=i % 3)
        texts.append(_texts(core))
        num_steps.append(fake.num_steps)
        assert (core.stats().num_preemptions > 0) == scarce
    assert texts[0] == texts[1]
    assert num_steps[1] < 0.75 * num_steps[0]


def _texts(core: EngineCore) -> dict[str, tuple]:
    tokens, logprobs, ends = {}, {}, {}
    while core.has_unfinished:
        for output in core.step().outputs:
            name = output.request_id
            tokens[name] = tokens.get(name, []) + output.new_token_ids
            logprobs[name] = logprobs.get(name, []) + [one.token_ids for one in output.logprobs or ()]
            ends[name] = output.finish_reason
    assert all(len(logprobs[name]) == len(tokens[name]) for name in tokens)
    return {name: (tokens[name], logprobs[name], ends[name]) for name in tokens}


def test_a_stop_token_among_those_of_one_step(model_folder):
    """Every draft is accepted: the prompt's step gives 10, the next one 11, 2 (the end of text) and what follows it."""
    config, clock = make_config(model_folder), VirtualClock()
    speculator = FakeSpeculator(num_drafts=5, acceptance=1.0)
    fake = FakeExecutor(config, tokens=[10, 11, 2, 12, 13], clock=clock, speculator=speculator)
    core = EngineCore(config, fake, clock=clock.now, max_gain=speculator.max_gain)
    core.clock = clock
    add(core, "a", [5], ignore_eos=False, max_tokens=9, logprobs=1)
    first, last = (core.step().outputs[0] for _ in range(2))
    assert (first.new_token_ids, last.new_token_ids, last.finish_reason) == ([10], [11, 2], "stop")
    assert [one.token_ids[0] for one in last.logprobs] == [11, 2]


def test_drafts_are_accepted_with_their_probability():
    speculator = FakeSpeculator(num_drafts=3, acceptance=0.6)
    seeds, most = np.arange(20_000), np.full(20_000, 3)
    accepted = speculator.num_accepted(seeds, np.full(20_000, 9), most)
    assert np.array_equal(accepted, speculator.num_accepted(seeds, np.full(20_000, 9), most))
    shares = [(accepted >= count).mean() for count in (1, 2, 3)]
    assert shares == pytest.approx([0.6, 0.36, 0.216], abs=0.015)
    assert np.array_equal(speculator.num_accepted(seeds, np.full(20_000, 9), most - 2), np.minimum(accepted, 1))
    assert not FakeSpeculator().num_accepted(seeds, seeds, most * 0).any()


@pytest.mark.parametrize("options", [{"num_drafts": -1}, {"acceptance": 1.5}], ids=str)
def test_a_speculator_that_cannot_be(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        FakeSpeculator(**options)


@pytest.mark.parametrize("max_steps", [1, 3, 100])
def test_several_steps_at_once_give_the_same(model_folder, max_steps):
    clock = VirtualClock()
    config = make_config(model_folder)
    cost = StepCost(base_s=1.0, per_context_token_s=0.125)
    core = EngineCore(config, FakeExecutor(config, clock=clock, cost=cost), clock=clock.now)
    for i in range(2):
        params = SamplingParams(max_tokens=9 + 4 * i, ignore_eos=True, seed=i)
        core.add_request(EngineCoreRequest(str(i), [1, 2, 3], params, arrival_s=0.0))
    tokens = {"0": [], "1": []}
    while core.has_unfinished:
        for output in core.step(max_steps=max_steps).outputs:
            tokens[output.request_id] += output.new_token_ids
    # 13 steps, of 3 + i context tokens each: 9 of two requests and 4 of one.
    assert clock.now() == 13 + 0.125 * (2 * sum(range(3, 12)) + sum(range(12, 16)))
    assert [len(tokens["0"]), len(tokens["1"])] == [9, 13]
    expected = SeededTokens(1000).sample(np.array([0]), np.array([1]), np.array([3]), 13)
    assert tokens["1"] == expected[0].tolist()
