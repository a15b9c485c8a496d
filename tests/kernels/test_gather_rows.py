"""Rows by index: equal to the reference to the last bit."""

from __future__ import annotations

import pytest
import torch

from ringcore.kernels.gather_rows import gather_rows, gather_rows_reference


@pytest.mark.parametrize("size", [1, 96, 1024, 1025, 2560])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_those_of_the_table(device, size, dtype):
    table = torch.randn(7, size, dtype=dtype, device=device)
    index = torch.tensor([6, 0, 3, 3], device=device)
    assert torch.equal(gather_rows(table, index), table[index])


@pytest.mark.parametrize("scale", [None, 33.75, 0.1])
@pytest.mark.parametrize("result", [None, torch.float32])
def test_a_rank_has_its_own_rows_and_zeros(device, scale, result):
    table = torch.randn(5, 130, dtype=torch.float16, device=device)
    index = torch.tensor([9, 10, 14, 15, 0, 12], device=device)
    ours = gather_rows(table, index, first=10, scale=scale, dtype=result)
    theirs = gather_rows_reference(table, index, first=10, scale=scale, dtype=result)
    assert ours.dtype == (result or table.dtype)
    assert torch.equal(ours, theirs)
    assert not ours[[0, 3, 4]].any()
    assert ours[[1, 2, 5]].any(1).all()


def test_nothing_is_gathered_of_no_tokens(device):
    table = torch.randn(5, 16, device=device)
    assert gather_rows(table, torch.empty(0, dtype=torch.int64, device=device)).shape == (0, 16)


def test_scaled_rows_are_rounded_as_torch_rounds_them(device):
    table = torch.randn(64, 256, device=device).to(torch.float16)
    index = torch.arange(64, device=device)
    assert torch.equal(gather_rows(table, index, scale=25.25), table * 25.25)
