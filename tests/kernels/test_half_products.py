"""One row of quantized weights in a 16-bit model: products of float16s."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_round_rows import fp8_weight, product_of
from test_weight_tiles import FMA, LONG_RUNS, RUNS_FMA, packed, random

from ringcore.kernels.linears.round_rows import round_rows_reference
from ringcore.kernels.linears.skinny_linear import skinny_linear, skinny_linear_reference
from ringcore.kernels.linears.skinny_tiles import PackedFmaConfig
from ringcore.kernels.partials import RowNorm

# Triton's interpreter multiplies the bits of bfloat16 as integers.
BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
KINDS = ["fp8 block", "fp8 channel", "int8", "w4", "w4 asym", "w4 channel", "w8 asym", "awq", "awq wide"]
NUM_INPUTS = 256


def config_of(kind):
    return RUNS_FMA if kind in LONG_RUNS else FMA


def multiply(x, weight, kind):
    """In float32: what is rounded are the inputs and the sums of half a chunk."""
    out = torch.zeros(len(x), len(weight), device=x.device)
    assert skinny_linear(x, weight, config_of(kind), add_to=out) is out
    return out


def error(found, expected):
    return (found.double() - expected.double()).norm() / expected.double().norm()


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16])
@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_multiplied_nearly_as_in_float32(device, kind, num_rows, dtype, monkeypatch):
    weight, expanded = packed(kind, random(40, NUM_INPUTS), device, monkeypatch, dtype)
    x = random(num_rows, NUM_INPUTS, seed=2).to(device, dtype)
    assert error(multiply(x, weight, kind), x.double() @ expanded.double().T) < 1.5e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_power_of_2_times_the_row_is_that_times_the_product(device, kind, monkeypatch):
    """To the bit: each chunk has a power of 2 of its own."""
    weight, _ = packed(kind, random(40, NUM_INPUTS), device, monkeypatch, torch.float16)
    x = random(1, NUM_INPUTS, seed=2).clamp(-4, 4)
    x = torch.where(x.abs() < 0.25, 0.25, x).to(device, torch.float16)
    once = multiply(x, weight, kind)
    for power in (-10, 9):
        assert torch.equal(multiply(x * 2.0**power, weight, kind), once * 2.0**power)


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_numbers_do_not_overflow(device, kind, monkeypatch):
    weight, expanded = packed(kind, torch.ones(40, NUM_INPUTS), device, monkeypatch, torch.float16)
    x = torch.full((1, NUM_INPUTS), 60000.0).to(device, torch.float16)
    assert error(multiply(x, weight, kind), x.double() @ expanded.double().T) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_numbers_of_either_sign_do_not_overflow(device, kind, monkeypatch):
    """All products of a chunk have one sign."""
    signs = random(1, NUM_INPUTS).sign()
    numbers = signs.repeat(40, 1)
    numbers[20:] *= -1
    weight, expanded = packed(kind, numbers, device, monkeypatch, torch.float16)
    x = (signs * 60000.0).to(device, torch.float16)
    assert error(multiply(x, weight, kind), x.double() @ expanded.double().T) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_many_magnitudes(device, kind, monkeypatch):
    """In each chunk from 1 to 2^-12; and small ones alone, beside one that is large and has weights of 0."""
    numbers = random(40, NUM_INPUTS)
    numbers[:, ::16] = 0
    weight, expanded = packed(kind, numbers, device, monkeypatch, torch.float16)
    places = torch.arange(NUM_INPUTS) % 13
    x = (random(1, NUM_INPUTS, seed=2).sign() * 2.0**-places).to(device, torch.float16)
    assert error(multiply(x, weight, kind), x.double() @ expanded.double().T) < 1.5e-3
    x = random(1, NUM_INPUTS, seed=2) * 2.0**-10
    x[0, ::16] = 1
    x = x.to(device, torch.float16)
    assert not expanded[:, ::16].any()
    assert error(multiply(x, weight, kind), x.double() @ expanded.double().T) < 1.5e-3


@pytest.mark.parametrize("kind", KINDS)
def test_an_outlier_costs_bits_of_its_own_chunk_alone(device, kind, monkeypatch):
    """Of which the weights are 0, so that only what is beside it is in the sum."""
    numbers = random(40, NUM_INPUTS)
    numbers[:, 5] = 0
    weight, expanded = packed(kind, numbers, device, monkeypatch, torch.float16)
    x = random(1, NUM_INPUTS, seed=2)
    x[0, 5] = 4096
    x = x.to(device, torch.float16)
    expected = x.double() @ expanded.double().T
    assert not expanded[:, 5].any()
    assert error(multiply(x, weight, kind), expected) < 1.5e-3


@pytest.mark.parametrize("num_inputs", [256, 1280, 4864])
@pytest.mark.parametrize("kind", ["w4 channel", "w4 asym wide", "awq wide"])
def test_tiles_as_they_are_chosen(device, kind, num_inputs, monkeypatch):
    """Neither outputs nor inputs are whole tiles."""
    weight, expanded = packed(kind, random(40, num_inputs), device, monkeypatch, torch.float16)
    x, gain = random(1, num_inputs, seed=2).to(device, torch.float16), random(num_inputs, seed=3).to(device)
    for is_gated in (False, True):
        num_outputs = 20 if is_gated else 40
        config = weight.choose(num_outputs, num_inputs, 1, is_gated=is_gated)
        assert isinstance(config, PackedFmaConfig)
        options = {"norm": RowNorm(gain, 1e-5), "activation": "silu" if is_gated else None}
        out = torch.empty(1, num_outputs, device=device)
        assert skinny_linear(x, weight, config, out=out, **options) is out
        limit = 3e-3 if is_gated else 1.5e-3
        assert error(out, skinny_linear_reference(x.float(), expanded.float(), **options)) < limit


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16])
@pytest.mark.parametrize(("row_group", "block_inputs"), [(128, 256), (128, 512), (384, 512)])
def test_rows_that_are_rounded_to_fp8_are_multiplied_as_codes(device, row_group, block_inputs, dtype):
    weight, expanded = fp8_weight(38, 384, 128, device)
    x, gain = random(1, 384).to(device, dtype), random(384, seed=2).to(device, dtype)
    x[0, 128:256] = 0
    for norm in (None, RowNorm(gain, 1e-5)):
        rounded = round_rows_reference(x.float(), row_group, norm)
        options = {"norm": norm, "row_group": row_group}
        found = skinny_linear(x, replace(weight, dtype=dtype), PackedFmaConfig(4, block_inputs, 1, 3), **options)
        assert error(found, product_of(rounded, expanded)) < (0.01 if dtype == torch.bfloat16 else 3e-3)


@pytest.mark.parametrize("row_group", [128, 256])
def test_the_largest_codes_do_not_overflow(device, row_group):
    weight, _ = fp8_weight(38, NUM_INPUTS, 128, device)
    weight.codes.fill_(0x7E)  # 448
    x = torch.full((1, NUM_INPUTS), 3.0).to(device, torch.float16)
    config = PackedFmaConfig(4, 256, 1, 3)
    found = skinny_linear(x, replace(weight, dtype=torch.float16), config, row_group=row_group)
    assert error(found, 448 * 3 * 128 * weight.scales.sum(1)[None]) < 1e-3


@pytest.mark.parametrize(
    "config", [PackedFmaConfig(4, 128, 1, 3), pytest.param(PackedFmaConfig(4, 256, 2, 3), marks=pytest.mark.long_form)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_prepared_in_larger_blocks_than_it_is_multiplied(device, kind, config, monkeypatch):
    weight, expanded = packed(kind, random(40, 640), device, monkeypatch, torch.float16)
    x = random(1, 640, seed=2).to(device, torch.float16)
    assert weight.has_whole_runs(config.block_inputs)
    found = skinny_linear(x, weight, config)
    assert error(found, x.double() @ expanded.double().T) < 1.5e-3


@pytest.mark.parametrize("kind", ["awq", "fp8 block"])
def test_gates_and_norms(device, kind, monkeypatch):
    weight, expanded = packed(kind, random(40, NUM_INPUTS), device, monkeypatch, torch.float16)
    x, gain = random(1, NUM_INPUTS, seed=2).to(device), random(NUM_INPUTS, seed=3).to(device)
    norm = RowNorm(gain, 1e-5)
    found = skinny_linear(x.half(), weight, FMA, norm=RowNorm(gain.half(), 1e-5), activation="silu")
    expected = skinny_linear_reference(x, expanded, norm=norm, activation="silu")
    assert error(found, expected) < 5e-3
