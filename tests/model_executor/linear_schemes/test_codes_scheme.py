"""Which scales in blocks stay one for 128 outputs, on a GPU: those whose outputs are in the blocks' order."""

from __future__ import annotations

import pytest
import torch

from ringcore.checkpoint.quantization import CodesFormat
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.codes_scheme import CodesScheme
from ringcore.model_executor.linear_schemes.quantized import places_of_outputs
from ringcore.model_executor.linear_schemes.shard import InputSlice, LinearShard, OutputSlice

IN_BLOCKS = CodesFormat("fp8", "block", (128, 128), "weight_scale_inv")
INPUTS = 256


def halves_by_turns(size: int) -> tuple[int, ...]:
    """A head's outputs in rotary order."""
    return tuple(i // 2 + i % 2 * (size // 2) for i in range(size))


def heads(name: str, num_outputs: int, start: int, length: int, head_size: int | None = None) -> OutputSlice:
    return OutputSlice(name, num_outputs, start, length, halves_by_turns(head_size) if head_size else None)


@pytest.mark.parametrize(
    ("outputs", "run"),
    [
        pytest.param([heads("q", 512, 0, 512), heads("k", 256, 0, 256)], 128, id="in order"),
        pytest.param(
            [heads("q", 512, 0, 512, 128), heads("k", 256, 0, 256, 128), heads("v", 256, 0, 256)], 128, id="qkv"
        ),
        pytest.param([heads("q", 512, 256, 256, 64), heads("k", 256, 128, 128, 64)], 128, id="of a rank, heads of 64"),
        pytest.param([heads("q", 512, 0, 512, 256)], 1, id="heads of two blocks"),
        pytest.param([heads("q", 512, 64, 128, 64)], 1, id="a slice that begins within a block"),
        pytest.param([heads("q", 64, 0, 64, 64), heads("k", 128, 0, 128, 64)], 1, id="a part of half a block"),
    ],
)
def test_outputs_share_scales_where_they_are_in_the_order_of_blocks(monkeypatch, outputs, run):
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    shard = LinearShard("qkv", tuple(outputs), InputSlice.whole(INPUTS), torch.bfloat16)
    num_outputs = sum(each.length for each in outputs)
    num_blocks = sum(-(-(each.start + each.length) // 128) - each.start // 128 for each in outputs)
    codes = torch.randn(num_outputs, INPUTS).to(torch.float8_e4m3fn)
    scales = torch.rand(num_blocks, INPUTS // 128) + 0.5
    matrix = CodesScheme(IN_BLOCKS).quantized_matrix(shard, {"weight": codes, "weight_scale_inv": scales})
    assert matrix.scale_run == run
    of_outputs = scales[places_of_outputs(shard, 128) // 128]
    assert torch.equal(matrix.expanded(), codes.float() * of_outputs.repeat_interleave(128, 1))
