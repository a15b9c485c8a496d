"""Dense checkpoints that are quantized while they are loaded, and while they are updated."""

from __future__ import annotations

import math

import pytest
import torch
from dense_attention import DenseRun
from safetensors.torch import save_file
from thread_tp import on_all_ranks
from tiny_checkpoints import MAX_LEN, hf_logits, hf_model, random_ids, save_with_tensors, saved_state

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.checkpoint.quantization import OnLoadFormat
from ringcore.distributed.parallel import SingleRank
from ringcore.errors import InvalidRequestError
from ringcore.families import FAMILIES
from ringcore.model_executor.linear_schemes.on_load_scheme import EncodedRows, quantize_groups
from ringcore.model_executor.loader import load_weights, pending_weights
from ringcore.model_executor.models import build_model
from ringcore.model_executor.weight_update import WeightUpdate

NUMBERS = ("fp8", "int4")
IDS = random_ids(40, seed=4)
CPU = torch.device("cpu")


def expanded(weight, number, group):
    """By hand: the numbers nearest to weight / scale, in FP8 of the scale with the least squared error."""
    groups = weight.reshape(len(weight), -1, group)
    largest = groups.abs().amax(-1, keepdim=True)
    if number == "fp8":
        scales = torch.stack([largest / 448 * (8 + eighth) / 8 for eighth in range(8)])
        rounded = (groups / scales).to(torch.float8_e4m3fn).float() * scales
        best = (rounded - groups).double().square().sum(-1, keepdim=True).argmin(0, keepdim=True)
        return rounded.gather(0, best.expand(1, *groups.shape)).reshape(weight.shape)
    first = (groups.abs() == largest).float().argmax(-1, keepdim=True)
    scale = groups.gather(-1, first) / -8
    return ((groups / scale).round().clamp(-8, 7) * scale).reshape(weight.shape)


