"""No kernel gives away registers that tensor cores still read.

A wgmma reads its first matrix from registers while the program goes on; they are free after a wait. In a pipelined loop
whose last `tl.dot` has a result that only the next round's dots use, Triton 3.6 and 3.7 wait in the next round alone,
and ptxas has given the registers away by then: sums were wrong, or not finite, now and then.
"""

from __future__ import annotations

import pytest

from tests.kernels.sass import Instruction, overwritten_operands
from tests.kernels.test_precompile import run

PRODUCTS = """
    import sys, tempfile
    import torch, triton_for_sm90
    from tests.kernels.sass import disassemble, overwritten_operands
    from ringcore.checkpoint.quantization import Mxfp4Format
    from ringcore.kernels.mixtures.expert_matrices import ExpertGate, ExpertMatrices, Routing
    from ringcore.kernels.mixtures.experts import GroupedProducts
    from ringcore.kernels.linears.packed_weight import BYTES_FP8, BYTES_INT8, NIBBLES, PackedWeight
    from ringcore.kernels.attention.paged_attention_prefill import paged_attention_prefill
    from ringcore.kernels.attention.page_layout import PageLayout
    from ringcore.kernels.launch.precompile import intercept_launches
    from ringcore.kernels.linears.skinny_linear import skinny_linear
    from ringcore.kernels.linears.skinny_tiles import DotConfig
    from ringcore.model_executor import ops
    from ringcore.model_executor.expert_schemes.schemes import experts_scheme

    ops.has_kernels = lambda device: True

    def grouped(*config):
        # Gate and up of 70 tokens.
        codes, rows = torch.empty(8, 1024, 16, 16, dtype=torch.uint8), torch.empty(70, 4)
        blocks = {"_blocks": codes, "_scales": codes[..., 0].contiguous()}
        up = experts_scheme(Mxfp4Format()).weight(blocks, torch.bfloat16)
        config = DotConfig(*config[:4], 1, block_rows=config[4])
        products = GroupedProducts(Routing(rows.long(), rows), ExpertMatrices(up, up, None, None), config)
        x, gate = torch.empty(70, 512).bfloat16(), ExpertGate(is_interleaved=True)
        products.product(x, up, None, torch.bfloat16, gate=gate)

    def linear(form, rows, *config, dtype=torch.bfloat16, group_size=128, run=8):
        codes, words = torch.zeros(256, 512, dtype=torch.uint8), torch.zeros(256, 128, dtype=torch.int16)
        stored, scales = words if form == NIBBLES else codes, torch.ones(256, 512 // group_size)
        options = {"group_size": group_size, "zero": 8, "run": run}
        weight = PackedWeight(stored, scales, (256, 512), dtype, form, stored.stride(0), **options)
        skinny_linear(torch.zeros(rows, 512, dtype=dtype), weight, DotConfig(*config, 1))

    def prompts(head_size, is_fp8):
        dtype = torch.uint8 if is_fp8 else torch.bfloat16
        pages = torch.zeros(PageLayout.shape(4, 2, 16, head_size, head_size, is_fp8), dtype=dtype)
        ints, query = torch.zeros(9, 4, dtype=torch.int32), torch.zeros(8, 4, head_size).bfloat16()
        paged_attention_prefill(query, pages, ints[:8], ints[:8, 0], ints[:, 0], 1.0, max_query_len=512)

    with intercept_launches() as found:
        for launch in LAUNCHES:
            launch()
    count = 0
    for (kernel, _), variant in found.items():
        cubin = kernel.preload(variant.specialization).asm["cubin"]
        instructions, labels = disassemble(cubin, tempfile.mkdtemp())
        count += any(i.read_by_tensor_cores for i in instructions)
        for at, name in overwritten_operands(instructions, labels):
            print(kernel.__name__, at, name)
    print(count)
"""


def test_products_of_mxfp4(tmp_path):
    launches = "[lambda: grouped(128, 64, 4, 4, 64)]"
    assert run(PRODUCTS.replace("LAUNCHES", launches), tmp_path) == "1\n"


@pytest.mark.long_form
def test_all_that_expand_in_registers(tmp_path):
    launches = """[
        lambda: grouped(128, 64, 8, 4, 64), lambda: grouped(128, 64, 4, 3, 32),
        lambda: grouped(256, 64, 4, 3, 16),
        lambda: linear(NIBBLES, 64, 128, 128, 4, 3), lambda: linear(NIBBLES, 256, 128, 128, 8, 3),
        lambda: linear(BYTES_INT8, 64, 128, 64, 4, 4), lambda: linear(BYTES_FP8, 64, 128, 64, 8, 4),
        lambda: linear(NIBBLES, 64, 128, 64, 4, 3, group_size=32),
        lambda: linear(NIBBLES, 64, 128, 64, 4, 3, dtype=torch.float16),
        lambda: linear(NIBBLES, 64, 64, 128, 4, 4, run=32), lambda: linear(NIBBLES, 64, 128, 128, 8, 3, run=32),
        lambda: prompts(64, False), lambda: prompts(128, False), lambda: prompts(128, True),
    ]"""
    assert run(PRODUCTS.replace("LAUNCHES", launches), tmp_path) == "14\n"


@pytest.mark.parametrize("waits", [True, False])
def test_it_follows_a_loop(waits):
    wgmma = Instruction("HGMMA.64x64x16.F32.BF16", ["R24", "R60", "gdesc[UR16]", "R24", "gsb0"])
    wait = Instruction("WARPGROUP.DEPBAR.LE", ["gsb0", "0x0"])
    body = [Instruction("IADD3", ["R62", "R1", "R2", "RZ"]), wgmma, *[wait] * waits, Instruction("BRA", ["`(.L_x_0)"])]
    found = overwritten_operands([Instruction("MOV", ["R1", "R2"]), *body, wait], {".L_x_0": 1})
    assert found == ([] if waits else [(1, "IADD3")])
