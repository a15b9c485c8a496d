"""What is known of `tma_kernel` without a GPU: how it compiles, by which tiles it is launched, and what becomes of its
splits. Its numbers: tests/gpu/test_tma_linear_on_cuda.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.kernels.linears import skinny_linear, tma_configs
from ringcore.kernels.linears.packed_weight import BYTES_FP8, PackedWeight
from ringcore.kernels.linears.skinny_configs import choose, choose_rounded
from ringcore.kernels.linears.skinny_linear import skinny_linear_reference
from ringcore.kernels.linears.skinny_tiles import TmaConfig, padded_rows
from ringcore.kernels.linears.tma_configs import (
    choose_on_hopper,
    choose_rounded_on_hopper,
    chooser,
    rounded_chooser,
    tma_config,
)
from ringcore.kernels.linears.tma_linear import most_contributors
from ringcore.kernels.partials import Partials
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.residual import Residual
from tests.kernels.test_precompile import run

NUM_SMS, SHARED_BYTES, RESERVED_BYTES = 132, 227 << 10, 1 << 10
# Hidden size, outputs of qkv, inputs of o, and outputs of gate and up: Qwen3-0.6B, 4B, 8B, GLM-4-9B, SmolLM2-135M.
MODELS = (
    (1024, 4096, 2048, 3072),
    (2560, 6144, 4096, 9728),
    (4096, 6144, 4096, 12288),
    (4096, 4608, 4096, 13696),
    (576, 960, 576, 1536),
)


@pytest.mark.parametrize("number_bytes", [2, 1], ids=["16 bits", "FP8"])
@pytest.mark.parametrize("num_rows", [2, 4, 8, 16, 17, 32, 33, 64])
def test_tiles_of_published_models_fit(num_rows: int, number_bytes: int) -> None:
    found = []
    for hidden, qkv, heads, inner in MODELS:
        linears = ((qkv, hidden, False), (hidden, heads, False), (inner, hidden, True), (hidden, inner, False))
        for num_outputs, num_inputs, is_gated in linears:
            config = tma_config(num_outputs, num_inputs, num_rows, is_gated=is_gated, number_bytes=number_bytes)
            if config is None:
                continue
            found.append(config)
            assert num_inputs % (config.block_inputs * config.splits) == 0
            assert config.splits == 1 or not is_gated
            stage_bytes = (config.block_weights + padded_rows(num_rows)) * config.block_inputs * number_bytes
            assert config.num_stages >= 3
            of_program = config.num_stages * stage_bytes + 16 * config.num_stages + RESERVED_BYTES
            assert config.programs_per_sm * of_program <= SHARED_BYTES
            if config.is_even:
                continue
            items = -(-num_outputs * (1 + is_gated) // config.block_weights) * config.splits
            rounds = -(-items // (config.programs_per_sm * NUM_SMS))
            is_even = items >= 0.9 * rounds * config.programs_per_sm * NUM_SMS
            # The 428 tiles of GLM-4-9B's gate and up are even for no number of programs.
            assert rounds == 1 or is_even or (inner, number_bytes, config.programs_per_sm) == (13696, 2, 2)
    assert len(found) >= 4 * len(MODELS) - (0 if number_bytes == 2 else 4)  # 576 inputs are no blocks of 128


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "is_even"),
    [
        (2560, 9728, True),
        (4096, 13696, True),
        (5120, 17920, True),
        (2560, 4096, False),
        (3072, 8192, False),
        (4096, 12288, False),
        (1024, 3072, False),
    ],
    ids=["Qwen3-4B", "GLM-4-9B", "Phi-4", "few blocks", "Llama-3.2-3B", "Qwen3-8B", "Qwen3-0.6B"],
)
@pytest.mark.parametrize("num_rows", [2, 8, 32, 64])
def test_which_products_have_even_ranges(num_outputs: int, num_inputs: int, is_even: bool, num_rows: int) -> None:
    config = tma_config(num_outputs, num_inputs, num_rows)
    assert config is not None
    assert config.is_even == is_even
    assert config.splits == 1 or not is_even


@pytest.mark.parametrize(
    ("num_tiles", "blocks", "num_programs"), [(40, 76, 132), (64, 107, 132), (80, 140, 264), (304, 20, 132), (3, 5, 15)]
)
def test_how_many_programs_have_some_of_a_tile(num_tiles: int, blocks: int, num_programs: int) -> None:
    """As ranges are cut in the kernel."""
    total = num_tiles * blocks
    owners: list[set[int]] = [set() for _ in range(num_tiles)]
    for program in range(num_programs):
        for block in range(program * total // num_programs, (program + 1) * total // num_programs):
            owners[block // blocks].add(program)
            assert ((block + 1) * num_programs - 1) // total == program, "its owner, by the kernel's formula"
    assert most_contributors(num_tiles, blocks, num_programs) == max(map(len, owners))


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "num_rows", "is_gated"),
    [(4096, 4096, 1, False), (4096, 4096, 65, False), (1000, 1000, 8, False), (1004, 1024, 8, True)],
    ids=["one row", "many", "inputs of no block", "gated outputs of no eight"],
)
def test_what_other_kernels_multiply(num_outputs: int, num_inputs: int, num_rows: int, is_gated: bool) -> None:
    expected = choose(num_outputs, num_inputs, num_rows, is_gated=is_gated)
    assert choose_on_hopper(num_outputs, num_inputs, num_rows, is_gated=is_gated) == expected


def fp8_weight(num_inputs: int = 512, **changes: Any) -> PackedWeight:
    codes = torch.zeros(256, num_inputs, dtype=torch.uint8)
    in_blocks = {"group_size": 128, "scale_run": 128} | changes
    scales = torch.ones(2, -(-num_inputs // in_blocks["group_size"]))
    return PackedWeight(codes, scales, (256, num_inputs), torch.bfloat16, BYTES_FP8, num_inputs, **in_blocks)


def test_other_devices_have_other_kernels() -> None:
    assert chooser(torch.zeros(64, 128, dtype=torch.bfloat16)) is choose
    assert rounded_chooser(fp8_weight(), 128) is choose_rounded


def test_what_fp8_it_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tma_configs, "has_wgmma", lambda device: True)
    for row_group in (128, 512):
        assert rounded_chooser(fp8_weight(), row_group) is choose_rounded_on_hopper
        assert rounded_chooser(fp8_weight(group_size=512), row_group) is choose_rounded_on_hopper
    assert rounded_chooser(fp8_weight(), 64) is choose_rounded, "groups of rows that a block divides"
    assert rounded_chooser(fp8_weight(group_size=64), 128) is choose_rounded
    assert rounded_chooser(fp8_weight(group_offset=64), 128) is choose_rounded
    assert choose_rounded_on_hopper(4096, 4096, 1, by_fma=True) == choose_rounded(4096, 4096, 1, by_fma=True)
    assert choose_rounded_on_hopper(4096, 4000, 8) == choose_rounded(4096, 4000, 8)
    assert isinstance(choose_rounded_on_hopper(4096, 4096, 8), TmaConfig)


def by_reference(x: Any, weight: Any, bias: Any, out: Any, _: Any, config: Any, options: Any, defer: Any) -> None:
    """Stands for `launch_tma_linear`."""
    given = bias if options["has_bias"] else None
    if defer is None or not options["adds"] or given is not None or config.splits == 1:
        skinny_linear_reference(x, weight, bias=given, **{"add_to" if options["adds"] else "out": out})
        return
    parts = zip(x.float().chunk(config.splits, 1), weight.float().chunk(config.splits, 1), strict=True)
    defer(Partials(torch.stack([rows @ of_rows.t() for rows, of_rows in parts])))


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_splits_wait_for_the_next_norm(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has_bias: bool) -> None:
    """Of a float32 stream, without a bias; else the kernel has added them."""
    monkeypatch.setattr(skinny_linear, "launch_tma_linear", by_reference)
    torch.manual_seed(0)
    weight, x = torch.randn(24, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    bias, before = torch.randn(24).bfloat16() if has_bias else None, torch.randn(5, 24).to(dtype)
    product = KernelProduct(weight, bias).with_choice(lambda _: lambda *a, **k: TmaConfig(64, 64, 3, 2))
    hidden = Residual(before.clone())
    product.add_to(hidden, x, NO_TOKEN_CONTEXT)
    rows, partials = hidden.take()
    assert (partials is not None) == (dtype == torch.float32 and not has_bias)
    total = rows if partials is None else rows + partials.total()
    expected = skinny_linear_reference(x, weight, bias=bias, add_to=before.clone())
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-2)


LAUNCHES = """
    import torch, triton_for_sm90
    from tests.kernels.sass import disassemble
    import tempfile
    from ringcore.kernels.linears.packed_weight import BYTES_FP8, PackedWeight
    from ringcore.kernels.launch.precompile import intercept_launches
    from ringcore.kernels.linears.round_rows import RoundedRows
    from ringcore.kernels.linears.skinny_tiles import TmaConfig
    from ringcore.kernels.linears.tma_linear import launch_tma_linear

    DEFAULTS = {"has_bias": False, "is_gated": False, "is_gelu": False, "adds": False, "launch_pdl": True}

    def launch(num_rows, config, defer=None, **options):
        x, weight = torch.zeros(num_rows, 1024).bfloat16(), torch.zeros(512, 1024).bfloat16()
        options = DEFAULTS | {"num_warps": config.num_warps} | options
        dtype = torch.float32 if options["adds"] else torch.bfloat16
        out = torch.zeros(num_rows, 256 if options["is_gated"] else 512, dtype=dtype)
        launch_tma_linear(x, weight, weight[:, 0], out, torch.zeros(64, dtype=torch.int32), config, options, defer)

    def launch_fp8(num_rows, config, group):
        codes, scales = torch.zeros(512, 1024, dtype=torch.uint8), torch.ones(512 // 128, 1024 // 128)
        in_blocks = {"group_size": 128, "scale_run": 128}
        weight = PackedWeight(codes, scales, (512, 1024), torch.bfloat16, BYTES_FP8, 1024, **in_blocks)
        rows, of_rows = codes[:num_rows].view(torch.float8_e4m3fn), torch.ones(num_rows, 1024 // group)
        out, options = torch.zeros(num_rows, 256).bfloat16(), DEFAULTS | {"is_gated": True, "num_warps": 4}
        x = RoundedRows(rows, of_rows, group, torch.bfloat16)
        launch_tma_linear(x, weight, scales, out, None, config, options, None)

    with intercept_launches() as found:
        launch(8, TmaConfig(64, 128, 4))
        launch(33, TmaConfig(64, 64, 4, 1, 3), is_gated=True, has_bias=True)
        launch(16, TmaConfig(64, 128, 4, 2), adds=True, defer=lambda partials: None)
        launch_fp8(64, TmaConfig(64, 128, 4, 1, 3), 128)
        launch(8, TmaConfig(64, 128, 4, is_even=True))
        launch(16, TmaConfig(64, 128, 4, is_even=True), adds=True, defer=lambda partials: None)
    for (kernel, _), variant in found.items():
        compiled = kernel.preload(variant.specialization)
        instructions, _ = disassemble(compiled.asm["cubin"], tempfile.mkdtemp())
        wait = next(i for i, one in enumerate(instructions) if one.name.startswith("ACQBULK"))
        early = sum(one.name.startswith("UTMALDG") for one in instructions[:wait])
        spills = sum(one.name.startswith(("STL", "LDL")) for one in instructions)
        print(early, spills, compiled.metadata.shared <= 227 << 10)
"""


def test_a_ring_of_weights_is_loaded_before_the_wait(tmp_path) -> None:
    """One copy a stage, in the code for an H200."""
    lines = [line.split() for line in run(LAUNCHES, tmp_path).splitlines()]
    assert [int(early) for early, _, _ in lines] == [4] * 6
    assert all(spills == "0" and fits == "True" for _, spills, fits in lines)
