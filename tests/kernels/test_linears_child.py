"""The child that times linears: every kernel gives the product, and a wrong one no time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringcore.kernels.linears import skinny_linear


@pytest.fixture
def child(device: torch.device) -> Any:
    from benchmarks.peers.linears import Linears

    linears = Linears()
    linears.load(device.type, "bfloat16" if device.type == "cuda" else "float32")
    return linears


FMA = {"block_outputs": 8, "block_inputs": 64, "num_warps": 1}
DOT = {"block_weights": 32, "block_inputs": 32, "num_warps": 4, "num_stages": 2, "splits": 1}


@pytest.mark.parametrize(("kernel", "config", "num_rows"), [("fma", FMA, 1), ("dot", DOT, 8), ("cublas", {}, 8)])
@pytest.mark.parametrize(("is_gated", "role"), [(True, "after norm"), (False, "added"), (False, "plain")])
def test_a_kernel_that_gives_the_product_is_timed(
    child: Any, kernel: str, config: dict[str, Any], num_rows: int, is_gated: bool, role: str
) -> None:
    case = {"num_outputs": 32, "num_inputs": 64, "is_gated": is_gated, "role": role, "num_rows": num_rows}
    assert child.measure(case, kernel, config)["seconds"] > 0


def test_a_wrong_one_is_not_timed(child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = skinny_linear.skinny_linear
    monkeypatch.setattr(skinny_linear, "skinny_linear", lambda *given, **rest: right(*given, **rest) * 1.1)
    case = {"num_outputs": 32, "num_inputs": 64, "is_gated": False, "role": "plain", "num_rows": 1}
    found = child.measure(case, "fma", FMA)
    assert "seconds" not in found
    assert "its norm differs by 10.00% from the reference's" in found["error"]
