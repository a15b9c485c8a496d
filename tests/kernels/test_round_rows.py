"""Rows rounded to FP8, against plain torch, and their products on the tensor cores."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.kernels.linears.expand_weight import expand_weight
from ringcore.kernels.linears.packed_weight import BYTES_FP8, PackedWeight
from ringcore.kernels.linears.round_rows import round_rows, round_rows_reference
from ringcore.kernels.linears.skinny_configs import choose_rounded
from ringcore.kernels.linears.skinny_linear import skinny_linear, skinny_linear_reference
from ringcore.kernels.linears.skinny_tiles import DotConfig, PackedFmaConfig
from ringcore.kernels.partials import Partials, RowNorm
from ringcore.model_executor.linear_schemes.rounded_product import RoundedProduct
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import Derived

pytestmark = pytest.mark.sampled


class Norm(NamedTuple):
    gain: torch.Tensor
    eps: float


def random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adversarial(num_inputs):
    """Rows of zeros, with one spike, of large and of tiny numbers, of ties between two codes, and random ones."""
    rows = random(7, num_inputs)
    rows[0], rows[1], rows[2], rows[3] = 0, 0, 1e30, 1e-30
    rows[1, 7] = -1e4
    rows[4] = torch.arange(num_inputs).remainder(897) / 2 * (448 / 447.9)
    return rows


def assert_equal(found, expected):
    torch.testing.assert_close(found.scales, expected.scales, rtol=1e-6, atol=0)
    assert (found.group, found.dtype) == (expected.group, expected.dtype)
    numbers, wanted = (one.codes.float() for one in (found, expected))
    flipped = numbers != wanted  # where the quotients differ in their last bit
    assert flipped.float().mean() < 0.01
    assert ((numbers - wanted).abs() <= wanted.abs() / 8 + 2**-9)[flipped].all()


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("num_inputs", "group", "dtype"),
    [(80, None, torch.float32), (80, 16, torch.bfloat16), (1280, 128, torch.float32), (2304, 128, torch.float16)],
)
def test_rows_are_rounded_as_by_torch(device, num_inputs, group, dtype, has_norm):
    rows = adversarial(num_inputs)
    rows = rows.clamp(-6e4, 6e4).to(device, dtype)
    norm = RowNorm(random(num_inputs, seed=2).to(device, dtype), 1e-5) if has_norm else None
    found = round_rows(rows, group, norm, torch.bfloat16)
    assert_equal(found, round_rows_reference(rows, group, norm, torch.bfloat16))


@pytest.mark.parametrize(("num_partials", "dtype"), [(1, torch.bfloat16), (2, torch.float32)])
@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_deferred_add_is_done_before_the_norm(device, num_partials, dtype, group, is_weighted):
    rows, norm = random(5, 1040).to(device), RowNorm(random(1040, seed=2).to(device), 1e-5)
    weights = random(5, num_partials, seed=5).to(device) if is_weighted else None
    partials = Partials(random(num_partials, 5, 1040, seed=4).to(device, dtype), weights)
    total = rows + partials.total()
    found = round_rows(rows, group, norm, partials=partials)
    torch.testing.assert_close(rows, total, rtol=1e-6, atol=1e-6)
    assert_equal(found, round_rows_reference(total, group, norm))


def test_no_rows(device):
    assert round_rows(torch.empty(0, 64, device=device)).codes.shape == (0, 64)


def fp8_weight(num_outputs, num_inputs, group, device, run=1):
    """(an FP8 weight of float32 products, with a scale for `run` outputs and each group; its expansion)"""
    codes = random(num_outputs, num_inputs, seed=5).clamp(-3, 3).to(torch.float8_e4m3fn)
    scales = random(num_outputs // run, num_inputs // group, seed=6).abs() / 10
    expanded = codes.float() * scales.repeat_interleave(run, 0).repeat_interleave(group, 1)
    of_codes = codes.view(torch.uint8).to(device), scales.to(device), (num_outputs, num_inputs), torch.float32
    weight = PackedWeight(*of_codes, BYTES_FP8, num_inputs, group, scale_run=run)
    return weight, expanded.to(device)


def product_of(rounded, expanded, **options):
    rows = rounded.codes.float() * rounded.scales.repeat_interleave(rounded.group, 1)
    return skinny_linear_reference(rows, expanded, **options)


CONFIGS = [
    DotConfig(64, 128, 4, 3, 1, prefetched_inputs=0),
    DotConfig(64, 128, 4, 2, 3, prefetched_inputs=128),
    DotConfig(64, 64, 4, 2, 1, block_rows=16),
]


GROUPS = [
    *((config, 128, 128) for config in CONFIGS),
    (CONFIGS[1], 768, 768),
    (CONFIGS[0], 768, 128),
    (CONFIGS[0], 128, 768),
]


@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize(("config", "group", "row_group"), GROUPS)
def test_fp8_by_fp8(device, num_rows, config, group, row_group):
    weight, expanded = fp8_weight(100, 768, group, device)
    x, bias = random(num_rows, 768).to(device), random(100, seed=3).to(device)
    rounded = round_rows(x, row_group)
    found = skinny_linear(rounded, weight, config, bias=bias)
    torch.testing.assert_close(found, product_of(rounded, expanded, bias=bias), rtol=2e-3, atol=5e-3)


@pytest.mark.parametrize("num_rows", [2, 20])
def test_fp8_gated_and_added(device, num_rows):
    weight, expanded = fp8_weight(128, 256, 128, device)
    rounded = round_rows(random(num_rows, 256).to(device), 128)
    for config in CONFIGS[:2]:
        gated = skinny_linear(rounded, weight, config, activation="silu")
        expected = product_of(rounded, expanded, activation="silu")
        torch.testing.assert_close(gated, expected, rtol=2e-3, atol=2e-3)
        total = random(num_rows, 128, seed=4).to(device)
        expected = total + product_of(rounded, expanded)
        skinny_linear(rounded, weight, config, add_to=total)
        torch.testing.assert_close(total, expected, rtol=2e-3, atol=2e-3)


def test_scales_that_a_bulk_copy_takes():
    weight, _ = fp8_weight(256, 512, 128, torch.device("cpu"), 64)
    assert [weight.shared_scale_bytes(count) for count in (32, 64, 128)] == [16, 16, 0]
    apart = torch.zeros(4, 5)[:, :4]  # rows of 20 bytes
    few = replace(weight, scales=weight.scales[:, :3].contiguous())  # of 12 bytes
    for other in (replace(weight, scales=apart), replace(weight, scales=torch.zeros(17)[1:].view(4, 4)), few):
        assert other.shared_scale_bytes(64) == 0
    weight, _ = fp8_weight(256, 512, 128, torch.device("cpu"))
    assert weight.shared_scale_bytes(64) == 0


@pytest.mark.parametrize("num_outputs", [128, 384])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_outputs_of_a_block_share_a_row_of_scales(device, num_outputs, activation):
    """Whether codes are multiplied as they are, by FMA, or expanded, in tiles or as a whole."""
    weight, expanded = fp8_weight(num_outputs, 256, 128, device, 64)
    assert weight.scales.shape == (num_outputs // 64, 2)
    x = random(3, 256).to(device)
    rounded = round_rows(x, 128)
    torch.testing.assert_close(expand_weight(weight), expanded)
    expected = product_of(rounded, expanded, activation=activation)
    for config in CONFIGS:
        found = skinny_linear(rounded, weight, config, activation=activation)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=5e-3)
        found = skinny_linear(x, weight, replace(config, prefetched_inputs=0), activation=activation)
        exact = skinny_linear_reference(x, expanded, activation=activation)
        torch.testing.assert_close(found, exact, rtol=2e-3, atol=5e-3)
    found = skinny_linear(x[:1], weight, PackedFmaConfig(4, 256, 1, 3), row_group=128, activation=activation)
    torch.testing.assert_close(found, expected[:1], rtol=0.02, atol=0.05)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize(
    ("block_inputs", "group", "row_group"), [(256, 128, 128), (128, 128, 384), (512, 384, 384), (512, 384, 128)]
)
def test_fp8_rounded_in_the_kernel(device, num_rows, block_inputs, group, row_group):
    weight, expanded = fp8_weight(38, 384, group, device)
    config = PackedFmaConfig(4, block_inputs, 1, 3)
    x, bias = random(num_rows, 384).to(device), random(38, seed=3).to(device)
    x[-1, 128:256] = 0
    for norm in (None, RowNorm(random(384, seed=2).to(device), 1e-5)):
        rounded = round_rows(x, row_group, norm)
        for activation in (None, "silu"):
            options = {"activation": activation, "bias": bias}
            found = skinny_linear(x, weight, config, norm=norm, row_group=row_group, **options)
            torch.testing.assert_close(found, product_of(rounded, expanded, **options), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("row_group", [128, 512])
def test_a_linear_rounds_after_its_norm(device, row_group):
    weight, expanded = fp8_weight(256, 512, 128, device)
    product = RoundedProduct(weight, None, row_group, None, Derived())
    rows, norm = random(3, 512).to(device), Norm(random(512, seed=2).to(device), 1e-5)
    rounded = round_rows_reference(rows, row_group, RowNorm(norm.gain, norm.eps))
    found = product.after_norm(norm, Residual(rows.clone()), NO_TOKEN_CONTEXT)
    torch.testing.assert_close(found, product_of(rounded, expanded), rtol=0.02, atol=0.02)
    hidden = Residual(random(3, 256, seed=7).to(device))
    expected = hidden.rows + product_of(round_rows_reference(rows, row_group), expanded)
    product.add_to(hidden, rows, NO_TOKEN_CONTEXT)
    torch.testing.assert_close(hidden.rows, expected, rtol=0.02, atol=0.02)


class Scaled:
    """A `ScaledProduct` of blocks, in plain torch."""

    ROWS, MIN_ROWS, has_blocks = 4, 4, True

    def __init__(self, expanded):
        self._expanded = expanded

    def __call__(self, codes, scales, dtype):
        assert len(codes) % self.ROWS == 0
        group = codes.shape[1] // scales.shape[1]
        rows = codes.float() * scales.repeat_interleave(group, 1)
        return (rows @ self._expanded.t()).to(dtype)


@pytest.mark.parametrize("num_rows", [1, 3, 8, 9])
@pytest.mark.parametrize("has_gain", [True, False])
def test_of_many_rows_the_add_is_deferred_to_the_next_norm(device, num_rows, has_gain):
    weight, expanded = fp8_weight(256, 256, 128, device)
    product = RoundedProduct(weight, None, 128, Scaled(expanded), Derived())
    x, rows = random(num_rows, 256).to(device), random(num_rows, 256, seed=3).to(device)
    norm = Norm(random(256, seed=2).to(device), 1e-5) if has_gain else NoGain()
    hidden = Residual(rows.clone())
    product.add_to(hidden, x, NO_TOKEN_CONTEXT)
    assert (hidden.take()[1] is not None) == (num_rows >= Scaled.MIN_ROWS)
    hidden = Residual(rows.clone())
    product.add_to(hidden, x, NO_TOKEN_CONTEXT)
    found = product.after_norm(norm, hidden, NO_TOKEN_CONTEXT)
    total = rows + product_of(round_rows_reference(x, 128), expanded)
    torch.testing.assert_close(hidden.rows, total, rtol=0.02, atol=0.02)
    normed = norm(hidden.rows) if norm.gain is None else hidden.rows
    normed = round_rows_reference(normed, 128, None if norm.gain is None else RowNorm(norm.gain, norm.eps))
    torch.testing.assert_close(found, product_of(normed, expanded), rtol=0.02, atol=0.03)


class NoGain:
    """A norm that no kernel computes."""

    gain, eps = None, 1e-5

    def __call__(self, x, partials=None):
        if partials is not None:
            x.add_(partials.total())
        return torch.nn.functional.layer_norm(x, x.shape[1:])


def test_tiles_of_any_rows():
    assert choose_rounded(4096, 4096, 0) is None
    for num_rows in (1, 16, 64, 65, 4096):
        config = choose_rounded(4096, 4096, num_rows)
        assert 128 % config.block_inputs == 0
        assert config.splits == 1 or num_rows <= 64
