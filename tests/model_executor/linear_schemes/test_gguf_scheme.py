"""Matrices that stay in a GGUF file's blocks are those that the file expands to."""

from __future__ import annotations

import functools

import gguf
import numpy as np
import pytest
import torch
from dense_attention import DenseRun
from thread_tp import on_all_ranks
from tiny_checkpoints import MAX_LEN, hf_model, random_ids
from tiny_gguf import write_gguf

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.checkpoint.expected_tensors import quantized_bytes
from ringcore.checkpoint.quantization import GGUF_BLOCKS, GgufFormat
from ringcore.config import EngineConfig
from ringcore.config.gguf_weights import with_gguf_weights
from ringcore.distributed.parallel import SingleRank
from ringcore.errors import ConfigError, InvalidRequestError
from ringcore.families import FAMILIES
from ringcore.host.resources import Host
from ringcore.model_executor.linear_schemes.block_kernels import (
    BlockLayout,
    BlocksArrangement,
    KernelMatrix,
    block_kernels,
)
from ringcore.model_executor.linear_schemes.gguf_blocks import GgufMatrix, round_by_block
from ringcore.model_executor.loader import load_weights, pending_weights
from ringcore.model_executor.models import build_model
from ringcore.model_executor.tensor_source import open_source
from ringcore.model_executor.weight_update import WeightUpdate

IDS = random_ids(40, seed=4)
CPU = torch.device("cpu")
SIZES = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


class SmallHost(Host):
    def __init__(self, free_bytes=1 << 40, gpu=False, compiler=None):
        super().__init__()
        self._free_bytes, self._gpu, self._compiler = free_bytes, gpu, compiler

    def c_compiler(self):
        return self._compiler

    def free_memory_bytes(self):
        return self._free_bytes

    def has_gpu(self):
        return self._gpu


@pytest.mark.parametrize("kind", sorted(GGUF_BLOCKS))
def test_every_bit_is_the_package_s(kind):
    """Of random bits, in rows of several blocks."""
    type_ = gguf.GGMLQuantizationType[kind]
    assert GGUF_BLOCKS[kind] == gguf.GGML_QUANT_SIZES[type_]
    numbers, num_bytes = GGUF_BLOCKS[kind]
    rows = np.random.default_rng(1).integers(0, 256, (24, 3, num_bytes), dtype=np.uint8)
    exponents = rows.view()  # no float16 is infinite: wherever they lie, the second byte of each
    places = {"Q6_K": [209]}.get(kind, [1, 3] if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [1])
    for place in places:
        exponents[..., place] &= 0xBF
    rows = rows.reshape(24, -1)
    matrix = GgufMatrix(torch.from_numpy(rows), GgufFormat(kind))
    expected = torch.from_numpy(gguf.quants.dequantize(rows, type_))
    assert (matrix.num_outputs, matrix.num_inputs) == expected.shape == (24, 3 * numbers)
    assert torch.equal(matrix.expanded(), expected)
    assert torch.equal(matrix.expanded(5, 9), expected[5:9])


