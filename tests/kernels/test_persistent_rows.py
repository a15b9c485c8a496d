"""All layers for two to eight rows in one launch: numbers on a Hopper GPU, or of a few programs on a CPU by
`cuda_on_cpu`; which decoders it is for; its machine code where NVRTC is installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cuda_on_cpu
import pytest
import torch
from persistent_reference import EPS, HEAD_EPS, Row, random_layers, run_reference
from persistent_runs import DEVICE, HAS_HOPPER, on_hopper, programs
from persistent_shapes import SHAPES
from sass import disassemble

from ringcore.kernels.launch.nvrtc import compile_cuda, nvrtc_version
from ringcore.kernels.persistent.persistent_layers import PersistentLayer
from ringcore.kernels.persistent.persistent_rows import PersistentRows, persistent_rows
from ringcore.kernels.persistent.persistent_rows_tiles import choose_rows_tiles
from ringcore.kernels.persistent.persistent_tiles import DecoderShape

SMALL = DecoderShape(512, 1024, 4, 1, 128)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Called with a number of programs: how many run the kernel on a CPU."""
    return programs(monkeypatch)


def random_rows(
    shape: DecoderShape, num_layers: int, lengths: Sequence[int], dtype: torch.dtype, block_size: int = 16
) -> Row:
    generator = torch.Generator(DEVICE).manual_seed(sum(lengths))
    blocks_of_row = max(lengths) // block_size + 2
    num_rows, num_blocks = len(lengths), len(lengths) * blocks_of_row
    angles = torch.rand(num_rows, shape.head_size // 2, generator=generator, device=DEVICE) * 6
    cache = num_blocks + 1, 2, shape.num_kv_heads, block_size, shape.head_size
    return Row(
        torch.randn(num_rows, shape.hidden_size, generator=generator, device=DEVICE),
        torch.stack((angles.cos(), angles.sin()), -1).view(num_rows, -1),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        (torch.randperm(num_blocks, generator=generator, device=DEVICE) + 1).int().view(num_rows, -1),
        [torch.randn(cache, generator=generator, device=DEVICE).to(dtype) for _ in range(num_layers)],
    )


def make(shape: DecoderShape, layers: list[PersistentLayer], *, is_gelu: bool = False) -> PersistentRows:
    tiles = choose_rows_tiles(shape)
    assert tiles is not None
    dtype, scale = layers[0].qkv.dtype, shape.head_size**-0.5
    return PersistentRows(shape, tiles, layers, dtype, eps=EPS, head_eps=HEAD_EPS, scale=scale, is_gelu=is_gelu)


def run(kernel: PersistentRows, rows: Row) -> None:
    kernel(rows.hidden, rows.cos_sin, rows.seq_lens, rows.block_table, rows.kv_caches)


def check(
    shape: DecoderShape, kernel: PersistentRows, layers: list[PersistentLayer], rows: Row, *, is_gelu: bool = False
) -> None:
    """Runs it."""
    expected, before = rows.clone(), rows.hidden.clone()
    for i in range(len(before)):
        of_row = (one[i : i + 1] for one in (expected.hidden, rows.cos_sin, rows.seq_lens, rows.block_table))
        run_reference(shape, layers, Row(*of_row, expected.kv_caches), is_gelu=is_gelu)
    run(kernel, rows)
    wrong = (rows.hidden - expected.hidden).norm(dim=1) / (expected.hidden - before).norm(dim=1)
    assert wrong.max() < (1e-2 if layers[0].qkv.dtype == torch.bfloat16 else 2e-3), wrong
    for cache, other in zip(rows.kv_caches, expected.kv_caches, strict=True):
        torch.testing.assert_close(cache, other, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("lengths", [(1, 0), (300, 7, 1, 130, 90, 0, 33, 200)])
def test_lengths(runs: Callable[[int], None], lengths: tuple[int, ...]) -> None:
    """Of contexts that are empty, within a slot, whole and in parts."""
    runs(9)
    layers = random_layers(SMALL, 2, torch.bfloat16, DEVICE)
    check(SMALL, make(SMALL, layers), layers, random_rows(SMALL, 2, lengths, torch.bfloat16))


@pytest.mark.parametrize(
    ("shape", "dtype", "gain_dtype", "has_head_norm", "is_gelu", "block_size"),
    [
        # 7 query heads a KV head; down in two chunks, of which the last has columns for some warps.
        (DecoderShape(512, 5696, 28, 4, 128), torch.float16, torch.float32, False, True, 32),
        # 16 query heads a KV head, for two programs; slots of 64 tokens.
        (DecoderShape(512, 512, 16, 1, 64), torch.bfloat16, None, True, False, 128),
    ],
)
def test_what_layers_have(
    runs: Callable[[int], None],
    shape: DecoderShape,
    dtype: torch.dtype,
    gain_dtype: torch.dtype | None,
    has_head_norm: bool,
    is_gelu: bool,
    block_size: int,
) -> None:
    runs(9)
    layers = random_layers(shape, 1, dtype, DEVICE, gain_dtype, dtype == torch.float16, has_head_norm)
    rows = random_rows(shape, 1, (257, 20, 130), dtype, block_size)
    check(shape, make(shape, layers, is_gelu=is_gelu), layers, rows, is_gelu=is_gelu)


def test_steps_follow_each_other(runs: Callable[[int], None]) -> None:
    """What a step leaves is not read by the next one, of more or fewer rows."""
    runs(9)
    layers = random_layers(SMALL, 1, torch.bfloat16, DEVICE)
    kernel = make(SMALL, layers)
    for lengths in ((300, 5, 40), (17,) * 8, (500, 1), (30, 300, 30, 30, 30)):
        check(SMALL, kernel, layers, random_rows(SMALL, 1, lengths, torch.bfloat16))


def test_a_row_that_is_not_finite(runs: Callable[[int], None]) -> None:
    """The others have the same bits, whatever the order in which programs run and numbers arrive."""
    runs(9)
    layers = random_layers(SMALL, 1, torch.bfloat16, DEVICE)
    kernel, rows = make(SMALL, layers), random_rows(SMALL, 1, (30, 300, 5), torch.bfloat16)
    other = rows.clone()
    other.hidden[1, 7] = float("nan")
    run(kernel, rows)
    run(kernel, other)
    assert other.hidden[1].isnan().all()
    assert torch.equal(rows.hidden[::2], other.hidden[::2])


@pytest.mark.skipif(HAS_HOPPER or cuda_on_cpu.COMPILER is None, reason="runs on a CPU, by a C++ compiler")
def test_a_program_that_waited_too_long(runs: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is a number, and the next step is right."""
    runs(9)
    layers = random_layers(SMALL, 1, torch.bfloat16, DEVICE)
    kernel, rows = make(SMALL, layers), random_rows(SMALL, 1, (70, 200), torch.bfloat16)
    late, launch = rows.clone(), persistent_rows.launch

    def launch_late(programs: int, content: str, arguments: Callable[[], Any]) -> None:
        with_clock = json.loads(content)
        with_clock["macros"]["CLOCK"] = "(current_program == 8 ? 1000000000ll : 0ll)"
        launch(programs, json.dumps(with_clock), arguments)

    with monkeypatch.context() as patch:
        patch.setattr(persistent_rows, "launch", launch_late)
        run(kernel, late)
    assert late.hidden.isnan().all()
    check(SMALL, kernel, layers, rows)


@on_hopper
@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes(name: str) -> None:
    shape = SHAPES[name]
    layers = random_layers(shape, 2, torch.bfloat16, DEVICE, has_head_norm="Qwen" in name)
    kernel = make(shape, layers)
    for lengths in ((1, 0), (150,) * 8, (1150,) * 8, (17, 9000, 1, 700), (4000, 130, 65, 64, 63, 2000, 1)):
        check(shape, kernel, layers, random_rows(shape, 2, lengths, torch.bfloat16))


@on_hopper
def test_replays_have_the_same_bits() -> None:
    shape = SHAPES["Qwen3-0.6B"]
    layers = random_layers(shape, 4, torch.bfloat16, DEVICE)
    kernel, rows = make(shape, layers), random_rows(shape, 4, (700, 150, 1150, 20, 1, 64, 2000, 333), torch.bfloat16)
    before, first = rows.hidden.clone(), rows.clone()
    run(kernel, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.hidden.copy_(before)
        run(kernel, rows)
    for _ in range(1000):
        graph.replay()
    assert torch.equal(rows.hidden, first.hidden)


def test_tiles_of_published_shapes() -> None:
    """Slots are nearly full, and all shared memory is taken."""
    for name in SHAPES:
        tiles = choose_rows_tiles(SHAPES[name])
        assert tiles is not None
        assert tiles.fill > 0.8
        assert 200 << 10 < tiles.shared_bytes <= 227 << 10


@pytest.mark.parametrize(
    "shape",
    [
        DecoderShape(896, 4864, 14, 2, 64),  # Qwen2.5-0.5B: 896 inputs are no multiple of 512
        DecoderShape(512, 1000, 4, 1, 128),  # nor 1,000 of 64
        DecoderShape(4096, 12288, 16, 8, 256),
        DecoderShape(8192, 28672, 64, 8, 128),  # 70B: a row of QKV has more inputs than registers have room for
        DecoderShape(4096, 12288, 32, 8, 128, weight_bytes=1),
        DecoderShape(2048, 768, 32, 4, 128, 128, 8),
    ],
)
def test_shapes_it_is_not_for(shape: DecoderShape) -> None:
    assert choose_rows_tiles(shape) is None


@pytest.mark.skipif(nvrtc_version() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B"])
def test_machine_code_spills_no_register(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    content = json.loads(make(shape, random_layers(shape, 1, torch.bfloat16, "meta"))._specialization(16))
    macros = [f"{key}={value}" for key, value in content["macros"].items()]
    instructions, _ = disassemble(compile_cuda(persistent_rows.src, "sm_90a", macros), tmp_path)
    names = {one.name for one in instructions}
    assert not [name for name in names if name.startswith(("LDL", "STL"))]
    assert any(name.startswith("UBLKCP") for name in names), "no bulk copy"
