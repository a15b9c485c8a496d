"""Schemes that are added here by the seam alone: 8-bit rows with a scale each, and packed 4-bit codes with a scale a
group. Models of them compute what dense models of the dequantized weights do."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from dense_attention import DenseRun
from safetensors.torch import save_file
from thread_tp import ThreadRank, on_all_ranks
from tiny_checkpoints import MAX_LEN, hf_model, load, random_ids, save_with_tensors

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.checkpoint.matrix_tensors import DENSE, Inputs, MatrixTensor, Outputs
from ringcore.distributed.parallel import SingleRank
from ringcore.errors import InvalidRequestError, ModelLoadError
from ringcore.families import FAMILIES
from ringcore.model_executor import weight_update
from ringcore.model_executor.linear_schemes.dense import Dense
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import InputSlice, LinearShard, OutputSlice
from ringcore.model_executor.loader import load_weights, pending_weights
from ringcore.model_executor.models import model_class
from ringcore.model_executor.weight import Derived
from ringcore.model_executor.weight_update import WeightUpdate, row_pieces

CPU = torch.device("cpu")
STEPS = [random_ids(20, seed=1), random_ids(1, seed=2), random_ids(5, seed=3)]


class Int8Product(Product):
    """From the codes as they are."""

    def __init__(self, codes, scales, bias):
        self.codes, self.scales, self.bias = codes, scales, bias

    def __call__(self, x, tokens, out=None):
        product = F.linear(x, self.codes.to(x.dtype)) * self.scales
        product = product if self.bias is None else product + self.bias
        return product if out is None else out.copy_(product)


@dataclass(frozen=True)
class Int8Rows(LinearScheme):
    tensors = (
        MatrixTensor("codes", (Outputs(), Inputs()), "I8", dummy=(-128.0, 128.0)),
        MatrixTensor("scales", (Outputs(),), dummy=(0.001, 0.003)),
    )

    def product(self, shard, tensors, bias, updatable):
        return Int8Product(tensors["codes"], tensors["scales"], bias)

    def quantize(self, weight):
        scales = weight.abs().amax(1) / 127
        return {"codes": (weight / scales[:, None]).round().to(torch.int8), "scales": scales}

    def dequantize(self, codes, scales):
        return codes.float() * scales[:, None]


class Int4Product(Product):
    """From dequantized weights, which are recomputed when the codes have changed."""

    def __init__(self, dequantize, bias):
        self.derived, self.bias = Derived(), bias
        self.weight = self.derived.make(dequantize)

    def __call__(self, x, tokens, out=None):
        product = F.linear(x, self.weight, self.bias)
        return product if out is None else out.copy_(product)

    def refresh(self):
        self.derived.refresh()


@dataclass(frozen=True)
class Int4Groups(LinearScheme):
    """Stored inputs first; two inputs share a byte, and `group` of them a scale."""

    group: int = 4

    @property
    def tensors(self):
        return (
            MatrixTensor("codes", (Inputs(2), Outputs()), "U8", dummy=(0.0, 256.0)),
            MatrixTensor("scales", (Inputs(self.group), Outputs()), dummy=(0.01, 0.05)),
        )

    def product(self, shard, tensors, bias, updatable):
        return Int4Product(functools.partial(self.dequantize, **tensors), bias)

    def quantize(self, weight):
        grouped = weight.t().unflatten(0, (-1, self.group))  # [groups, group, out]
        scales = grouped.abs().amax(1) / 7
        codes = ((grouped / scales[:, None]).round() + 8).to(torch.uint8).flatten(0, 1)
        return {"codes": codes[::2] + codes[1::2] * 16, "scales": scales}

    def dequantize(self, codes, scales):
        pairs = torch.stack((codes % 16, codes // 16), 1).flatten(0, 1).float() - 8  # [in, out]
        return (pairs.unflatten(0, (-1, self.group)) * scales[:, None]).flatten(0, 1).t().contiguous()


def mixed(name):
    """Other schemes within one fused layer, and from layer to layer."""
    if "v_proj" in name:
        return Dense()
    if name == "lm_head" or ".1.mlp" in name:
        return Int8Rows()
    return Int4Groups()


SCHEMES = {"int8": lambda name: Int8Rows(), "int4": lambda name: Int4Groups(), "mixed": mixed}


def quantized(model, scheme_of):
    """(the checkpoint's tensors in their schemes, the same dequantized)."""
    stored, dense = {}, {}
    for name, tensor in model.state_dict().items():
        matrix = name.removesuffix(".weight")
        is_linear = name.endswith("_proj.weight") or matrix == "lm_head"
        scheme = scheme_of(matrix) if is_linear else Dense()
        if isinstance(scheme, Dense):
            stored[name] = dense[name] = tensor
            continue
        parts = {suffix: part.contiguous() for suffix, part in scheme.quantize(tensor).items()}
        stored |= {f"{matrix}.{suffix}": part for suffix, part in parts.items()}
        dense[name] = scheme.dequantize(**parts)
    return stored, dense


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """folders(kind, seed) -> (the quantized folder, its tensors, the dense folder)."""

    @functools.cache
    def make(kind, seed=1):
        model = hf_model("Llama", seed=seed, num_hidden_layers=2, attention_bias=True, mlp_bias=True)
        made = []
        for tensors in quantized(model, SCHEMES[kind]):
            folder = tmp_path_factory.mktemp(kind)
            save_with_tensors(folder, model, tensors)
            made += [folder, tensors]
        return made[:3]

    return make


def built(folder, scheme_of, tp, load_format="auto"):
    files = find_model(folder, load_format)
    spec = read_model_spec(files, FAMILIES)
    return files, model_class(spec.architecture)(spec, tp, torch.float32, MAX_LEN, scheme_of)


def logits_of(model):
    run = DenseRun(model, MAX_LEN, 1)
    return torch.cat([run.step({0: ids}) for ids in STEPS])


def logits(folder, scheme_of, tp, load_format="auto"):
    files, model = built(folder, scheme_of, tp, load_format)
    model.bind(load_weights(model.weights(), files, 5, CPU))
    return logits_of(model)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", SCHEMES)
def test_a_quantized_model_is_its_dequantized_one(folders, kind, size):
    folder, _, dense = folders(kind)
    expected = logits_of(load(dense))
    ranks = on_all_ranks(size, lambda tp: logits(folder, SCHEMES[kind], tp))
    for found in ranks:
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
        assert torch.equal(found, ranks[0])
    other = logits_of(load(folders("int4" if kind == "int8" else "int8")[2]))
    assert (other - expected).abs().max() > 0.05  # so that the codes matter


@pytest.mark.parametrize("kind", SCHEMES)
def test_the_codes_stay_as_they_are(folders, kind):
    folder, stored, _ = folders(kind)
    _, model = built(folder, SCHEMES[kind], SingleRank())
    declared = {part.checkpoint_name: weight.dtype for weight in model.weights() for part in weight.parts}
    assert declared == {name: tensor.dtype for name, tensor in stored.items()}


@pytest.mark.parametrize("kind", SCHEMES)
def test_dummy_weights_do_not_depend_on_the_number_of_ranks(folders, kind):
    folder, *_ = folders(kind)
    alone = logits(folder, SCHEMES[kind], SingleRank(), "dummy")
    for found in on_all_ranks(2, lambda tp: logits(folder, SCHEMES[kind], tp, "dummy")):
        torch.testing.assert_close(found, alone, atol=2e-4, rtol=0)
    assert 0.1 < alone.std() < 10


def updatable(folder, scheme_of, tp=None):
    """(the model, its memory, its tensors)."""
    files, model = built(folder, scheme_of, tp or SingleRank())
    memory = []

    def allocate(num_bytes):
        memory.append(torch.full((num_bytes,), 0xFF, dtype=torch.uint8))
        return memory[0]

    with pending_weights(model.weights(), files, 0, CPU, allocate) as pending:
        model.bind(pending, updatable=True)
        return model, memory[0], dict(pending.final)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", SCHEMES)
def test_new_weights(folders, kind, size, monkeypatch):
    """In pieces that end anywhere, such as within a head."""
    monkeypatch.setattr(weight_update, "row_pieces", functools.partial(row_pieces, max_bytes=300))
    (old, *_), (_, stored, dense) = folders(kind), folders(kind, seed=2)

    def updated(tp):
        model, _, tensors = updatable(old, SCHEMES[kind], tp)
        places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        before = logits_of(model)
        update = WeightUpdate(model.weights(), tensors)
        with torch.inference_mode():
            for name, tensor in stored.items():
                update.take(name, tensor)
            update.check_complete()
            model.refresh()
        assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == places
        return before, logits_of(model)

    expected = logits_of(load(dense))
    for before, after in on_all_ranks(size, updated) if size > 1 else [updated(SingleRank())]:
        torch.testing.assert_close(after, expected, atol=2e-4, rtol=0)
        assert (before - after).abs().max() > 0.1


def test_sleep_keeps_codes_and_scales(folders):
    """Memory that was discarded and restored to the same place."""
    model, memory, _ = updatable(folders("int8")[0], SCHEMES["int8"])
    expected, contents = logits_of(model), memory.clone()
    memory.fill_(0x7F)
    assert not torch.equal(logits_of(model), expected)
    memory.copy_(contents)
    assert torch.equal(logits_of(model), expected)


def test_codes_and_numbers_are_not_taken_for_one_another(folders):
    folder, stored, _ = folders("int8")
    with pytest.raises(ModelLoadError, match=r"q_proj\.weight' is missing \(and 14 more\)"):
        load(folder)
    model, _, tensors = updatable(folder, SCHEMES["int8"])
    update = WeightUpdate(model.weights(), tensors)
    codes, scales = (f"model.layers.0.mlp.up_proj.{suffix}" for suffix in ("codes", "scales"))
    with pytest.raises(InvalidRequestError, match=f"'{codes}' is float32; give it in int8"):
        update.take(codes, stored[codes].float())
    with pytest.raises(InvalidRequestError, match=f"'{scales}' is int8; give it in float64, float32"):
        update.take(scales, stored[scales].to(torch.int8))


def test_codes_of_another_dtype_are_refused(folders, tmp_path):
    folder, stored, _ = folders("int8")
    name = "model.layers.1.mlp.down_proj.codes"
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({**stored, name: stored[name].float()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"tensor '{name}' is F32, with which .* give a checkpoint in I8$"):
        logits(tmp_path, SCHEMES["int8"], SingleRank())


def test_ranks_do_not_split_a_group(folders):
    """40 of 80 inputs are not whole groups of 16."""
    with pytest.raises(
        ModelLoadError, match=r"down_proj\.scales': a rank's share, 0 to 40 of 80, .* groups of 16; lower"
    ):
        built(folders("int4")[0], lambda name: Int4Groups(16), ThreadRank(0, 2, None, []))[1].weights()


def shard(**changed):
    outputs = (OutputSlice("q", 12, 4, 4, (1, 0)), OutputSlice("v", 8, 6, 2))
    options = {"name": "qv", "outputs": outputs, "inputs": InputSlice.whole(6), "dtype": torch.float16}
    return LinearShard(**options | changed)


def slices(weight):
    return [(p.checkpoint_shape, p.dim, p.start, p.length, p.offset, p.order) for p in weight.parts]


def test_slices_by_outputs():
    """In whatever dimension they are; packed ones without their order; what has none is whole, one after the other."""
    weight = shard().weight(MatrixTensor("w", (Inputs(3), Outputs()), "I32"))
    assert (weight.name, weight.shape, weight.dtype) == ("qv.w", (2, 6), torch.int32)
    assert slices(weight) == [((2, 12), 1, 4, 4, 0, (1, 0)), ((2, 8), 1, 6, 2, 4, None)]
    weight = shard().weight(MatrixTensor("zeros", (Inputs(4), Outputs(2))))
    assert (weight.shape, weight.dtype) == ((2, 3), torch.float16)
    assert slices(weight) == [((2, 6), 1, 2, 2, 0, None), ((2, 4), 1, 3, 1, 2, None)]
    weight = shard().weight(MatrixTensor("index", (Inputs(),), "I32"))
    assert weight.shape == (12,)
    assert slices(weight) == [((6,), 0, 0, 6, 0, None), ((6,), 0, 0, 6, 6, None)]


def test_slices_by_inputs():
    by_inputs = shard(outputs=(OutputSlice("o", 5, 0, 5),), inputs=InputSlice(12, 4, 8))
    assert slices(by_inputs.weight(DENSE[0])) == [((5, 12), 1, 4, 8, 0, None)]
    assert slices(by_inputs.weight(MatrixTensor("scales", (Inputs(4), Outputs())))) == [((3, 5), 0, 1, 2, 0, None)]
    assert slices(by_inputs.weight(MatrixTensor("scales", (Outputs(),)))) == [((5,), 0, 0, 5, 0, None)]


def test_the_last_group_may_be_incomplete():
    last = shard(outputs=(OutputSlice("v", 11, 8, 3),)).weight(MatrixTensor("scales", (Outputs(4),)))
    assert slices(last) == [((3,), 0, 2, 1, 0, None)]
