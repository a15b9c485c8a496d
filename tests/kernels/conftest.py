"""Kernels run compiled where there is a GPU, and in Triton's interpreter, on the CPU, where there is none."""

from __future__ import annotations

import interpreted_triton  # noqa: F401, before the kernels
import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def split_k(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS defers split-K partials; on a CPU, which has no product of 16-bit inputs to float32, they are computed in
    float32."""
    from ringcore.kernels.linears import skinny_configs
    from ringcore.model_executor.linear_schemes import kernel_product

    monkeypatch.setattr(skinny_configs, "choose_split_k", lambda outputs, inputs, rows: 2)
    if device.type == "cpu":
        multiply, bmm = kernel_product._split_k_linear, torch.bmm
        monkeypatch.setattr(kernel_product, "sums_in_float32", lambda dtype, device: True)
        monkeypatch.setattr(
            kernel_product, "_split_k_linear", lambda x, weight, n: multiply(x.float(), weight.float(), n)
        )
        monkeypatch.setattr(torch, "bmm", lambda x, y, *, out_dtype: bmm(x, y))
