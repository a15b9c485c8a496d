"""Backends that are batch-invariant: a token's output has the same bits in a prompt, in chunks, decoded, and beside
other sequences."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from attention_bench import HAS_GPU, Bench, spec_of
from interpreted_triton import multiply_in_order

from ringcore.attention.backends import BACKENDS

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys and values of a sequence
LENS = [75, 40, 21, 90]
# The sequence that is looked at is the first. Of each step: (sequence, new tokens).
STEPS: dict[str, list[list[tuple[int, int]]]] = {
    "beside others": [[(1, 7), (0, 75), (2, 21)]],
    "chunks": [[(0, 33)], [(3, 60), (0, 31)], [(0, 10), (1, 3)], [(0, 1), (1, 1)]],
    "decodes": [[(3, 70)], [(0, 62), (3, 1)], *[[(0, 1), (3, 1)]] * 2, [(0, 4), (1, 33)], *[[(0, 1), (1, 1)]] * 7],
}


class SameNumbers(Bench):
    """Tokens whose queries, keys and values are given."""

    def __init__(self, *args: Any, sequences: list[Triple], **options: Any) -> None:
        self.given, self.next = sequences, list[torch.Tensor]()
        super().__init__(*args, **options)

    def tensor(self, *shape: int) -> torch.Tensor:
        return self.next.pop(0) if self.next else super().tensor(*shape)

    def outputs(self, parts: list[tuple[int, int]]) -> torch.Tensor:
        """Of the first sequence."""
        places = [(seq, len(self.sequences[seq].keys), n) for seq, n in parts]
        self.next = [torch.cat([self.given[seq][i][at : at + n] for seq, at, n in places]) for i in range(3)]
        got, _ = self.step(parts)
        before = sum(n for _, n in parts[: [seq for seq, _ in parts].index(0)]) if 0 in dict(parts) else 0
        return got[before : before + dict(parts).get(0, 0)].clone()


def outputs_of(name: str, steps: list[list[tuple[int, int]]], consecutive: bool, **shape: Any) -> torch.Tensor:
    num_kv_heads, num_heads = 2, 6
    spec = spec_of(16, num_kv_heads, shape.get("dtype", "float32"), shape.get("window"))
    device = "cuda" if HAS_GPU and name == "triton_rows" else "cpu"
    draw, dtype = torch.Generator().manual_seed(5), getattr(torch, spec.dtype)
    heads = num_heads, num_kv_heads, num_kv_heads
    sequences = [
        tuple(torch.randn(n, h, spec.head_size, generator=draw).to(device, dtype) for h in heads) for n in LENS
    ]
    bench = SameNumbers(name, spec, num_heads, sequences=sequences)
    bench.allocate(LENS, consecutive)
    return torch.cat([bench.outputs(parts) for parts in steps])


NAMES = [name for name, backend in BACKENDS.items() if backend.is_batch_invariant]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("shape", [{}, {"dtype": "bfloat16", "window": 30}], ids=["plain", "window"])
def test_a_token_has_the_same_bits_in_every_step(
    name: str, steps: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "triton_rows" and not HAS_GPU:
        monkeypatch.setattr(np, "matmul", multiply_in_order)
        if importlib.util.find_spec("triton") is None:
            pytest.skip("triton is not installed")
        if steps != ("beside others" if shape else "chunks"):
            pytest.skip("takes the interpreter too long")
        shape = shape | {"dtype": "float16"} if shape else {}  # the bits of bfloat16 it multiplies as integers
    alone = outputs_of(name, [[(0, LENS[0])]], True, **shape)
    assert torch.equal(outputs_of(name, STEPS[steps], False, **shape), alone)


def test_torch_has_no_batch_invariant_attention() -> None:
    """What the option is for; should torch's kernels come to agree, this test may go."""
    alone = outputs_of("torch_sdpa", [[(0, LENS[0])]], True)
    others = [outputs_of("torch_sdpa", steps, False) for steps in STEPS.values()]
    if all(torch.equal(other, alone) for other in others):
        pytest.skip("torch's kernels agree on this machine")
    assert not BACKENDS["torch_sdpa"].is_batch_invariant
