"""The router's kernel against transformers' operations: the same experts in the same order, the same weights."""

from __future__ import annotations

import pytest
import torch

from ringcore.kernels.mixtures import router
from ringcore.kernels.mixtures.expert_matrices import RouterForm, route_reference
from ringcore.kernels.mixtures.router import new_router_counters, route, takes_norm

pytestmark = pytest.mark.sampled


def check(x, weight, k, normalises=True, bias=None, correction=None, **form):
    counters, form = new_router_counters(x.device), RouterForm(k, normalises, **form)
    found = route(x, weight, form, counters=counters, bias=bias, correction=correction)
    exact = route_reference(x, weight, form, bias, correction)
    assert torch.equal(found.experts.long(), exact.experts)
    torch.testing.assert_close(found.weights, exact.weights, atol=1e-5, rtol=torch.finfo(x.dtype).eps)
    assert not counters.any(), "the next launch finds it so"
    return found


def randn(device, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (5, 2), (16, 4), (40, 3), (128, 8)])
@pytest.mark.parametrize("n", [1, 3, 20])
def test_the_same_experts_and_weights(device, n, num_experts, k, normalises):
    check(randn(device, n, 72), randn(device, num_experts, 72, seed=1), k, normalises)


@pytest.mark.parametrize("num_inputs", [72, 1100])
@pytest.mark.parametrize("n", [1, 3])
def test_the_norm_is_a_prologue_for_few_tokens(device, n, num_inputs):
    """And leaves the rows that the experts read."""
    x, weight, gain = 3 * randn(device, n, num_inputs), randn(device, 40, num_inputs, seed=1), randn(device, num_inputs)
    assert takes_norm(64, weight)
    assert not takes_norm(65, weight)
    large = torch.empty(256, 7168, device="meta")
    assert takes_norm(1, large)
    assert takes_norm(8, large)
    assert not takes_norm(64, large), "each token would read the matrix"
    counters, form = new_router_counters(device), RouterForm(5, True)
    normed = torch.full_like(x, float("nan"), dtype=torch.float16)
    found = route(x, weight, form, counters=counters, norm=(gain, 1e-3), normed=normed)
    rows = torch.nn.functional.rms_norm(x, (num_inputs,), gain, 1e-3)
    exact = route_reference(rows, weight, form)
    torch.testing.assert_close(normed, rows.half(), atol=1e-3, rtol=2e-3)
    assert torch.equal(found.experts.long(), exact.experts)
    without = route(x, weight, form, counters=counters, norm=(gain, 1e-3))
    assert torch.equal(without.experts, found.experts)
    torch.testing.assert_close(found.weights, exact.weights, atol=1e-5, rtol=1e-5)
    assert not counters.any(), "the next launch finds it so"


@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_one_token_that_is_not_finite_has_experts(device, is_sigmoid):
    """Each of them once, within the layer: their weights are no numbers."""
    weight = randn(device, 40, 72)
    form = RouterForm(4, True, is_sigmoid=is_sigmoid)
    x = torch.full((1, 72), float("nan"), device=device)
    found = route(x, weight, form, counters=new_router_counters(device))
    assert found.experts.tolist() == [[0, 1, 2, 3]]
    assert found.weights.isnan().all()


@pytest.mark.parametrize("num_inputs", [1024, 1100])
def test_partials_of_several_programs_are_added(device, num_inputs):
    check(randn(device, 70, num_inputs) / 32, randn(device, 24, num_inputs, seed=1), 4)


@pytest.mark.parametrize("rounds_logits", [True, False])
def test_logits_of_many_tokens_are_a_matrix_product(device, monkeypatch, rounds_logits):
    monkeypatch.setattr(router, "_MAX_SPLIT_TOKENS", 8)
    monkeypatch.setattr(router, "MAX_TOKENS", 4)
    x, weight = randn(device, 9, 64).half(), randn(device, 40, 64, seed=1).half()
    bias = randn(device, 40, seed=2).half()
    check(x, weight, 4, bias=bias, rounds_logits=rounds_logits, dtype=torch.float32)


def test_of_equal_probabilities_the_first_experts(device):
    """Also of those whose probability is 0."""
    weight = torch.zeros(8, 16, device=device)
    weight[5] = 100
    for n in (1, 2):
        found = route(torch.ones(n, 16, device=device), weight, RouterForm(4), counters=new_router_counters(device))
        assert found.experts.tolist() == [[5, 0, 1, 2]] * n
        assert found.weights.tolist() == [[1, 0, 0, 0]] * n


def test_sixteen_bits(device):
    """Logits are rounded before the softmax, as those of a linear."""
    x, weight = torch.eye(16, device=device)[:3], randn(device, 32, 16, seed=2)
    if device.type == "cuda":
        found = check(x.bfloat16(), weight.bfloat16(), 4)
        assert found.weights.dtype == torch.bfloat16
    else:  # the interpreter's products of bfloat16 are wrong
        check(x.half(), weight.half(), 4)


def test_tokens_are_chosen_for_whatever_the_others_are(device):
    weight, x = randn(device, 128, 64, seed=1), randn(device, 40, 64)
    whole = check(x, weight, 8)
    alone = [check(one[None], weight, 8) for one in x[::13]]
    assert torch.equal(torch.cat([one.experts for one in alone]), whole.experts[::13])


@pytest.mark.parametrize("n", [1, 9])
def test_a_bias(device, n):
    check(randn(device, n, 72), randn(device, 40, 72, seed=1), 3, bias=randn(device, 40, seed=2))


@pytest.mark.parametrize("n", [1, 9])
@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize("normalises", [False, True])
def test_sigmoids(device, n, normalises, is_corrected):
    """A correction moves the choice alone, also where it is negative: by as much as the scores."""
    x, weight = randn(device, n, 72) / 8, randn(device, 40, 72, seed=1)
    correction = randn(device, 40, seed=3) - 3 if is_corrected else None
    found = check(x, weight, 6, normalises, is_sigmoid=True, scale=2.5, correction=correction)
    if is_corrected:
        without = check(x, weight, 6, normalises, is_sigmoid=True, scale=2.5)
        assert not torch.equal(found.experts, without.experts)


def test_logits_of_float32(device):
    """Of rows that a linear would round: weights and scores as exact as the sums."""
    x, weight = randn(device, 5, 64).half(), randn(device, 24, 64, seed=1).half()
    found = check(x, weight, 4, rounds_logits=False, dtype=torch.float32)
    assert found.weights.dtype == torch.float32
    rounded = route_reference(x, weight, RouterForm(4, True, dtype=torch.float32))
    assert (found.weights - rounded.weights).abs().max() > 1e-5
