"""Products of experts in blocks of a GGUF file: those of the numbers that the file means."""

from __future__ import annotations

import pytest
import torch
from gguf_blocks import encoded

from ringcore.checkpoint.quantization import GGUF_BLOCKS, GgufFormat
from ringcore.model_executor.expert_schemes.gguf_experts import GgufExpertsScheme
from ringcore.model_executor.linear_schemes.block_kernels import BlocksArrangement, block_kernels
from ringcore.model_executor.linear_schemes.gguf_blocks import GgufMatrix, round_by_block

pytestmark = pytest.mark.skipif(block_kernels() is None, reason="no C compiler")

EXPERTS, OUTPUTS, INPUTS = 4, 48, 512
# Rows of each expert: one row of one; one and none; skewed; up to 64 of one, and more than are packed at a time.
LOADS = [(0, 0, 1, 0), (1, 0, 2, 2), (16, 0, 1, 5), (33, 3, 0, 64), (0, 600, 0, 0)]


def made(kind: str, rounds: bool, dtype: torch.dtype, padding: tuple[int, int] = (0, 0)):
    """The experts, and their numbers: [num_experts, outputs, inputs]."""
    form = GgufFormat(kind, rounds)
    values = torch.randn(EXPERTS * OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)).numpy()
    rows = torch.from_numpy(encoded(values, kind)).contiguous()
    numbers = GgufMatrix(rows.clone(), form).expanded().view(EXPERTS, OUTPUTS, INPUTS)
    BlocksArrangement(form).arrange(rows)
    return GgufExpertsScheme(form, EXPERTS, padding).weight({"_rows": rows}, dtype), numbers


def routed(load: tuple[int, ...], num_inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """rows, the expert of each, where those of each expert end."""
    counts = torch.tensor(load)
    rows = torch.randn(sum(load), num_inputs, generator=torch.Generator().manual_seed(sum(load)))
    return rows, torch.arange(EXPERTS).repeat_interleave(counts), counts.cumsum(0).int()


@pytest.mark.parametrize("kind", sorted(GGUF_BLOCKS))
def test_products_are_those_of_each_expert_s_numbers(kind):
    """Errors are relative to the sum of the products' absolute values, as a linear's."""
    for rounds, dtype in ((False, torch.float32), (True, torch.float32), (False, torch.bfloat16)):
        weight, numbers = made(kind, rounds, dtype)
        assert torch.equal(weight.numbers(torch.tensor([3, 0])), numbers[[3, 0]])
        for load in LOADS:
            rows, of_row, ends = routed(load, INPUTS)
            rows = rows.to(dtype)
            seen = (round_by_block(rows) if rounds else rows).double()
            each = [(seen[of_row == expert], numbers[expert].double()) for expert in range(EXPERTS)]
            exact = torch.cat([x @ w.T for x, w in each])
            sums = torch.cat([x.abs() @ w.abs().T + 1 for x, w in each])
            error = (weight.product(rows, of_row, ends).double() - exact).abs()
            assert (error <= 1e-5 * sums + (2**-8 * exact.abs() if dtype == torch.bfloat16 else 0)).all(), load


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_inputs_of_blocks_that_are_no_share_of_the_rank_add_nothing(kind):
    """24 inputs before the share, and 200 after it."""
    weight, numbers = made(kind, False, torch.float32, (24, 200))
    own = numbers[:, :, 24:-200]
    assert weight.shape == own.shape
    assert torch.equal(weight.numbers(torch.tensor([2])), own[[2]])
    rows, of_row, ends = routed((16, 0, 1, 5), own.shape[2])
    expected = torch.cat([rows[of_row == expert] @ own[expert].T for expert in range(EXPERTS)])
    torch.testing.assert_close(weight.product(rows, of_row, ends), expected, atol=1e-4, rtol=1e-4)
