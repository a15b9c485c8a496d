"""Fused QKV matrices in FP8 with scales in blocks, on a GPU: in rotary order too the blocks are kept, and few rows (our
kernels) and many (cuBLAS) are multiplied by them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "model_executor" / "linear_schemes"))

from test_codes_scheme import heads

from ringcore.attention.context import TokenContext
from ringcore.checkpoint.quantization import CodesFormat, InputFormat
from ringcore.kernels.linears.round_rows import round_rows_reference
from ringcore.model_executor.linear_schemes.codes_scheme import CodesScheme
from ringcore.model_executor.linear_schemes.quantized import places_of_outputs
from ringcore.model_executor.linear_schemes.shard import InputSlice, LinearShard

DEVICE = torch.device("cuda", 0)
ROUNDED = CodesFormat("fp8", "block", (128, 128), "weight_scale_inv", InputFormat("fp8", "group", 128))
QKV = (heads("q", 512, 0, 512, 128), heads("k", 256, 0, 256, 128), heads("v", 256, 0, 256))

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a GPU of compute capability 9",
)


@pytest.mark.parametrize("num_rows", [1, 8, 64, 65, 100, 256])
def test_a_fused_qkv_in_rotary_order(num_rows):
    torch.manual_seed(num_rows)
    num_inputs = 1024
    shard = LinearShard("qkv", QKV, InputSlice.whole(num_inputs), torch.bfloat16)
    codes = torch.randn(1024, num_inputs, device=DEVICE).to(torch.float8_e4m3fn)
    scales = torch.rand(8, num_inputs // 128, device=DEVICE) + 0.5
    product = CodesScheme(ROUNDED).product(shard, {"weight": codes, "weight_scale_inv": scales}, None, False)
    x = torch.randn(num_rows, num_inputs, device=DEVICE).to(torch.bfloat16)
    rounded = round_rows_reference(x, 128)
    rows = rounded.codes.float() * rounded.scales.repeat_interleave(128, 1)
    of_outputs = scales[places_of_outputs(shard, 128).to(DEVICE) // 128].repeat_interleave(128, 1)
    expected = rows.double() @ (codes.float() * of_outputs).double().t()
    found = product(x, TokenContext(None)).double()
    assert float((found - expected).norm() / expected.norm()) < 4e-3
