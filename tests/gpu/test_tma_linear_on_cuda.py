"""The products by TMA against plain torch: Gluon has no interpreter, so a GPU alone shows it."""

from __future__ import annotations

import pytest
import torch

from ringcore.kernels.linears.packed_weight import BYTES_FP8, PackedWeight
from ringcore.kernels.linears.round_rows import round_rows
from ringcore.kernels.linears.skinny_linear import new_split_k_counters, skinny_linear, skinny_linear_reference
from ringcore.kernels.linears.skinny_tiles import TmaConfig
from ringcore.kernels.linears.tma_configs import choose_on_hopper, has_wgmma
from ringcore.kernels.partials import Partials

DEVICE = torch.device("cuda", 0)
CONFIGS = (
    TmaConfig(64, 128, 6),
    TmaConfig(64, 128, 4, 2),
    TmaConfig(64, 64, 5, 4, 2),
    TmaConfig(128, 64, 3, 1, 2),
    TmaConfig(128, 128, 3, 2, 1, 8),
    TmaConfig(64, 128, 6, is_even=True),
    TmaConfig(64, 64, 5, 1, 2, is_even=True),
    TmaConfig(128, 64, 3, 1, 1, is_even=True),
)
SHAPES = ((1000, 1024), (24, 1024), (4104, 512))

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_wgmma(DEVICE)), reason="needs a GPU of compute capability 9"
)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_like_the_reference(config, activation, dtype):
    torch.manual_seed(0)
    for num_outputs, num_inputs in SHAPES:
        num_weights = num_outputs * (1 if activation is None else 2)
        weight, bias = (
            numbers(num_weights, num_inputs, dtype=dtype) / num_inputs**0.5,
            numbers(num_weights, dtype=dtype),
        )
        counters = new_split_k_counters(weight)
        for num_rows in (1, 7, 8, 30, 64, 100):
            if config.num_warps == 4 and num_rows > 64:
                continue
            x, before = numbers(num_rows, num_inputs, dtype=dtype), numbers(num_rows, num_outputs)
            for options in ({}, {"bias": bias}, {"add_to": before.float()}, {"add_to": before.to(dtype), "bias": bias}):
                copied = dict(options) | ({"add_to": options["add_to"].clone()} if "add_to" in options else {})
                expected = skinny_linear_reference(x, weight, activation=activation, **copied)
                result = skinny_linear(x, weight, config, activation=activation, counters=counters, **options)
                assert error(result, expected) < 5e-3, (num_outputs, num_inputs, num_rows, list(options))
                assert not counters.any()


@pytest.mark.parametrize(
    ("weight_group", "scale_run"), [(128, 128), (None, 1), (256, 1)], ids=["blocks", "outputs", "groups"]
)
@pytest.mark.parametrize("row_group", [128, None], ids=["groups of rows", "rows"])
def test_fp8(weight_group, scale_run, row_group):
    torch.manual_seed(3)
    num_inputs = 1024
    groups = 1 if weight_group is None else num_inputs // weight_group
    even = TmaConfig(64, 128, 6, is_even=True)
    for num_weights in (512, 1280):
        codes = numbers(num_weights, num_inputs).to(torch.float8_e4m3fn)
        scales = torch.rand(num_weights // scale_run, groups, device=DEVICE) + 0.5
        size = (num_weights, num_inputs)
        options = {"group_size": weight_group or num_inputs, "scale_run": scale_run}
        weight = PackedWeight(codes.view(torch.uint8), scales, size, torch.bfloat16, BYTES_FP8, num_inputs, **options)
        expanded = codes.float() * scales.repeat_interleave(scale_run, 0).repeat_interleave(num_inputs // groups, 1)
        for num_rows in (2, 8, 17, 64):
            rounded = round_rows(numbers(num_rows, num_inputs), row_group)
            row_scales = rounded.scales.repeat_interleave(num_inputs // rounded.scales.shape[1], 1)
            x = rounded.codes.float() * row_scales
            for activation in (None, "silu"):
                outputs = num_weights // (1 if activation is None else 2)
                expected = skinny_linear_reference(x, expanded, activation=activation)
                for config in (TmaConfig(64, 128, 9), TmaConfig(64, 128, 5, 2, 2), TmaConfig(128, 128, 4), even):
                    result = skinny_linear(rounded, weight, config, activation=activation)
                    assert result.shape == (num_rows, outputs)
                    assert error(result, expected) < 5e-3, (num_weights, num_rows, activation, config)


@pytest.mark.parametrize("config", [TmaConfig(64, 128, 4, 2), TmaConfig(64, 128, 4, is_even=True)], ids=str)
@pytest.mark.parametrize("num_inputs", [1024, 3072])
def test_partials_are_deferred(config, num_inputs):
    """Of even ranges a tile has more or fewer."""
    torch.manual_seed(1)
    x, weight, stream = numbers(9, num_inputs), numbers(2568, num_inputs) / 32, numbers(9, 2568).float()
    deferred: list[Partials] = []
    result = skinny_linear(x, weight, config, add_to=stream, defer=deferred.append)
    assert result is stream
    (partials,) = deferred
    expected = skinny_linear_reference(x, weight, add_to=stream.clone())
    assert error(stream + partials.total(), expected) < 1e-5


def test_a_row_does_not_depend_on_the_others():
    """Within a range of rows that share a configuration."""
    torch.manual_seed(2)
    for num_outputs, num_inputs, is_gated in ((6144, 2560, False), (2560, 9728, False), (1024, 2560, True)):
        weight = numbers(num_outputs * (1 + is_gated), num_inputs) / num_inputs**0.5
        x = numbers(32, num_inputs)
        for low, high in ((2, 4), (5, 16), (17, 32)):
            config = choose_on_hopper(num_outputs, num_inputs, high, is_gated=is_gated)
            activation = "silu" if is_gated else None
            results = [skinny_linear(x[:n], weight, config, activation=activation)[:low] for n in (low, low + 1, high)]
            assert all(torch.equal(result, results[0]) for result in results), (num_outputs, low)
