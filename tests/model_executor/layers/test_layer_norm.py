"""Layer normalisation beside torch's, with what our layers add to it."""

from __future__ import annotations

import pytest
import torch

from ringcore.kernels.partials import Partials
from ringcore.model_executor.layers.layer_norm import LayerNorm
from ringcore.model_executor.residual import Residual

SIZE = 24


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("stored", [("w", "b"), ("w", None), (None, None)])
def test_it_is_torchs_and_follows_its_weights(dtype, plus_one, stored):
    norm = LayerNorm("norm", stored, SIZE, 1e-3, dtype, plus_one=plus_one)
    tensors = {weight.name: rows(SIZE, seed=1).to(dtype) for weight in norm.weights()}
    assert list(tensors) == [f"norm.{leaf}" for leaf, name in zip(("weight", "bias"), stored, strict=True) if name]
    kept = dict(tensors)
    norm.bind(tensors, updatable=True)
    assert not tensors
    x, partials = rows(5, SIZE), rows(3, 5, SIZE, seed=2)

    def expected(x: torch.Tensor) -> torch.Tensor:
        weight, bias = (kept[f"norm.{leaf}"].float() if f"norm.{leaf}" in kept else None for leaf in ("weight", "bias"))
        factor = None if weight is None else weight + float(plus_one)
        return torch.nn.functional.layer_norm(x, (SIZE,), factor, bias, 1e-3).to(dtype)

    assert torch.equal(norm(x), expected(x))
    total = x + partials.sum(0)
    assert torch.equal(norm(x, Partials(partials)), expected(total))
    assert torch.equal(x, total)
    for tensor in kept.values():
        tensor.mul_(2).add_(1)
    norm.refresh()
    assert torch.equal(norm(x), expected(x))
    stream = Residual(rows(5, SIZE, seed=3))
    before = stream.rows.clone()
    norm.add_to(stream, Partials(x[None]))
    assert torch.equal(stream.rows, before + expected(x))
    assert norm.gain is None, "a product would take it for its prologue"