def quantized(kind, num_outputs, num_inputs, seed=1):
    """Random blocks of moderate scales: [num_outputs, bytes of a row]."""
    numbers, num_bytes = GGUF_BLOCKS[kind]
    rows = np.random.default_rng(seed).integers(0, 256, (num_outputs, num_inputs // numbers, num_bytes), dtype=np.uint8)
    for place in {"Q6_K": [209]}.get(kind, [1, 3] if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [1]):
        rows[..., place] = rows[..., place] & 0x83 | 0x20
    return torch.from_numpy(rows.reshape(num_outputs, -1).copy())


@functools.cache
def kernels():
    found = block_kernels()
    if found is None:
        pytest.skip("no C compiler is installed")
    return found


def in_kernels(rows, form, bias=None):
    arranged = rows.clone()
    BlocksArrangement(form).arrange(arranged)
    return KernelMatrix(kernels(), arranged, BlockLayout.of_file(form), bias)


def adverse_inputs(num_rows, num_inputs):
    """A block of zeros, one whose largest number outweighs the others, and one of the smallest numbers."""
    x = torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(num_rows))
    x[:, :32] = 0
    x[:, 40] = 1e4
    x[:, -32:] *= 1e-30
    return x


@pytest.mark.parametrize("kind", sorted(GGUF_BLOCKS))
def test_products_of_the_kernels_are_the_reference_s(kind):
    """53 outputs: three runs of 16, and five more. Errors are relative to the sum of the products' absolute values:
    some dozen roundings of float32, in another order."""
    numbers, _ = GGUF_BLOCKS[kind]
    num_inputs = 3 * numbers if numbers == 256 else 9 * numbers
    rows, bias = quantized(kind, 53, num_inputs), torch.randn(53)
    rows[7] = 0
    for rounds in (False, True):
        form = GgufFormat(kind, rounds)
        matrix, weights = in_kernels(rows, form, bias), GgufMatrix(rows, form).expanded()
        for num_rows in (1, 2, 5, 16, 30, 67):
            x = adverse_inputs(num_rows, num_inputs)
            seen = (round_by_block(x) if rounds else x).double()
            expected = seen @ weights.double().T + bias
            error = (matrix.multiply(x, torch.empty(num_rows, 53)) - expected).abs()
            # Codes of Q8_0 and IQ4_NL are up to 255 before their zero, 128, is subtracted.
            assert (error <= 1e-5 * (seen.abs() @ weights.double().abs().T + 1)).all(), (rounds, num_rows)
        index = torch.tensor([52, 0, 17, 17])
        assert torch.equal(matrix.rows(index), weights[index])
        assert torch.equal(GgufMatrix(rows, form).rows(index), weights[index])


@pytest.mark.parametrize("kind", sorted(GGUF_BLOCKS))
def test_sums_of_the_largest_codes_and_inputs_are_whole(kind):
    """Bits are set but those of the scales in float16: products of bytes are summed in 16 bits where they fit."""
    form = GgufFormat(kind, rounds_inputs=True)
    size = {"Q6_K": (208, 210), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q4_1": (0, 4), "Q5_1": (0, 4)}.get(kind, (0, 2))
    numbers, num_bytes = form.block
    rows = torch.full((16, num_bytes), 127 if kind == "Q8_0" else 255, dtype=torch.uint8)
    rows[:, size[0] : size[1]].view(torch.float16).fill_(0.5)
    weights = GgufMatrix(rows, form).expanded()
    for x in (torch.ones(1, numbers), torch.ones(9, numbers), -torch.ones(2, numbers)):
        found = in_kernels(rows, form).multiply(x, torch.empty(len(x), 16))
        torch.testing.assert_close(found, x @ weights.T, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("num_rows", [1, 18])
def test_norm_gate_and_sum_are_in_the_same_call(num_rows):
    form = GgufFormat("Q5_1")
    rows, gain = quantized("Q5_1", 96, 64), torch.rand(64)
    matrix, weights = in_kernels(rows, form), GgufMatrix(rows, form).expanded()
    x = torch.randn(num_rows, 64)
    product = torch.nn.functional.rms_norm(x, (64,), gain, 1e-5) @ weights.T
    tolerance = {"atol": 1e-4 * float(product.abs().max()), "rtol": 1e-4}
    torch.testing.assert_close(matrix.multiply(x, torch.empty(num_rows, 96), "store", gain, 1e-5), product, **tolerance)
    gated = torch.nn.functional.silu(product[:, :48]) * product[:, 48:]
    tolerance["atol"] *= float(product.abs().max())
    torch.testing.assert_close(matrix.multiply(x, torch.empty(num_rows, 48), "silu", gain, 1e-5), gated, **tolerance)
    added = torch.randn(num_rows, 96)
    found = matrix.multiply(x, added.clone(), "add")
    torch.testing.assert_close(found - added, matrix.multiply(x, torch.empty(num_rows, 96)), atol=1e-3, rtol=1e-4)


def test_without_a_compiler_weights_are_expanded(tmp_path, monkeypatch, caplog):
    write_gguf(tmp_path / "x.gguf", hf(), "llama", "Q4_0")
    exact, rounded = (logits(tmp_path / "x.gguf", asked) for asked in ("packed", "packed_int8"))
    monkeypatch.setenv("PATH", "/nowhere")
    block_kernels.cache_clear()
    try:
        torch.testing.assert_close(logits(tmp_path / "x.gguf", "packed"), exact, atol=5e-4, rtol=1e-4)
        found = logits(tmp_path / "x.gguf", "packed_int8")
    finally:
        block_kernels.cache_clear()
    assert "slow: no C compiler (cc, gcc or clang) is installed" in caplog.text
    # A number on the boundary between two codes may be rounded to either, so errors are those of rounding.
    assert (found - exact).abs().mean() > 1e-3
    assert (found - rounded).abs().mean() < (found - exact).abs().mean()


@functools.cache
def hf(tied=True, **options):
    return hf_model("Llama", seed=1, tie_word_embeddings=tied, **(SIZES | options))


def spec_of(path, packed):
    spec = read_model_spec(find_model(path), FAMILIES)
    asked = packed if isinstance(packed, str) else "packed" if packed else "expanded"
    return with_gguf_weights(spec, find_model(path), asked, "auto", "cpu", SmallHost())


def logits(path, packed, tp=None):
    files, model = find_model(path), build_model(spec_of(path, packed), tp or SingleRank(), torch.float32, MAX_LEN)
    model.bind(load_weights(model.weights(), files, 0, CPU))
    return DenseRun(model, MAX_LEN, 1).step({0: IDS})


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_model_in_blocks_is_the_expanded_one(tmp_path, kind, size):
    write_gguf(tmp_path / "x.gguf", hf(), "llama", kind)
    expected = logits(tmp_path / "x.gguf", packed=False)
    for found in on_all_ranks(size, lambda tp: logits(tmp_path / "x.gguf", True, tp)):
        torch.testing.assert_close(found, expected, atol=5e-4, rtol=1e-4)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.fixture(params=["kernels", "no compiler"])
def with_and_without_kernels(request, monkeypatch):
    if request.param == "no compiler":
        monkeypatch.setenv("PATH", "/nowhere")
    block_kernels.cache_clear()
    yield
    block_kernels.cache_clear()


@pytest.mark.usefixtures("with_and_without_kernels")
def test_two_ranks_each_have_the_block_that_is_cut_between_them(tmp_path):
    """They have 48 of 96 inputs of `down_proj` each: blocks 0 and 1, and 1 and 2."""
    write_gguf(tmp_path / "x.gguf", hf(tied=False, intermediate_size=96), "llama", "Q8_0")
    expected = logits(tmp_path / "x.gguf", packed=False)

    def run(tp):
        model = build_model(spec_of(tmp_path / "x.gguf", True), tp, torch.float32, MAX_LEN)
        of_name = {weight.name: weight for weight in model.weights()}
        assert of_name["layers.0.down_proj.weight"].shape == (256, 2 * 34)
        assert {weight.dtype for name, weight in of_name.items() if "norm" not in name} == {torch.uint8}
        return logits(tmp_path / "x.gguf", True, tp)

    for found in on_all_ranks(2, run):
        torch.testing.assert_close(found, expected, atol=5e-4, rtol=1e-4)


def test_what_is_in_memory_is_what_is_in_the_file(tmp_path):
    """The table once, though the head multiplies by it; norms in float32 as in the file."""
    write_gguf(tmp_path / "x.gguf", hf(), "llama", "Q4_0")
    spec = spec_of(tmp_path / "x.gguf", True)
    weights = build_model(spec, SingleRank(), torch.float32, MAX_LEN).weights()
    packed = {weight.name: weight.nbytes for weight in weights if weight.dtype == torch.uint8}
    vectors = sum(weight.nbytes for weight in weights if weight.dtype != torch.uint8)
    assert sum(packed.values()) == sum(quantized_bytes(spec).values())
    assert packed["embed_tokens.weight"] == hf().config.vocab_size * 256 // 32 * 18
    assert sum(packed.values()) + vectors < (tmp_path / "x.gguf").stat().st_size


def test_updates(tmp_path):
    """From a file of the same types, as sleep mode does; numbers and other types are refused before one is written."""
    for kind in ("Q8_0", "Q4_0"):
        write_gguf(tmp_path / f"{kind}.gguf", hf(), "llama", kind)
    other = hf_model("Llama", seed=7, tie_word_embeddings=True, **SIZES)
    write_gguf(tmp_path / "new.gguf", other, "llama", "Q8_0")
    files = find_model(tmp_path / "Q8_0.gguf")
    model = build_model(spec_of(tmp_path / "Q8_0.gguf", True), SingleRank(), torch.float32, MAX_LEN)
    with pending_weights(model.weights(), files, 0, CPU, lambda size: torch.empty(size, dtype=torch.uint8)) as pending:
        model.bind(pending, updatable=True)
        final = dict(pending.final)
    run = DenseRun(model, MAX_LEN, 1)
    before = run.step({0: IDS})
    update, name = WeightUpdate(model.weights(), final), "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(InvalidRequestError, match="held as Q8_0 of a GGUF file, and comes as numbers; start with gguf"):
        update.take(name, torch.zeros(512, 256))
    with pytest.raises(InvalidRequestError, match="comes as Q4_0"), source(tmp_path / "Q4_0.gguf") as wrong:
        update.read(wrong)
    update.finish()
    assert torch.equal(DenseRun(model, MAX_LEN, 1).step({0: IDS}), before)
    update = WeightUpdate(model.weights(), final)
    with source(tmp_path / "new.gguf") as right:
        update.read(right)
    update.check_complete()
    update.finish()
    model.refresh()
    torch.testing.assert_close(
        DenseRun(model, MAX_LEN, 1).step({0: IDS}), logits(tmp_path / "new.gguf", False), atol=2e-4, rtol=1e-4
    )


def source(path):
    return open_source(find_model(path), 0, [])


def test_which_files_stay_packed(tmp_path, checkpoint):
    path = tmp_path / "x.gguf"
    write_gguf(path, hf(), "llama", "Q4_0")
    files, spec = find_model(path), read_model_spec(find_model(path), FAMILIES)

    def quantization(asked, device="auto", dtype="auto", host=None, given=(spec, files)):
        return with_gguf_weights(*given, asked, dtype, device, host or SmallHost()).quantization

    packed = quantization("packed")
    assert packed.format_of("model.layers.1.self_attn.q_proj") == GgufFormat("Q4_0")
    assert packed.format_of("lm_head") == packed.format_of("model.embed_tokens") == GgufFormat("Q4_0")
    assert packed.format_of("model.norm") is None
    config = EngineConfig.from_options(model=str(path), gguf_weights="packed", device="cpu")
    assert config.model.spec.quantization == packed
    num_numbers = sum(tensor.numel() for name, tensor in hf().state_dict().items() if name != "lm_head.weight")
    assert quantization("auto", host=SmallHost(8 * num_numbers)) is None
    assert quantization("auto", host=SmallHost(8 * num_numbers - 2)) == packed
    assert quantization("auto", host=SmallHost(compiler="cc")) == packed
    assert quantization("auto", dtype="bfloat16", host=SmallHost(4 * num_numbers)) is None
    assert quantization("auto", host=SmallHost(1, gpu=True)) is None
    assert quantization("expanded", host=SmallHost(1)) is None
    rounded = quantization("packed_int8")
    assert rounded.format_of("lm_head") == GgufFormat("Q4_0", rounds_inputs=True)
    for asked in ("packed", "packed_int8"):
        with pytest.raises(ConfigError, match="a GPU has no kernels for it; give device='cpu'"):
            quantization(asked, host=SmallHost(gpu=True))
    assert quantization("packed", "cpu", host=SmallHost(gpu=True)) == packed
    _, folder = checkpoint("Qwen2")
    dense = read_model_spec(find_model(folder), FAMILIES), find_model(folder)
    assert quantization("auto", host=SmallHost(1), given=dense) is None
    with pytest.raises(ConfigError, match=r"gguf_weights='packed': the model is no \.gguf file"):
        quantization("packed", given=dense)
    by_transformers = read_model_spec(files, FAMILIES, "transformers"), files
    packed = quantization("auto", host=SmallHost(1), given=by_transformers)
    assert packed.format_of("model.layers.1.self_attn.q_proj") == GgufFormat("Q4_0")
    assert packed.format_of("model.embed_tokens") == GgufFormat("Q4_0"), "which the model's tied head has too"
    write_gguf(path, hf(), "llama", "F16")
    assert quantization("packed", given=(spec, find_model(path))) is None  # nothing is packed in the file
