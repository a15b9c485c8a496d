"""The persistent kernel on a Hopper GPU, or with a few programs on a CPU by `cuda_on_cpu`, beside its reference."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_on_cpu
import pytest
import torch
from persistent_reference import EPS, HEAD_EPS, Row, run_reference

from ringcore.kernels.launch.cuda_kernel import CudaKernel
from ringcore.kernels.persistent import persistent_layers as module
from ringcore.kernels.persistent import persistent_rows as rows_module
from ringcore.kernels.persistent import persistent_rows_tiles, persistent_tiles
from ringcore.kernels.persistent.persistent_layers import PersistentLayer, PersistentLayers
from ringcore.kernels.persistent.persistent_tiles import DecoderShape, choose_persistent_tiles

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
DEVICE = "cuda" if HAS_HOPPER else "cpu"


def use_programs(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """So many run the kernels on a CPU."""
    seeds = itertools.count()
    for each in (module, rows_module, persistent_tiles, persistent_rows_tiles):
        monkeypatch.setattr(each, "NUM_SMS", count)
    one_row, rows = (Path(each.__file__).with_suffix(".cu") for each in (module, rows_module))
    for kernel, source, headers in (
        (module.persistent_layers, one_row, module.HEADERS),
        (module.persistent_mixtures, one_row, module.MIXTURE_HEADERS),
        (rows_module.persistent_rows, rows, rows_module.HEADERS),
    ):
        launch = cuda_on_cpu.launcher(source, module.NUM_THREADS, lambda: next(seeds), headers)
        monkeypatch.setattr(kernel, "launch", launch)
    choose_persistent_tiles.cache_clear()
    persistent_rows_tiles.choose_rows_tiles.cache_clear()


def programs(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Called with their number, on a CPU; three before."""
    if not HAS_HOPPER and cuda_on_cpu.COMPILER is None:
        pytest.skip("needs a Hopper GPU, or a C++ compiler")

    def with_programs(count: int) -> None:
        if not HAS_HOPPER:
            use_programs(monkeypatch, count)

    with_programs(3)
    return with_programs


def make(
    shape: DecoderShape, layers: list[PersistentLayer], *, is_gelu: bool = False, normalises: bool = False
) -> PersistentLayers:
    tiles = choose_persistent_tiles(shape)
    assert tiles is not None
    dtype = layers[0].qkv.dtype if shape.weight_bytes == 2 else torch.bfloat16
    form: dict[str, Any] = {"is_gelu": is_gelu, "normalises": normalises}
    scale = shape.head_size**-0.5
    return PersistentLayers(shape, tiles, layers, dtype, eps=EPS, head_eps=HEAD_EPS, scale=scale, **form)


def run(kernel: PersistentLayers, row: Row) -> None:
    kernel(row.hidden, row.cos_sin, row.seq_lens, row.block_table, row.kv_caches)


def run_late(
    monkeypatch: pytest.MonkeyPatch, of: CudaKernel, kernel: PersistentLayers, row: Row, *, program: int
) -> None:
    """On a CPU, with a program whose clock is fast."""
    launch = of.launch

    def launch_late(programs: int, content: str, arguments: Callable[[], Any]) -> None:
        late = json.loads(content)
        late["macros"]["CLOCK"] = f"(current_program == {program} ? 1000000000ll : 0ll)"
        launch(programs, json.dumps(late), arguments)

    with monkeypatch.context() as patch:
        patch.setattr(of, "launch", launch_late)
        run(kernel, row)


def check(
    shape: DecoderShape,
    kernel: PersistentLayers,
    layers: list[PersistentLayer],
    row: Row,
    tolerance: float | None = None,
    **how: bool,
) -> None:
    """Runs it."""
    expected, before = row.clone(), row.hidden.clone()
    run_reference(shape, layers, expected, **how)
    run(kernel, row)
    wrong = (row.hidden - expected.hidden).norm() / (expected.hidden - before).norm()
    # A key or value, or a logit of a router, may be rounded to its neighbour in 16 bits.
    assert wrong < (tolerance or (1e-2 if shape.num_experts else 2e-3)), wrong
    for cache, other in zip(row.kv_caches, expected.kv_caches, strict=True):
        torch.testing.assert_close(cache, other, rtol=2**-6, atol=2**-6)
