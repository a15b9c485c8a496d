"""All layers with mixtures of experts for one row in one launch: as test_persistent_layers.py, which has what dense
decoders share with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cuda_on_cpu
import pytest
import torch
from persistent_reference import random_layers, random_row
from persistent_runs import DEVICE, HAS_HOPPER, check, make, on_hopper, programs, run, run_late
from sass import disassemble

from ringcore.kernels.launch.nvrtc import compile_cuda, nvrtc_version
from ringcore.kernels.persistent.persistent_layers import persistent_mixtures
from ringcore.kernels.persistent.persistent_tiles import DecoderShape, choose_persistent_tiles

SMALL = DecoderShape(512, 256, 4, 1, 128, 8, 2)
QWEN3_30B = DecoderShape(2048, 768, 32, 4, 128, 128, 8)
SHAPES = pytest.mark.parametrize("shape", [QWEN3_30B, replace(QWEN3_30B, weight_bytes=1)], ids=["16 bits", "FP8"])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Called with a number of programs: how many run the kernel on a CPU."""
    return programs(monkeypatch)


@pytest.fixture(autouse=True)
def _no_tiles_are_left() -> None:
    choose_persistent_tiles.cache_clear()


@pytest.mark.parametrize(
    ("inner", "num_experts", "num_chosen", "normalises", "dtype"),
    [
        (256, 8, 2, True, torch.bfloat16),  # half of the threads have inputs of a row
        (768, 8, 3, False, torch.bfloat16),  # six of eight warps
        (1096, 36, 5, True, torch.float16),  # a warp in part, whose experts are no multiple of 32
        (64, 256, 1, False, torch.bfloat16),
    ],
)
def test_what_mixtures_have(
    runs: Callable[[int], None],
    inner: int,
    num_experts: int,
    num_chosen: int,
    normalises: bool,
    dtype: torch.dtype,
) -> None:
    shape = DecoderShape(512, inner, 4, 1, 128, num_experts, num_chosen)
    layers = random_layers(shape, 2, dtype, DEVICE)
    kernel = make(shape, layers, normalises=normalises)
    check(shape, kernel, layers, random_row(shape, 2, 40, dtype, DEVICE), normalises=normalises)


def test_codes(runs: Callable[[int], None]) -> None:
    """Of FP8: the router has 16 bits. Scales of down begin at 8 bytes of 16, in every other block."""
    shape = DecoderShape(512, 768, 4, 1, 128, 8, 3, weight_bytes=1)
    layers = random_layers(shape, 1, torch.bfloat16, DEVICE)
    kernel = make(shape, layers, normalises=True)
    check(shape, kernel, layers, random_row(shape, 1, 40, torch.bfloat16, DEVICE), normalises=True)


def test_programs_without_experts(runs: Callable[[int], None]) -> None:
    """More programs than rows of the router, and than units of down."""
    runs(66)
    layers = random_layers(SMALL, 1, torch.bfloat16, DEVICE)
    check(SMALL, make(SMALL, layers), layers, random_row(SMALL, 1, 70, torch.bfloat16, DEVICE))


def test_steps_follow_each_other(runs: Callable[[int], None]) -> None:
    """Tags come round; each step has experts of its own."""
    layers = random_layers(SMALL, 3, torch.bfloat16, DEVICE)
    kernel = make(SMALL, layers)
    for length in [200, *range(20, 27)]:
        check(SMALL, kernel, layers, random_row(SMALL, 3, length, torch.bfloat16, DEVICE))


@pytest.mark.parametrize("normalises", [True, False])
def test_equal_logits(runs: Callable[[int], None], normalises: bool) -> None:
    """The first experts; and the last one before them, whose logits are larger."""
    shape = replace(SMALL, num_chosen=3)
    layers = random_layers(shape, 1, torch.bfloat16, DEVICE)
    router, row = layers[0].router, random_row(shape, 1, 30, torch.bfloat16, DEVICE)
    assert router is not None
    router.zero_()
    kernel = make(shape, layers, normalises=normalises)
    check(shape, kernel, layers, row.clone(), normalises=normalises)
    router[7] = row.hidden[0]
    check(shape, kernel, layers, row, normalises=normalises)


def test_one_expert_has_all_weight(runs: Callable[[int], None]) -> None:
    """The scores of the others are 0."""
    layers = random_layers(SMALL, 1, torch.bfloat16, DEVICE)
    router, row = layers[0].router, random_row(SMALL, 1, 30, torch.bfloat16, DEVICE)
    assert router is not None
    router[5] = row.hidden[0] * 10
    check(SMALL, make(SMALL, layers, normalises=True), layers, row, normalises=True)


