"""A linear that takes fused kernels for few rows computes what the plain one does, with prologue and epilogue."""

from __future__ import annotations

import pytest
import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT as NONE
from ringcore.kernels.linears import skinny_configs
from ringcore.kernels.linears.skinny_configs import choose_split_k
from ringcore.kernels.linears.skinny_tiles import DotConfig, FmaConfig
from ringcore.model_executor import ops
from ringcore.model_executor.layers.activation import bind_activation
from ringcore.model_executor.layers.norm import RMSNorm
from ringcore.model_executor.linear_schemes.dense import dense_product
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.residual import Residual

pytestmark = pytest.mark.sampled

INPUTS, OUTPUTS = 24, 16
ROWS = (0, 1, 3, 6, 70)  # none, two numbers for FMA, one for tensor cores, one for the library


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch):
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    by_rows = {1: FmaConfig(16, 32, 1), 3: FmaConfig(16, 16, 1), 6: DotConfig(32, 16, 4, 2, 2)}
    monkeypatch.setattr(skinny_configs, "choose", lambda outputs, inputs, rows, is_gated=False: by_rows.get(rows))


def randn(*shape, seed, device):
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).half()


@pytest.fixture(params=[False, True], ids=["", "bias"])
def weight_and_bias(request, device):
    weight = randn(2 * OUTPUTS, INPUTS, seed=1, device=device) / 8
    return weight, randn(2 * OUTPUTS, seed=2, device=device) if request.param else None


@pytest.fixture
def norm(device):
    found = RMSNorm("norm", "model.norm", INPUTS, 1e-6, torch.float16)
    found.bind({"norm.weight": 1 + randn(INPUTS, seed=3, device=device) / 4})
    return found


def expected(x, weight, bias, norm=None):
    rows = x.float()
    if norm is not None:
        rows = rows * (rows.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.gain.float()
    return torch.nn.functional.linear(rows, weight.float(), None if bias is None else bias.float())


def assert_close(ours, exact):
    """Within some roundings to 16 bits: the library's way has one after each of its steps."""
    torch.testing.assert_close(ours.float(), exact, atol=2e-2, rtol=4e-3)


@pytest.mark.parametrize("n", ROWS)
def test_alone_and_after_a_norm(device, weight_and_bias, norm, n):
    linear, x = dense_product(*weight_and_bias), randn(n, INPUTS, seed=n, device=device)
    assert isinstance(linear, KernelProduct)
    kept = x.clone()
    for ours, before in (
        (linear(x, NONE), None),
        (linear.after_norm(norm, Residual(x), NONE), norm),
    ):
        assert ours.dtype == torch.float16
        assert_close(ours, expected(x, *weight_and_bias, before))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(device, weight_and_bias, norm, n, activation):
    linear, x = dense_product(*weight_and_bias), randn(n, INPUTS, seed=n, device=device)
    gate, up = expected(x, *weight_and_bias, norm).chunk(2, -1)
    activated = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate)
    ours = linear.gated_after_norm(norm, Residual(x), bind_activation(activation, device), NONE)
    assert_close(ours, activated * up)


def test_a_gate_that_the_library_computes_asks_no_other_kernel(device, weight_and_bias, norm, monkeypatch):
    """The table knows the gated linear. As one of twice the outputs it would be a shape that nobody measured."""
    asked = []
    monkeypatch.setattr(skinny_configs, "choose", lambda *shape, is_gated=False: asked.append((shape, is_gated)))
    linear, x = dense_product(*weight_and_bias), randn(3, INPUTS, seed=3, device=device)
    gate, up = expected(x, *weight_and_bias, norm).chunk(2, -1)
    ours = linear.gated_after_norm(norm, Residual(x), bind_activation("silu", device), NONE)
    assert_close(ours, torch.nn.functional.silu(gate) * up)
    assert asked == [((OUTPUTS, INPUTS, 3), True)]


@pytest.mark.parametrize("n", ROWS)
def test_added_to_the_stream(device, weight_and_bias, n):
    linear, x = dense_product(*weight_and_bias), randn(n, INPUTS, seed=n, device=device)
    hidden = randn(n, 2 * OUTPUTS, seed=9, device=device)
    total = hidden.float() + expected(x, *weight_and_bias)
    linear.add_to(Residual(hidden), x, NONE)
    assert_close(hidden, total)


