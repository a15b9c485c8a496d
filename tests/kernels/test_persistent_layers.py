"""All layers for one row in one launch: numbers on a Hopper GPU, or of a few programs on a CPU by `cuda_on_cpu`; which
decoders it is for; its machine code where NVRTC is installed."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cuda_on_cpu
import pytest
import torch
from persistent_reference import random_layers, random_row
from persistent_runs import DEVICE, HAS_HOPPER, check, make, on_hopper, programs, run, run_late
from persistent_shapes import SHAPES
from sass import disassemble

from ringcore.kernels.launch.nvrtc import compile_cuda, nvrtc_version
from ringcore.kernels.persistent import persistent_tiles
from ringcore.kernels.persistent.persistent_layers import persistent_layers
from ringcore.kernels.persistent.persistent_tiles import DecoderShape, choose_persistent_tiles

SMALL = DecoderShape(512, 1024, 4, 1, 128)
CODES = DecoderShape(2560, 384, 4, 1, 128, weight_bytes=1)
CODED = {f"{name} in FP8": replace(SHAPES[name], weight_bytes=1) for name in ("Qwen3-4B", "Qwen3-8B", "Qwen3-14B")}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Called with a number of programs: how many run the kernel on a CPU."""
    return programs(monkeypatch)


@pytest.fixture(autouse=True)
def _no_tiles_are_left() -> None:
    choose_persistent_tiles.cache_clear()


@pytest.mark.parametrize(
    ("length", "is_small"),
    [
        *((length, False) for length in (0, 1, 63, 64, 65, 300, 1100)),
        (1, True),
        (65, True),
        (300, True),
    ],
)
def test_lengths(runs: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, length: int, is_small: bool) -> None:
    """Of a context that is empty, within a tile, of one split, of a tile for some splits, and of several for all."""
    runs(5)
    monkeypatch.setattr(persistent_tiles, "_SMALL_LAYER", 1e6 if is_small else 0)
    layers = random_layers(SMALL, 2, torch.bfloat16, DEVICE)
    check(SMALL, make(SMALL, layers), layers, random_row(SMALL, 2, length, torch.bfloat16, DEVICE))


@pytest.mark.parametrize(
    ("dtype", "gain_dtype", "has_bias", "has_head_norm", "is_gelu"),
    [
        (torch.float16, torch.float16, True, False, False),
        (torch.bfloat16, torch.float32, False, True, True),
        (torch.float16, torch.float32, True, True, False),
    ],
)
def test_what_layers_have(
    runs: Callable[[int], None],
    dtype: torch.dtype,
    gain_dtype: torch.dtype,
    has_bias: bool,
    has_head_norm: bool,
    is_gelu: bool,
) -> None:
    """7 query heads a KV head, which one program has: two of nine heads for some warps. Blocks of 32 tokens."""
    runs(9)
    shape = DecoderShape(512, 512, 28, 4, 128)
    has = gain_dtype, has_bias, has_head_norm
    layers = random_layers(shape, 1, dtype, DEVICE, *has)
    kernel, row = make(shape, layers, is_gelu=is_gelu), random_row(shape, 1, 130, dtype, DEVICE, 32)
    check(shape, kernel, layers, row, is_gelu=is_gelu)


@pytest.mark.parametrize("length", [130, 300])
def test_heads_of_64(runs: Callable[[int], None], length: int) -> None:
    """Four groups of query heads a KV head, of one split and of two."""
    runs(17)
    shape = DecoderShape(512, 512, 16, 2, 64)
    layers = random_layers(shape, 1, torch.bfloat16, DEVICE)
    check(shape, make(shape, layers), layers, random_row(shape, 1, length, torch.bfloat16, DEVICE))