def save(folder, seed=1, size=2, dtype=torch.float32):
    """A folder, and by number the logits of the model whose linears are expanded; size: ranks that a group is for."""
    options = {"num_hidden_layers": 2, "intermediate_size": 96, "attention_bias": True, "tie_word_embeddings": True}
    model = hf_model("Qwen3", seed=seed, **options)
    state = model.state_dict()
    tensors = {name: tensor.to(dtype, copy=True) for name, tensor in state.items() if name != "lm_head.weight"}
    save_with_tensors(folder, model, tensors)
    found = {}
    for number in NUMBERS:
        state = {name: tensor.float() for name, tensor in tensors.items()}
        for name, tensor in state.items():
            if name.endswith("_proj.weight"):
                split = size if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                state[name] = expanded(tensor, number, math.gcd(128, tensor.shape[1] // split))
        model.load_state_dict(state, strict=False)
        found[number] = hf_logits(model, IDS)
    return tensors, found


def built(folder, number, tp=None):
    files = find_model(folder)
    spec = read_model_spec(files, FAMILIES, quantization=number)
    return files, build_model(spec, tp or SingleRank(), torch.float32, MAX_LEN)


def logits_of(model):
    return DenseRun(model, MAX_LEN, 1).step({0: IDS})


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_is_that_of_its_rounded_weights(tmp_path, size):
    _, expected = save(tmp_path, size=size)
    for number in NUMBERS:

        def logits(tp, number=number):
            files, model = built(tmp_path, number, tp)
            model.bind(load_weights(model.weights(), files, 0, CPU))
            return logits_of(model)

        for found in on_all_ranks(size, logits):
            torch.testing.assert_close(found, expected[number], atol=3e-4, rtol=0)
            assert torch.equal(found.argmax(-1), expected[number].argmax(-1))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    hf_model("Qwen3Moe", seed=1, num_hidden_layers=2, moe_intermediate_size=64).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("number", "size"), [("fp8", 1), ("int4", 1), ("int4", 2)])
def test_experts_are_those_of_their_rounded_weights(mixture, tmp_path, number, size):
    """As they are read, also a rank's share of each; packed, and from the tensors that are updated."""
    rounded = {}
    for name, tensor in saved_state(mixture).items():
        split = size if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
        group = math.gcd(128, tensor.shape[-1] // split)
        rounded[name] = expanded(tensor, number, group) if name.endswith("_proj.weight") else tensor
    (tmp_path / "config.json").write_text((mixture / "config.json").read_text())
    save_file(rounded, tmp_path / "model.safetensors")

    def logits(tp, folder, number, updatable):
        files, model = built(folder, number, tp)
        model.bind(load_weights(model.weights(), files, 0, CPU), updatable=updatable)
        return logits_of(model)

    (expected,) = on_all_ranks(1, lambda tp: logits(tp, tmp_path, None, updatable=False))
    for updatable in (False, True):
        for found in on_all_ranks(size, lambda tp, updatable=updatable: logits(tp, mixture, number, updatable)):
            torch.testing.assert_close(found, expected, atol=3e-4, rtol=0)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("number", NUMBERS)
def test_new_weights_are_quantized_on_the_way_in(tmp_path, number, size):
    """Of 16 bits, in tensors as they come; the memory of the old ones was discarded."""
    save(tmp_path / "old", size=size)
    tensors, expected = save(tmp_path / "new", seed=2, size=size, dtype=torch.bfloat16)

    def updated(tp):
        files, model = built(tmp_path / "old", number, tp)
        memory = []

        def allocate(num_bytes):
            memory.append(torch.full((num_bytes,), 0xFF, dtype=torch.uint8))
            return memory[0]

        with pending_weights(model.weights(), files, 0, CPU, allocate) as pending:
            model.bind(pending, updatable=True)
            final = dict(pending.final)
        before = logits_of(model)
        memory[0].fill_(0x7F)
        update = WeightUpdate(model.weights(), final)
        name = "model.layers.0.mlp.up_proj.weight"
        with pytest.raises(InvalidRequestError, match=rf"'{name}' is int8; give it in float64, float32"):
            update.take(name, tensors[name].to(torch.int8))
        for name, tensor in tensors.items():
            update.take(name, tensor)
        update.check_complete()
        update.finish()
        model.refresh()
        return before, logits_of(model)

    for before, after in on_all_ranks(size, updated):
        torch.testing.assert_close(after, expected[number], atol=3e-4, rtol=0)
        assert (before - after).abs().max() > 0.1


def test_codes_and_scales_are_what_is_kept(tmp_path):
    save(tmp_path)
    _, model = built(tmp_path, "int4")
    sizes = {weight.name: weight.nbytes for weight in model.weights() if weight.dtype == torch.uint8}
    # 64 inputs: 32 bytes of codes, and one scale in 16 bytes.
    assert sizes["layers.0.gate_up_proj.weight"] == 2 * 96 * (32 + 16)
    assert len(sizes) == 8


@pytest.mark.parametrize("number", NUMBERS)
def test_adversarial_groups(number):
    """Zeros, one spike, the largest and smallest floats, both signs of the largest magnitude."""
    rows = torch.zeros(6, 32)
    rows[1, 3], rows[2], rows[3, ::2], rows[4, 1], rows[5, :2] = 7.0, 3e38, 1e-30, -5.0, torch.tensor([-2.0, 2.0])
    codes, scales = quantize_groups(rows.view(6, 1, 32), number)
    numbers = codes.float() - (8 if number == "int4" else 0)
    found = (numbers * scales[..., None]).view(6, 32)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, rows, rtol=0.13, atol=0)  # 7/8 of the largest where its other sign comes too


@pytest.mark.parametrize("num_inputs", [1, 5, 31, 130, 384])
@pytest.mark.parametrize("number", NUMBERS)
def test_rows_of_any_length(number, num_inputs):
    encoding = EncodedRows(OnLoadFormat(number), num_inputs)
    rows = torch.randn(3, num_inputs, generator=torch.Generator().manual_seed(1))
    encoded = encoding(rows)
    assert encoded.shape == (3, encoding.format.row_bytes(num_inputs))
    assert torch.equal(encoding(rows[1:2]), encoded[1:2])
    assert encoding.views(encoded)[1].shape == (3, num_inputs // math.gcd(128, num_inputs))
