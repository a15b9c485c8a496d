"""Products of quantized weights by the kernels of a skinny linear, against their expansion in plain torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from quantized_checkpoints import store
from test_precompile import run

from ringcore.checkpoint import quantization as formats
from ringcore.kernels.linears.skinny_configs import choose_packed
from ringcore.kernels.linears.skinny_linear import skinny_linear, skinny_linear_reference
from ringcore.kernels.linears.skinny_tiles import DotConfig, PackedFmaConfig
from ringcore.kernels.linears.skinny_times import NIBBLE_NUMBERS
from ringcore.kernels.partials import RowNorm
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.linear_schemes.packed_weight import packed_weight
from ringcore.model_executor.linear_schemes.schemes import schemes_of
from ringcore.model_executor.linear_schemes.shard import InputSlice, LinearShard, OutputSlice

pytestmark = pytest.mark.sampled

FMA, WIDE_FMA = PackedFmaConfig(4, 64, 1, 5), PackedFmaConfig(2, 256, 1, 100)
DOT = DotConfig(32, 64, 2, 2, 1)
SPLIT, BLOCKS = DotConfig(32, 64, 2, 2, 2), DotConfig(32, 128, 2, 2, 1, block_rows=16)
MATRIX = DotConfig(32, 128, 2, 2, 1)  # the nibbles of a word in one matrix, with more than 32 rows
RUNS_FMA, RUNS_SPLIT = PackedFmaConfig(4, 128, 1, 5), DotConfig(32, 128, 2, 2, 2, block_rows=16)  # of 32
FORMATS = {
    "fp8 block": formats.CodesFormat("fp8", "block", (32, 16), "weight_scale_inv"),
    "fp8 channel": formats.CodesFormat("fp8", "channel"),
    "int8": formats.CodesFormat("int8", "channel"),
    "w4": formats.PackedFormat(4, 32),
    "w4 asym": formats.PackedFormat(4, 32, True),
    "w4 channel": formats.PackedFormat(4, None),
    "w4 asym wide": formats.PackedFormat(4, 128, True),
    "w4 asym order": formats.PackedFormat(4, 32, True, True),
    "w8 asym": formats.PackedFormat(8, 32, True),
    "awq": formats.AwqFormat(32),
    "awq wide": formats.AwqFormat(128),
    "gptq": formats.GptqFormat(4, 32),
    "gptq order": formats.GptqFormat(4, 32, True),
    "gptq wide order": formats.GptqFormat(4, 128, True),
    "gptq 8 order": formats.GptqFormat(8, 32, True),
}


NOT_FMA = [kind for kind in FORMATS if "order" in kind]
LONG_RUNS = ["w4 channel", "w4 asym wide", "awq wide", "gptq wide order"]  # of 32 words, with 256 inputs


class _Seen(Exception):
    pass


def packed(kind, weight, device, monkeypatch, dtype=torch.float32, start=0, length=None):
    """(the weight as the kernels take it, its expansion); of a share of the inputs where a length is given."""
    stored = store(kind, weight)
    num_outputs, num_inputs = weight.shape
    inputs = InputSlice(num_inputs, start, length or num_inputs)
    shard = LinearShard("layer", (OutputSlice("m", num_outputs, 0, num_outputs),), inputs, dtype)
    rule = formats.Rule(["Linear"], FORMATS[kind])
    scheme = schemes_of(formats.Quantization("test", [rule]))("m")
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    tensors = {}
    for suffix, declared in scheme.weights(shard).items():
        part = declared.parts[0]
        tensor = stored.tensors[suffix].narrow(part.dim, part.start, part.length)
        tensors[suffix] = tensor.to(declared.dtype).contiguous().to(device)
        if declared.arrangement is not None:
            before = tensors[suffix].clone()
            declared.arrangement.arrange(tensors[suffix])
            restored = tensors[suffix].clone()
            declared.arrangement.restore(restored)
            assert torch.equal(restored, before)
    seen = []

    def see(matrix, *_):
        seen.append(matrix)
        raise _Seen

    monkeypatch.setattr(sys.modules[type(scheme).__module__], "quantized_product", see)
    with pytest.raises(_Seen):
        scheme.product(shard, tensors, None, True)
    expanded = stored.expanded[:, start : start + inputs.length]
    torch.testing.assert_close(seen[0].expanded().cpu(), expanded, rtol=1e-5, atol=1e-6)
    return packed_weight(seen[0], dtype), expanded.to(device)


def random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        *((kind, FMA) for kind in FORMATS if kind not in NOT_FMA),
        *((kind, SPLIT) for kind in FORMATS),
        *(("w4 asym", BLOCKS), ("gptq", DOT), ("awq", WIDE_FMA)),
        *((kind, MATRIX) for kind in ("w4 asym", "w4 channel", "awq wide", "gptq wide order")),
    ],
)
def test_product(device, kind, config, monkeypatch):
    weight, expanded = packed(kind, random(40, 256), device, monkeypatch)
    assert (weight.run == 32) == (kind in LONG_RUNS)
    if kind in LONG_RUNS and config != MATRIX:
        with pytest.raises(AssertionError):
            skinny_linear(random(1, 256).to(device), weight, config)
        config = RUNS_FMA if isinstance(config, PackedFmaConfig) else RUNS_SPLIT
    x = random(2 if isinstance(config, PackedFmaConfig) else 40 if config == MATRIX else 20, 256, seed=2).to(device)
    expected = skinny_linear_reference(x, expanded)
    torch.testing.assert_close(skinny_linear(x, weight, config), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["w4 asym", "w4 channel", "awq wide", "gptq wide order", "fp8 block"])
@pytest.mark.parametrize("num_rows", [1, 9, 30, 60, 100, 250])
def test_16_bits_by_tiles_as_they_are_chosen(device, kind, num_rows, monkeypatch):
    weight, expanded = packed(kind, random(4096, 1024), device, monkeypatch, torch.bfloat16)
    x = random(num_rows, 1024, seed=2).to(device, torch.bfloat16)
    config = weight.choose(4096, 1024, num_rows)
    if config is not None:
        expected = x.float() @ expanded.T
        found = skinny_linear(x, weight, config).float()
        assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("kind", ["w4 asym", "awq", "gptq", "fp8 block"])
def test_prologue_and_epilogues(device, kind, monkeypatch):
    weight, expanded = packed(kind, random(32, 96), device, monkeypatch)
    x, hidden, bias = random(2, 96, seed=2).to(device), random(2, 16, seed=3).to(device), random(32).to(device)
    options = {"bias": bias, "activation": "silu"}
    norm = RowNorm(random(96, seed=4).to(device), 1e-5)
    for config, more in ((FMA, {"norm": norm}), (FMA, {}), (DOT, {}), (SPLIT, {})):
        expected = skinny_linear_reference(x, expanded, add_to=hidden.clone(), **options, **more)
        found = skinny_linear(x, weight, config, add_to=hidden.clone(), **options, **more)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["w4 asym", "gptq order", "fp8 block"])
def test_a_share_that_begins_within_a_group(device, kind, monkeypatch):
    weight, expanded = packed(kind, random(16, 96), device, monkeypatch, start=48, length=48)
    x = random(2, 48, seed=2).to(device)
    expected = skinny_linear_reference(x, expanded)
    assert weight.has_chunks == (kind == "fp8 block")
    for config in (FMA, DOT) if weight.has_chunks else (DOT,):
        torch.testing.assert_close(skinny_linear(x, weight, config), expected, rtol=1e-4, atol=1e-4)


def test_codes_of_every_value(device):
    """All bytes as FP8, but NaN, and as INT8."""
    from ringcore.model_executor.linear_schemes.codes import ByteCodes
    from ringcore.model_executor.linear_schemes.quantized import Groups, QuantizedMatrix

    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127].repeat(16, 1)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        matrix = QuantizedMatrix(ByteCodes(codes.view(dtype).to(device)), torch.ones(16, 1, device=device), Groups(254))
        exact = codes.view(dtype).float()
        assert torch.equal(matrix.expanded().cpu(), exact)
        x = torch.eye(254)[::16].contiguous().to(device)
        for config in (DOT, DotConfig(16, 16, 1, 1, 1)):
            found = skinny_linear(x, packed_weight(matrix, torch.float32), config)
            assert torch.equal(found.cpu(), exact[:, ::16].t())


def test_every_e2m1_code_and_power_of_2(device):
    from ringcore.model_executor.linear_schemes.codes import E2M1_MAGNITUDES, E2m1QuadCodes, to_e2m1, to_quads
    from ringcore.model_executor.linear_schemes.quantized import Groups, QuantizedMatrix

    codes = torch.arange(32, dtype=torch.uint8) % 16
    scales = torch.arange(255, dtype=torch.uint8)[:, None].to(device).view(torch.float8_e8m0fnu)
    stored = to_e2m1(to_quads(codes.repeat(255, 1).to(device), 8))
    matrix = QuantizedMatrix(E2m1QuadCodes(stored, 8, False), scales, Groups(32))
    magnitudes = torch.tensor(E2M1_MAGNITUDES)
    exact = torch.cat((magnitudes, -magnitudes))[codes.long()] * (torch.arange(255)[:, None].double() - 127).exp2()
    assert torch.equal(matrix.expanded().cpu(), exact.float())
    finite = exact[:252].float()  # of larger ones 6 times is infinite, and the sum with products of 0 no number
    matrix = QuantizedMatrix(E2m1QuadCodes(stored[:252], 8, False), scales[:252], Groups(32))
    found = skinny_linear(torch.eye(32, device=device), packed_weight(matrix, torch.float32), DOT)
    assert torch.equal(found.cpu(), finite.t())


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "is_tiled"), [(128, 192, True), (64, 96, False), (96, 64, False)]
)
def test_e2m1_blocks_of_mxfp4(device, num_outputs, num_inputs, is_tiled):
    """Rearranged and back, in tiles where outputs and inputs are whole ones; a last block that is not whole."""
    from ringcore.model_executor.linear_schemes.arrangements import E2m1Blocks
    from ringcore.model_executor.linear_schemes.codes import E2m1Codes
    from ringcore.model_executor.linear_schemes.quantized import Groups, QuantizedMatrix

    generator = torch.Generator().manual_seed(num_inputs)
    blocks = torch.randint(0, 256, (2, num_outputs, num_inputs // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 130, (2 * num_outputs, num_inputs // 32), dtype=torch.uint8, generator=generator)
    of_file = QuantizedMatrix(E2m1Codes(blocks.flatten(0, 1).flatten(1)), scales.view(torch.float8_e8m0fnu), Groups(32))
    stored, arrangement = blocks.clone().to(device), E2m1Blocks(8)
    arrangement.arrange(stored)
    codes = arrangement.codes(stored)
    assert codes.is_tiled == is_tiled
    matrix = QuantizedMatrix(codes, scales.to(device).view(torch.float8_e8m0fnu), Groups(32))
    assert torch.equal(matrix.expanded().cpu(), of_file.expanded())
    assert torch.equal(matrix.expanded(5, 70).cpu(), of_file.expanded(5, 70))
    x = random(3, num_inputs).to(device)
    for config in (DOT, DotConfig(32, 128, 1, 1, 1)):
        found = skinny_linear(x, packed_weight(matrix, torch.float32), config)
        torch.testing.assert_close(found.cpu(), x.cpu() @ of_file.expanded().T, rtol=1e-4, atol=1e-4)
    arrangement.restore(stored)
    assert torch.equal(stored.cpu(), blocks)


def test_a_row_that_does_not_fit_in_registers_is_for_tensor_cores():
    for is_gated in (False, True):
        for num_inputs in (64, 4096, 8192, 14336, 16384):
            config = choose_packed(4096, num_inputs, 1, NIBBLE_NUMBERS, is_gated=is_gated, by_fma=True)
            assert isinstance(config, PackedFmaConfig)
            assert config.block_inputs <= 4096
        wide = choose_packed(4096, 16448, 1, NIBBLE_NUMBERS, is_gated=is_gated, by_fma=True)
        assert isinstance(wide, DotConfig)


def test_the_gated_tile_of_a_weight_with_zeros():
    """As measured, of 4,096 inputs alone."""

    def tile(num_inputs, **options):
        return choose_packed(12288, num_inputs, 1, NIBBLE_NUMBERS, is_gated=True, by_fma=True, **options)

    assert tile(4096, has_zeros=True).block_outputs == 4
    assert tile(4096).block_outputs == tile(2560, has_zeros=True).block_outputs == 8


def test_the_product_of_a_model(device, monkeypatch):
    """The product takes the kernels where there are some: few rows and many."""
    from ringcore.attention.context import NO_TOKEN_CONTEXT

    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    for kind in ("awq", "w4"):
        with monkeypatch.context() as patch:
            _, expanded = packed(kind, random(16, 64), device, patch)
        shard = LinearShard("layer", (OutputSlice("m", 16, 0, 16),), InputSlice.whole(64), torch.float32)
        scheme = schemes_of(formats.Quantization("test", [formats.Rule(["Linear"], FORMATS[kind])]))("m")
        tensors = {name: tensor.to(device) for name, tensor in store(kind, random(16, 64)).tensors.items()}
        for suffix, declared in scheme.weights(shard).items():
            if declared.arrangement is not None:
                declared.arrangement.arrange(tensors[suffix])
        product = scheme.product(shard, tensors, random(16).to(device), True)
        assert isinstance(product, KernelProduct)
        for n in (1, 3, 70):
            x = random(n, 64, seed=n).to(device)
            expected = x @ expanded.T + random(16).to(device)
            torch.testing.assert_close(product(x, NO_TOKEN_CONTEXT), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long_form
def test_they_are_compiled_for_a_gpu(tmp_path):
    """What the interpreter lets pass, the compiler may not. In a separate process, where Triton does not interpret."""
    script = """
        import torch, triton_for_sm90
        from dataclasses import replace
        from ringcore.kernels.launch.precompile import compile_variants, intercept_launches
        from ringcore.kernels.linears.skinny_linear import skinny_linear
        from ringcore.kernels.linears.skinny_tiles import DotConfig, PackedFmaConfig
        from ringcore.kernels.linears.packed_weight import BYTES_FP8, BYTES_INT8, NIBBLES, NIBBLES_E2M1, PackedWeight

        codes, scales, x = torch.zeros(64, 256, dtype=torch.uint8), torch.ones(64, 2), torch.zeros(1, 256).bfloat16()
        index, words = torch.zeros(256, dtype=torch.int32), torch.zeros(64, 64, dtype=torch.int16)

        def packed(form, dtype=torch.bfloat16, **options):
            stored = words if form in (NIBBLES, NIBBLES_E2M1) else codes
            return PackedWeight(stored, scales, (64, 256), dtype, form, stored.stride(0), group_size=128, **options)

        fma, dot = PackedFmaConfig(4, 256, 2, 8), DotConfig(64, 128, 4, 4, 2)
        with intercept_launches() as intercepted:
            skinny_linear(x, packed(BYTES_FP8), fma, row_group=128)
            skinny_linear(x, packed(BYTES_INT8), fma)
            skinny_linear(x, packed(NIBBLES, has_zero_bits=True, run=8), fma)
            skinny_linear(x, packed(BYTES_INT8), dot)
            skinny_linear(x, packed(NIBBLES, zero=8, run=8), dot)
            skinny_linear(x, packed(NIBBLES, has_zero_bits=True, index=index, run=8), dot)
            skinny_linear(x.half(), packed(NIBBLES, torch.float16, has_zero_bits=True, run=8), dot)
            e2m1 = replace(packed(NIBBLES_E2M1, run=8), scales=codes[:, :8], group_size=32)
            skinny_linear(x, e2m1, dot)
            skinny_linear(x, replace(e2m1, is_tiled=True), dot)
        compile_variants(list(intercepted.values()), torch.device("cpu"), 2)
        print(len(intercepted))
    """
    assert run(script, tmp_path) == "9\n"