def test_same_bits(runs: Callable[[int], None]) -> None:
    """Whatever the order in which programs run and numbers arrive."""
    layers = random_layers(SMALL, 2, torch.bfloat16, DEVICE)
    kernel, row = make(SMALL, layers), random_row(SMALL, 2, 140, torch.bfloat16, DEVICE)
    first, second = row.clone(), row.clone()
    run(kernel, first)
    run(kernel, second)
    assert torch.equal(first.hidden, second.hidden)


@pytest.mark.parametrize("of_router", [False, True])
def test_numbers_that_are_not_finite_are_seen(runs: Callable[[int], None], of_router: bool) -> None:
    """Of the row; of one logit."""
    layers = random_layers(SMALL, 1, torch.bfloat16, DEVICE)
    row, router = random_row(SMALL, 1, 30, torch.bfloat16, DEVICE), layers[0].router
    assert router is not None
    (router[3] if of_router else row.hidden[0])[7] = float("nan")
    run(make(SMALL, layers, normalises=True), row)
    assert row.hidden.isnan().all()


@pytest.mark.skipif(HAS_HOPPER or cuda_on_cpu.COMPILER is None, reason="runs on a CPU, by a C++ compiler")
@pytest.mark.parametrize("program", [0, 2])
def test_a_program_that_waited_too_long(
    runs: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, program: int
) -> None:
    """It chooses experts by whatever it has, the row is no number, and the next one is right."""
    layers = random_layers(SMALL, 1, torch.bfloat16, DEVICE)
    kernel, row = make(SMALL, layers), random_row(SMALL, 1, 70, torch.bfloat16, DEVICE)
    late = row.clone()
    run_late(monkeypatch, persistent_mixtures, kernel, late, program=program)
    assert late.hidden.isnan().all()
    check(SMALL, kernel, layers, row)


@on_hopper
@SHAPES
@pytest.mark.parametrize("normalises", [True, False])
def test_published_shape(normalises: bool, shape: DecoderShape) -> None:
    num_layers, tolerance = (2, None) if shape.weight_bytes == 2 else (1, 6e-2)  # as of dense layers
    layers = random_layers(shape, num_layers, torch.bfloat16, DEVICE)
    kernel = make(shape, layers, normalises=normalises)
    for length in (1, 17, 130, 700, 1500, 3900, 9000):
        row = random_row(shape, num_layers, length, torch.bfloat16, DEVICE)
        check(shape, kernel, layers, row, tolerance=tolerance, normalises=normalises)


@on_hopper
@SHAPES
def test_in_a_graph_many_times(shape: DecoderShape) -> None:
    """The same bits each time."""
    layers = random_layers(shape, 4, torch.bfloat16, DEVICE)
    kernel, row = make(shape, layers, normalises=True), random_row(shape, 4, 400, torch.bfloat16, DEVICE)
    before, first = row.hidden.clone(), row.clone()
    run(kernel, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row.hidden.copy_(before)
        run(kernel, row)
    for _ in range(1000):
        graph.replay()
    assert torch.equal(row.hidden, first.hidden)


@SHAPES
def test_tiles_of_the_published_shape(shape: DecoderShape) -> None:
    tiles = choose_persistent_tiles(shape)
    assert tiles is not None
    assert tiles.fill > 0.86
    assert 200 << 10 < tiles.shared_bytes <= 227 << 10


@pytest.mark.parametrize(
    "shape",
    [
        DecoderShape(4096, 14336, 32, 8, 128, 8, 2),  # Mixtral: a thread has more than a vector of a row of down
        DecoderShape(2048, 512, 16, 2, 128, 512, 10),  # more experts than threads
        DecoderShape(2048, 1408, 16, 16, 128, 62, 4),  # no multiple of four experts
        DecoderShape(2048, 1348, 16, 16, 128, 64, 4),  # rows of down that are no multiple of 16 bytes
        DecoderShape(512, 2048, 4, 1, 128, 32, 16),  # more inputs of down than a thread has registers for
    ],
)
def test_shapes_it_is_not_for(shape: DecoderShape) -> None:
    assert choose_persistent_tiles(shape) is None


@pytest.mark.skipif(nvrtc_version() is None, reason="NVRTC is not installed")
@SHAPES
def test_machine_code_spills_no_register(shape: DecoderShape, tmp_path: Path) -> None:
    kernel = make(shape, random_layers(shape, 1, torch.bfloat16, "meta"), normalises=True)
    macros = [f"{key}={value}" for key, value in json.loads(kernel._specialization(16))["macros"].items()]
    instructions, _ = disassemble(compile_cuda(persistent_mixtures.src, "sm_90a", macros), tmp_path)
    names = {one.name for one in instructions}
    assert not [name for name in names if name.startswith(("LDL", "STL"))]
    assert any(name.startswith("UBLKCP") for name in names), "no bulk copy"
