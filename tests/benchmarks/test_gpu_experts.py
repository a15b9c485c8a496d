"""The benchmark of grouped products: what is tried, what comes of it, and the child in Triton's interpreter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

import interpreted_triton  # noqa: F401, before the kernels
from gpu_runs import run

from benchmarks import gpu_experts
from benchmarks.driver import BenchmarkError
from benchmarks.gpu_ceilings import Ceilings
from benchmarks.gpu_experts import GpuExperts, cases_of, tiles
from benchmarks.harness import engine_specs
from benchmarks.models import MODELS
from benchmarks.peers.experts import Experts

CASE = {"num_tokens": 6, "num_experts": 4, "k": 2, "num_weights": 32, "num_inputs": 32, "is_gated": True}
CASE |= {"shown": "", "is_fp8": False}
TILE = {"block_weights": 32, "block_inputs": 32, "num_warps": 2, "num_stages": 2, "splits": 1, "block_rows": 16}


def test_cases_and_tiles() -> None:
    up, down = cases_of(MODELS["Qwen3-30B-A3B"], [8])
    assert (up.shape, down.shape) == ((128, 8, 1536, 2048), (128, 8, 2048, 768))
    assert {tile.block_rows for tile in tiles(up)} == {16}
    many, _ = cases_of(MODELS["Qwen3-30B-A3B"], [1024])
    assert {tile.block_rows for tile in tiles(many)} == {32, 64, 128}
    with pytest.raises(BenchmarkError, match="no experts"):
        list(cases_of(MODELS["Qwen3-8B"], [1]))


@pytest.mark.parametrize("is_gated", [True, False])
def test_the_child_compares_with_the_product(is_gated: bool) -> None:
    child = Experts()
    child.load("cpu", "float32")
    case = CASE | {"is_gated": is_gated}
    assert child.measure(case, TILE, is_timed=False) == {}
    found = child.measure(case, TILE, is_timed=True)
    assert found["seconds"] > 0
    assert 2 <= found["num_active"] <= 4


class FakeDriver:
    """The deeper the pipeline, the faster; the engine's choice is slower than all."""

    def call(self, command: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        if command == "load":
            return {"python": "3", "packages": {}, "device": "a device"}
        config = arguments["config"]
        return {"seconds": 1.0 if config is None else 1e-5 / config["num_stages"], "num_active": 8.0}

    def send(self, command: str, timeout_s: float, **arguments: Any) -> None:
        assert not arguments["is_timed"]

    def receive(self) -> dict[str, Any]:
        return {}

    def __enter__(self) -> FakeDriver:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


def test_the_best_tiles_are_lines_of_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_experts, "measure_ceilings", lambda device, dtype: Ceilings(1e12, 1e15))
    monkeypatch.setattr(gpu_experts, "Driver", lambda *command: FakeDriver())
    table = tmp_path / "tiles.txt"
    findings = run(GpuExperts, engine_specs([], "eager"), "--tokens=1,8", f"--table={table}")
    assert len(findings.measurements) == 4
    shape, one, eight, *_ = table.read_text().splitlines()
    assert shape == "    (128, 8, 1536, 2048): {"
    assert (one.strip()[:13], eight.strip()[:13]) == ("1: DotConfig(", "8: DotConfig(")
    assert all(", 6, 1, block_rows=16)" in line for line in (one, eight)), "the deepest pipeline"