@pytest.mark.parametrize("n", ROWS)
def test_logits_are_float32(device, n):
    weight, x = randn(40, INPUTS, seed=1, device=device), randn(n, INPUTS, seed=n, device=device)
    linear = dense_product(weight, None, prefers_float32=True)
    logits = linear(x, NONE)
    assert logits.dtype == torch.float32
    place = torch.full((n + 1, 40), -7.0, device=device)
    assert linear(x, NONE, place[:n]).data_ptr() == place[:n].data_ptr()
    assert torch.equal(place[:n], logits)
    assert (place[n] == -7).all()
    if n < 70 or device.type == "cuda":  # the CPU has no linear of 16 bits that is not rounded
        torch.testing.assert_close(logits, expected(x, weight, None), atol=1e-4, rtol=1e-5)


def test_float32_takes_none_of_them(device):
    weight = randn(8, INPUTS, seed=1, device=device).float()
    assert not isinstance(dense_product(weight, None), KernelProduct)
    assert not isinstance(dense_product(weight, None, prefers_float32=True), KernelProduct)


@pytest.mark.parametrize("n", ROWS)
def test_a_stream_of_float32(device, weight_and_bias, norm, n):
    linear, x = dense_product(*weight_and_bias), randn(n, INPUTS, seed=n, device=device)
    stream = randn(n, 2 * OUTPUTS, seed=n + 1, device=device).float() * 1.0001
    total = stream + expected(x, *weight_and_bias)
    residual = Residual(stream)
    linear.add_to(residual, x, NONE)
    torch.testing.assert_close(residual.rows, total, atol=4e-3, rtol=1e-3)
    assert residual.rows is stream
    wide = randn(n, INPUTS, seed=n, device=device).float() * 1.0001
    ours = linear.after_norm(norm, Residual(wide), NONE)
    assert ours.dtype == torch.float16
    assert_close(ours, expected(wide, *weight_and_bias, norm))
    part = linear.partial(x, NONE)
    assert part.dtype == (torch.float32 if n in (1, 3, 6) else torch.float16)
    assert_close(part, expected(x, *weight_and_bias))


@pytest.mark.parametrize("reader", ["norm", "linear", "gate", "rows"])
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.usefixtures("split_k")
def test_deferred_partials_reach_every_reader(device, norm, n, reader):
    square = randn(INPUTS, INPUTS, seed=1, device=device) / 8
    linear, next_linear = (
        dense_product(square, None),
        dense_product(randn(2 * OUTPUTS, INPUTS, seed=2, device=device) / 8, None),
    )
    x, stream = randn(n, INPUTS, seed=n, device=device), randn(n, INPUTS, seed=n + 1, device=device).float() * 1.0001
    total = stream + expected(x, square, None)
    residual = Residual(stream)
    linear.add_to(residual, x, NONE)
    assert (residual._partials is None) == (n in (1, 3, 6))  # the fused kernels add by themselves
    if reader == "norm":
        assert_close(residual.normed(norm), expected(total, torch.eye(INPUTS, device=device), None, norm))
    elif reader == "linear":
        assert_close(next_linear.after_norm(norm, residual, NONE), expected(total, next_linear.weight, None, norm))
    elif reader == "gate":
        gate, up = expected(total, next_linear.weight, None, norm).chunk(2, -1)
        ours = next_linear.gated_after_norm(norm, residual, bind_activation("silu", device), NONE)
        assert_close(ours, torch.nn.functional.silu(gate) * up)
    assert residual.rows is stream
    torch.testing.assert_close(stream, total, atol=1e-4, rtol=1e-5)


@pytest.mark.usefixtures("split_k")
def test_a_linear_that_cannot_defer_adds_at_once(device, weight_and_bias):
    weight, bias = weight_and_bias
    x, narrow = randn(70, INPUTS, seed=0, device=device), randn(70, 2 * OUTPUTS, seed=1, device=device)
    for hidden in (narrow, narrow.float()):
        residual = Residual(hidden)
        dense_product(weight, bias).add_to(residual, x, NONE)
        assert (residual._partials is not None) == (bias is None and hidden.dtype == torch.float32)


def test_how_many_splits():
    """Each of whole pieces of 16 bytes."""
    for outputs, inputs in ((4096, 12288), (4096, 4096), (1024, 3072), (576, 1536), (96, 40), (96, 24), (96, 20)):
        for rows in (65, 128, 256):
            splits = choose_split_k(outputs, inputs, rows)
            assert splits == 1 or inputs % (8 * splits) == 0
        assert choose_split_k(outputs, inputs, 8192) == 1
    assert [choose_split_k(4096, 12288, rows) for rows in (65, 256, 257)] == [2, 2, 1]
    assert [choose_split_k(1024, 3072, rows) for rows in (65, 256, 257)] == [4, 4, 1]
    assert [choose_split_k(96, inputs, 256) for inputs in (40, 32, 24)] == [1, 4, 1]
