import math

import numpy as np
import pytest

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.errors import ConfigError, InvalidRequestError
from ringcore.families import FAMILIES
from ringcore.testing import HARDWARE, StepCost, StepWork, read_measurements, write_model_config

COST = StepCost(base_s=1.0, per_token_s=0.1, per_seq_s=0.01, per_context_token_s=0.001, num_hidden_tokens=2)


def test_a_step():
    assert COST.seconds(StepWork(5, 2, 100)) == pytest.approx(1.0 + 0.1 * 3 + 0.02 + 0.1)
    assert COST.seconds(StepWork(2, 2, 0)) == pytest.approx(1.02)


@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_a_run_is_the_sum_of_its_steps(num_steps):
    steps = [COST.seconds(StepWork(3, 3, 50 + 3 * i)) for i in range(num_steps)]
    assert COST.run_seconds(StepWork(3, 3, 50), num_steps) == pytest.approx(sum(steps))


@pytest.mark.parametrize("cost", [COST, StepCost(base_s=0.5), StepCost(base_s=0.1, per_context_token_s=0.5)])
@pytest.mark.parametrize("seconds", [1e-6, 0.5, 1.0, 1.1601, 7.3, 400.0])
def test_steps_begun(cost, seconds):
    work = StepWork(3, 3, 50)
    begun, at = 0, 0.0
    while at < seconds and begun < 1000:
        at += cost.seconds(StepWork(3, 3, 50 + 3 * begun))
        begun += 1
    assert cost.steps_begun(work, seconds, 1000) == begun
    assert cost.steps_begun(work, seconds, 2) == min(begun, 2)


def test_steps_that_cost_nothing_are_all_begun():
    assert StepCost().steps_begun(StepWork(1, 1, 1), 1e-9, 77) == 77


def test_a_fit_finds_the_coefficients_again():
    random = np.random.default_rng(3)
    true = StepCost(base_s=4e-3, per_token_s=3e-5, per_seq_s=1e-5, per_context_token_s=3e-8)
    works = [StepWork(int(t), int(s), int(c)) for t, s, c in random.integers(1, [4000, 256, 200_000], (60, 3))]
    fitted = StepCost.fit([(*work, true.seconds(work)) for work in works])
    for name in ("base_s", "per_token_s", "per_seq_s", "per_context_token_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(true, name), rel=1e-6)


def test_a_fit_has_no_negative_coefficients():
    # The plain solution has a negative slope in the number of requests; without that input a constant is the best.
    rows = [(1, 1, 0, 1.0), (1, 2, 0, 0.9), (1, 3, 0, 0.8), (1, 4, 0, 0.7)]
    fitted = StepCost.fit(rows)
    assert fitted.per_seq_s == 0.0
    constant = fitted.base_s + fitted.per_token_s
    errors = [constant / seconds - 1 for *_, seconds in rows]
    assert sum(error / seconds for error, (*_, seconds) in zip(errors, rows, strict=True)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([(1, 1, 1, 1.0)] * 3, "3 rows; four coefficients"),
        ([(1, 1, 1, 1.0)] * 4 + [(1, 1, 1, 0.0)], "row 4"),
        ([(1, -1, 1, 1.0)] * 4, "row 0"),
        ([(1, 1, 1, math.inf)] * 4, "row 0"),
    ],
)
def test_measurements_that_are_none(rows, says):
    with pytest.raises(InvalidRequestError, match=says):
        StepCost.fit(rows)


def test_measurements_of_a_file(tmp_path):
    file = tmp_path / "steps.jsonl"
    file.write_text('{"num_tokens": 8, "num_seqs": 8, "num_context_tokens": 4096, "seconds": 0.0052}\n')
    assert read_measurements(file) == [(8, 8, 4096, 0.0052)]
    file.write_text('\n{"num_tokens": "8"}\n')
    with pytest.raises(InvalidRequestError, match=r"steps.jsonl', line 2: num_tokens: Expected `float`, got `str`"):
        read_measurements(file)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", True])
def test_a_coefficient_that_is_none(value):
    with pytest.raises(ConfigError, match="per_seq_s"):
        StepCost(per_seq_s=value)


def test_from_a_model(tmp_path):
    """Ten layers of 1000 x 1000 attention and 3 x 1000 x 2000 MLP, in numbers that can be followed."""
    folder = write_model_config(
        tmp_path,
        hidden_size=1000,
        intermediate_size=2000,
        num_hidden_layers=10,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=100,
        vocab_size=1000,
    )
    spec = read_model_spec(find_model(folder, "dummy"), FAMILIES)
    device = HARDWARE["h200"]
    read, compute = device.read_bytes_per_s * 0.85, device.flops_per_s * 0.7
    layers, head = 10 * (1000 * 100 * 2 * 15 + 3 * 1000 * 2000), 1000 * 1000
    cost = StepCost.from_model(spec, "h200")
    assert cost.base_s == pytest.approx(device.step_s + 2 * (layers + head) / read)
    assert cost.per_token_s == pytest.approx(2 * layers / compute)
    assert cost.per_context_token_s == pytest.approx(2 * 10 * 5 * 100 * 2 / read)
    fp8 = StepCost.from_model(spec, "h200", kv_cache_dtype="fp8")
    assert fp8.per_context_token_s == pytest.approx(2 * 10 * 5 * 101 / read)
    # As many tokens are computed while the weights are read as the two rates say.
    assert cost.num_hidden_tokens * cost.per_token_s == pytest.approx(cost.base_s - device.step_s)
    two = StepCost.from_model(spec, device, tensor_parallel_size=5)
    assert two.base_s == pytest.approx(device.step_s + 20 * device.all_reduce_s + 2 * (layers + head) / 5 / read)
    assert two.per_context_token_s == pytest.approx(cost.per_context_token_s / 5)
    with pytest.raises(ConfigError, match="hardware='h300': give one of h200, h100"):
        StepCost.from_model(spec, "h300")