@pytest.mark.parametrize(
    ("programs", "shape", "dtype", "block_size", "length"),
    [
        (9, DecoderShape(512, 512, 12, 4, 128), torch.float16, 32, 257),  # a head that is merged alone
        (8, DecoderShape(512, 512, 16, 1, 64), torch.bfloat16, 16, 256),  # two programs on the keys of 16 heads
        (17, DecoderShape(512, 512, 8, 1, 128), torch.bfloat16, 16, 2180),  # more splits than are merged at once
        (9, DecoderShape(512, 512, 8, 2, 64), torch.bfloat16, 128, 70),  # a tile that no warp but five has tokens of
    ],
)
def test_long_contexts(
    runs: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    programs: int,
    shape: DecoderShape,
    dtype: torch.dtype,
    block_size: int,
    length: int,
) -> None:
    """By tensor cores, and once more shorter, by FMA: what a context leaves unwritten is not read by the next."""
    runs(programs)
    monkeypatch.setattr(persistent_tiles, "_LONG_CONTEXT", 70 // min(8, shape.num_heads // shape.num_kv_heads))
    layers = random_layers(shape, 1, dtype, DEVICE)
    kernel = make(shape, layers)
    for tokens in (length, 7, length + 1):
        check(shape, kernel, layers, random_row(shape, 1, tokens, dtype, DEVICE, block_size))


def test_programs_without_outputs(runs: Callable[[int], None]) -> None:
    """More programs than units of what is added to the residual stream."""
    runs(66)
    layers = random_layers(SMALL, 1, torch.bfloat16, DEVICE)
    check(SMALL, make(SMALL, layers), layers, random_row(SMALL, 1, 70, torch.bfloat16, DEVICE))


@pytest.mark.parametrize(("inner", "is_cut"), [(11264, True), (11008, True), (1096, False), (600, False)])
def test_rows_of_down(runs: Callable[[int], None], inner: int, is_cut: bool) -> None:
    """Of which a slot has a part, and of which some threads have a vector less."""
    runs(8)
    shape = DecoderShape(512, inner, 4, 1, 128)
    tiles = choose_persistent_tiles(shape)
    assert tiles is not None
    assert (tiles.products[3].parts > 1) == is_cut
    layers = random_layers(shape, 1, torch.bfloat16, DEVICE)
    check(shape, make(shape, layers), layers, random_row(shape, 1, 20, torch.bfloat16, DEVICE))


@pytest.mark.parametrize(
    ("shape", "num_programs"),
    [
        # Of down three vectors of eight, or two; scales that begin anywhere in 16 bytes.
        (DecoderShape(512, 4224, 4, 1, 128, weight_bytes=1), 5),
        (CODES, 11),  # vectors of 16, which five of eight warps have
    ],
)
def test_codes(runs: Callable[[int], None], shape: DecoderShape, num_programs: int) -> None:
    """Of FP8."""
    runs(num_programs)
    layers = random_layers(shape, 1, torch.bfloat16, DEVICE, has_bias=True)
    check(shape, make(shape, layers), layers, random_row(shape, 1, 20, torch.bfloat16, DEVICE))


def test_sums_of_codes(runs: Callable[[int], None]) -> None:
    """Sums of float16s are off by some 3e-4 of a row, by which some inputs are rounded to other codes."""
    runs(11)
    layers = random_layers(CODES, 1, torch.bfloat16, DEVICE, has_bias=True, is_dense=True)
    check(CODES, make(CODES, layers), layers, random_row(CODES, 1, 70, torch.bfloat16, DEVICE), tolerance=4e-2)


def test_steps_follow_each_other(runs: Callable[[int], None]) -> None:
    """Tags go on from launch to launch; a short context after a long one. Of odd layers, whose tags come round."""
    runs(5)
    layers = random_layers(SMALL, 1, torch.bfloat16, DEVICE)
    kernel = make(SMALL, layers)
    for length in [200, 20, *range(21, 37), 200]:
        check(SMALL, kernel, layers, random_row(SMALL, 1, length, torch.bfloat16, DEVICE))


def test_same_bits(runs: Callable[[int], None]) -> None:
    """Whatever the order in which programs run and numbers arrive."""
    layers = random_layers(SMALL, 1, torch.bfloat16, DEVICE)
    kernel, row = make(SMALL, layers), random_row(SMALL, 1, 140, torch.bfloat16, DEVICE)
    first, second = row.clone(), row.clone()
    run(kernel, first)
    run(kernel, second)
    assert torch.equal(first.hidden, second.hidden)


@pytest.mark.parametrize(("shape", "number"), [(SMALL, float("nan")), (CODES, float("nan")), (CODES, float("-inf"))])
def test_numbers_that_are_not_finite_are_seen(runs: Callable[[int], None], shape: DecoderShape, number: float) -> None:
    runs(11)
    layers = random_layers(shape, 1, torch.bfloat16, DEVICE, has_bias=True)
    row = random_row(shape, 1, 30, torch.bfloat16, DEVICE)
    row.hidden[0, 7] = number
    run(make(shape, layers), row)
    assert row.hidden.isnan().all()


@pytest.mark.skipif(HAS_HOPPER or cuda_on_cpu.COMPILER is None, reason="runs on a CPU, by a C++ compiler")
def test_a_program_that_waited_too_long(runs: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of 66, which adds nothing to the residual stream itself: the row is no number, the next one is right."""
    runs(66)
    layers = random_layers(SMALL, 1, torch.bfloat16, DEVICE)
    kernel, row = make(SMALL, layers), random_row(SMALL, 1, 70, torch.bfloat16, DEVICE)
    late = row.clone()
    run_late(monkeypatch, persistent_layers, kernel, late, program=65)
    assert late.hidden.isnan().all()
    check(SMALL, kernel, layers, row)


def test_keeps_no_tensors(runs: Callable[[int], None]) -> None:
    """Kernel warm-up drops its model while the engine goes on."""
    layers = random_layers(SMALL, 1, torch.bfloat16, DEVICE)
    kernel = make(SMALL, layers)
    run(kernel, random_row(SMALL, 1, 5, torch.bfloat16, DEVICE))
    left = weakref.ref(layers[0].qkv)
    del layers, kernel
    gc.collect()
    assert left() is None


@on_hopper
@pytest.mark.parametrize("name", SHAPES | CODED)
def test_published_shapes(name: str) -> None:
    """In FP8 one layer: a key that is rounded to its neighbour moves inputs to other codes, more in each layer."""
    shape = (SHAPES | CODED)[name]
    num_layers, tolerance = (2, None) if shape.weight_bytes == 2 else (1, 6e-2)
    layers = random_layers(shape, num_layers, torch.bfloat16, DEVICE, has_head_norm="Qwen" in name)
    kernel = make(shape, layers)
    for length in (1, 17, 130, 700, 1500, 3900, 9000):
        row = random_row(shape, num_layers, length, torch.bfloat16, DEVICE)
        check(shape, kernel, layers, row, tolerance=tolerance)


@on_hopper
def test_in_a_graph_many_times() -> None:
    """The same bits each time, some hundred thousand barriers later."""
    shape = SHAPES["Qwen3-0.6B"]
    layers = random_layers(shape, 28, torch.bfloat16, DEVICE)
    kernel, row = make(shape, layers), random_row(shape, 28, 400, torch.bfloat16, DEVICE)
    before, first = row.hidden.clone(), row.clone()
    run(kernel, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row.hidden.copy_(before)
        run(kernel, row)
    for _ in range(1000):
        graph.replay()
    assert torch.equal(row.hidden, first.hidden)


def test_tiles_of_published_shapes() -> None:
    """Slots are nearly full, all shared memory is taken, and no row is cut where a slot has room."""
    for shape in (*SHAPES.values(), *CODED.values()):
        tiles = choose_persistent_tiles(shape)
        assert tiles is not None
        assert tiles.fill > 0.8
        assert 200 << 10 < tiles.shared_bytes <= 227 << 10
        row_bytes = [of.inputs * of.weight_bytes for of in tiles.products]
        used = [num_bytes * of.slot_rows / of.parts for of, num_bytes in zip(tiles.products, row_bytes, strict=True)]
        assert max(used) <= tiles.slot_bytes


@pytest.mark.parametrize(
    "shape",
    [
        DecoderShape(896, 4864, 14, 2, 64),  # Qwen2.5-0.5B: 896 inputs are no multiple of 512
        DecoderShape(512, 1001, 4, 1, 128),  # rows of down are no multiple of 16 bytes
        DecoderShape(4096, 12288, 16, 8, 256),
        DecoderShape(8192, 28672, 64, 8, 128),  # 70B: more inputs than a thread has registers for
        DecoderShape(5120, 25600, 64, 8, 128, weight_bytes=1),  # 32B: likewise, and a slot has no row of down
        DecoderShape(512, 1096, 4, 1, 128, weight_bytes=1),  # rows of down are no whole blocks
        DecoderShape(512, 1024, 8, 1, 64, weight_bytes=1),  # half a block of keys
    ],
)
def test_shapes_it_is_not_for(shape: DecoderShape) -> None:
    assert choose_persistent_tiles(shape) is None


@pytest.mark.skipif(nvrtc_version() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-14B", "Qwen3-8B in FP8"])
def test_machine_code_spills_no_register(name: str, tmp_path: Path) -> None:
    shape = (SHAPES | CODED)[name]
    content = json.loads(make(shape, random_layers(shape, 1, torch.bfloat16, "meta"))._specialization(16))
    macros = [f"{key}={value}" for key, value in content["macros"].items()]
    instructions, _ = disassemble(compile_cuda(persistent_layers.src, "sm_90a", macros), tmp_path)
    names = {one.name for one in instructions}
    assert not [name for name in names if name.startswith(("LDL", "STL"))]
    assert any(name.startswith("UBLKCP") for name in names), "no bulk copy"
