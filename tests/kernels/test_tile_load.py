"""What only the compiler shows: that kernels of packed weights compile, and what those of few rows leave in L2."""

from __future__ import annotations

from tests.kernels.test_precompile import run

LAUNCHES = """
    import triton_for_sm90
    import torch
    from ringcore.kernels.mixtures.dense_experts import DenseExperts
    from ringcore.kernels.mixtures.expert_matrices import ExpertGate, ExpertMatrices, Routing
    from ringcore.kernels.mixtures.experts_fma import experts_of_one_token
    from ringcore.kernels.linears.packed_weight import BYTES_FP8, NIBBLES, PackedWeight
    from ringcore.kernels.launch.precompile import intercept_launches
    from ringcore.kernels.linears.skinny_linear import skinny_linear
    from ringcore.kernels.linears.skinny_tiles import FmaConfig, PackedFmaConfig

    def numbers(*shape):
        return torch.zeros(*shape, dtype=torch.bfloat16)

    def packed(form, codes, **options):
        return PackedWeight(codes, torch.ones(64, 2), (64, 256), torch.bfloat16, form, codes.stride(0), 128, **options)

    with intercept_launches() as found:
        skinny_linear(numbers(1, 512), numbers(64, 512), FmaConfig(2, 256, 4))
        fma = PackedFmaConfig(4, 256, 2, 8)
        skinny_linear(numbers(1, 256), packed(BYTES_FP8, torch.zeros(64, 256, dtype=torch.uint8)), fma)
        nibbles = torch.zeros(64, 64, dtype=torch.int16)
        skinny_linear(numbers(1, 256), packed(NIBBLES, nibbles, has_zero_bits=True, run=8), fma)
        matrices = ExpertMatrices(DenseExperts(numbers(8, 512, 256)), DenseExperts(numbers(8, 256, 256)))
        routing = Routing(torch.zeros(1, 4, dtype=torch.int32), numbers(1, 4))
        experts_of_one_token(numbers(1, 256), routing, matrices, ExpertGate(), numbers(1, 256), adds=False)
    for (kernel, _), variant in found.items():
        ptx = kernel.preload(variant.specialization).asm["ptx"]
        print(kernel.__name__, "L2::evict_first" in ptx, ptx.count("L2::cache_hint.") < ptx.count("ld.global"))
"""


def test_weights_of_few_rows_are_evicted_first(tmp_path) -> None:
    lines = [line.split() for line in run(LAUNCHES, tmp_path).splitlines()]
    assert len(lines) == 5
    assert all(line[1:] == ["True", "True"] for line in lines), lines  # and others are not


SEVERAL_ROWS = """
    import triton_for_sm90
    import torch
    from ringcore.kernels.linears.packed_weight import BYTES_FP8, BYTES_INT8, NIBBLES, NIBBLES_E2M1, PackedWeight
    from ringcore.kernels.launch.precompile import intercept_launches
    from ringcore.kernels.linears.skinny_linear import skinny_linear
    from ringcore.kernels.linears.skinny_tiles import DotConfig

    with intercept_launches() as found:
        for form, codes in (
            (BYTES_FP8, torch.zeros(64, 256, dtype=torch.uint8)),
            (BYTES_INT8, torch.zeros(64, 256, dtype=torch.uint8)),
            (NIBBLES, torch.zeros(64, 64, dtype=torch.int16)),
            (NIBBLES_E2M1, torch.zeros(64, 64, dtype=torch.int16)),
        ):
            weight = PackedWeight(codes, torch.ones(64, 2), (64, 256), torch.bfloat16, form, codes.stride(0), 128)
            skinny_linear(torch.zeros(16, 256, dtype=torch.bfloat16), weight, DotConfig(64, 128, 4, 3, 1))
    for (kernel, _), variant in found.items():
        kernel.preload(variant.specialization)
        print(kernel.__name__)
"""


def test_products_of_several_rows_compile(tmp_path) -> None:
    assert len(run(SEVERAL_ROWS, tmp_path).splitlines()) == 4


WITH_A_NORM = """
    import triton_for_sm90
    import torch
    from ringcore.kernels.launch.precompile import intercept_launches
    from ringcore.kernels.linears import packed_fma
    from ringcore.kernels.linears.packed_weight import BYTES_FP8, NIBBLES, PackedWeight
    from ringcore.kernels.partials import RowNorm
    from ringcore.kernels.linears.skinny_linear import skinny_linear
    from ringcore.kernels.linears.skinny_tiles import PackedFmaConfig

    packed_fma.supports_pdl = lambda device: True
    norm = RowNorm(torch.ones(256, dtype=torch.bfloat16), 1e-6)
    with intercept_launches() as found:
        for form, codes in (
            (BYTES_FP8, torch.zeros(64, 256, dtype=torch.uint8)),
            (NIBBLES, torch.zeros(64, 64, dtype=torch.int16)),
        ):
            stored = codes, torch.ones(64, 2), (64, 256), torch.bfloat16, form, codes.stride(0), 128
            weight = PackedWeight(*stored, run=8)
            skinny_linear(torch.zeros(1, 256), weight, PackedFmaConfig(4, 256, 2, 8), norm=norm)
    for (kernel, _), variant in found.items():
        before, _, after = kernel.preload(variant.specialization).asm["ptx"].partition("griddepcontrol.wait")
        print(before.count(".cg."), after.count(".cg."), before.count("ld.global"), after.count("ld.global"))
"""


def test_gains_are_loaded_before_the_wait_from_the_l2_cache(tmp_path) -> None:
    lines = [[int(count) for count in line.split()] for line in run(WITH_A_NORM, tmp_path).splitlines()]
    assert len(lines) == 2
    for gains, others, early, late in lines:
        assert gains > 0
        assert others == 0
        assert early > gains  # the first tile of the weight
        assert late > 0  # the row
