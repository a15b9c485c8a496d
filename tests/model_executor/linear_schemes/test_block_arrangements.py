"""Codes of 4 and 8 bits that may be updated stay packed on a CPU, in the memory of the checkpoint's tensors."""

from __future__ import annotations

import functools

import pytest
import torch
from dense_attention import DenseRun
from placed_models import poisoned, tensors_of
from quantized_checkpoints import save_quantized
from safetensors.torch import load_file
from thread_tp import on_all_ranks
from tiny_checkpoints import MAX_LEN, hf_logits, hf_model, random_ids

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.checkpoint import find_model, read_model_spec
from ringcore.checkpoint.quantization import OnLoadFormat
from ringcore.distributed.parallel import SingleRank
from ringcore.errors import InvalidRequestError
from ringcore.families import FAMILIES
from ringcore.model_executor.linear_schemes.arrangements import Transposed
from ringcore.model_executor.linear_schemes.block_arrangements import ColumnBlocks, RowBlocks, has_whole_blocks
from ringcore.model_executor.linear_schemes.block_kernels import block_kernels
from ringcore.model_executor.linear_schemes.block_product import BlockProduct
from ringcore.model_executor.linear_schemes.codes import WordCodes
from ringcore.model_executor.linear_schemes.cpu_product import cpu_product
from ringcore.model_executor.linear_schemes.expanding_product import ExpandingProduct
from ringcore.model_executor.linear_schemes.on_load_scheme import EncodedRows
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import Groups, QuantizedMatrix
from ringcore.model_executor.loader import pending_weights
from ringcore.model_executor.models import build_model
from ringcore.model_executor.weight_update import WeightUpdate

pytestmark = pytest.mark.skipif(block_kernels() is None, reason="no C compiler")

KINDS = ("w4", "w4 asym", "w8 asym", "awq", "gptq", "gptq 8", "fp8 channel", "int8")
IDS = random_ids(40, seed=4)
CPU = torch.device("cpu")
NAME = "model.layers.0.mlp.up_proj"
CODES = {"awq": "qweight", "gptq": "qweight", "gptq 8": "qweight", "fp8 channel": "weight", "int8": "weight"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(kind, seed) -> (the folder, the logits of IDS by transformers with what the codes mean)."""

    @functools.cache
    def make(kind, seed):
        folder = tmp_path_factory.mktemp("quantized")
        options = {"num_hidden_layers": 2, "intermediate_size": 128}
        model = save_quantized(folder, hf_model("Llama", seed=seed, **options), kind)
        return folder, hf_logits(model, IDS)

    return make


def placed(folder, tp):
    """(the model as an engine with sleep mode has it, its memory, its tensors by name)."""
    files = find_model(folder)
    model = build_model(read_model_spec(files, FAMILIES), tp, torch.float32, MAX_LEN)
    memory = []

    def allocate(num_bytes):
        memory.append(poisoned(num_bytes))
        return memory[0]

    with pending_weights(model.weights(), files, 0, CPU, allocate) as pending:
        model.bind(pending, updatable=True)
        return model, memory[0], dict(pending.final)


def updated(model, tensors, state):
    update = WeightUpdate(model.weights(), tensors)
    with torch.inference_mode():
        for name, tensor in state.items():
            update.take(name, tensor)
        update.finish()
        model.refresh()


def logits_of(model):
    return DenseRun(model, MAX_LEN, 1).step({0: IDS})


def agree(found, expected, kind):
    """Rounded inputs may be rounded to another side here and there."""
    atol = 0.1 if kind in ("fp8 channel", "int8") else 2e-4
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)
    best = expected.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > max(atol, 1e-3)
    assert torch.equal(found.argmax(-1)[is_clear], expected.argmax(-1)[is_clear])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_rewrites_the_packed_weights(saved, kind, size):
    """Of one tensor, then of all after the memory was discarded; none moves, and an update that is refused leaves the
    weights."""
    (old, before), (new, after) = saved(kind, 3), saved(kind, 4)
    old_state, new_state = load_file(old / "model.safetensors"), load_file(new / "model.safetensors")
    codes = f"{NAME}.{CODES.get(kind, 'weight_packed')}"

    def run(tp):
        model, memory, tensors = placed(old, tp)
        assert not any(isinstance(one, ExpandingProduct) for one in products_of(model))
        found = [logits_of(model)]
        contents, places = memory.clone(), {name: one.data_ptr() for name, one in tensors.items()}
        update = WeightUpdate(model.weights(), tensors)
        with pytest.raises(InvalidRequestError, match=rf"'{codes}' has the shape \[3, 5\], the model's is"):
            update.take(codes, old_state[codes].new_zeros(3, 5))
        update.finish()
        model.refresh()
        assert torch.equal(memory, contents)
        updated(model, tensors, {codes: old_state[codes].clone()})
        assert torch.equal(memory, contents)  # what an update does not give was put back, and arranged again
        memory.fill_(0x7F)
        memory.copy_(contents)  # asleep, and awake
        found.append(logits_of(model))
        memory.fill_(0x7F)  # discarded
        updated(model, tensors, new_state)
        assert {name: one.data_ptr() for name, one in tensors.items()} == places
        return [*found, logits_of(model)]

    for first, awake, last in on_all_ranks(size, run):
        agree(first, before, kind)
        assert torch.equal(first, awake)
        agree(last, after, kind)
        assert (last - first).abs().max() > 0.1


def products_of(thing, seen=None):
    """Every product of a model."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, torch.Tensor | str | bytes | int | float | type):
        return
    seen.add(id(thing))
    if isinstance(thing, Product):
        yield thing
    inner = thing if isinstance(thing, list | tuple) else thing.values() if isinstance(thing, dict) else ()
    for one in [*inner, *getattr(thing, "__dict__", {}).values()]:
        yield from products_of(one, seen)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_beside_the_tensors_is_a_fraction_of_16_bits(saved, kind):
    """Scales and zeros of runs: the codes are the checkpoint's bytes, and there is no second copy of them."""
    model, memory, tensors = placed(saved(kind, 3)[0], SingleRank())
    products = [one for one in products_of(model.layers) if isinstance(one, BlockProduct)]
    assert len(products) == 8 if kind in ("awq", "gptq", "gptq 8") else 7  # the others leave one matrix dense
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in everything_of(products)}
    beside = sum(size for at, size in storages.items() if at != memory.untyped_storage().data_ptr())
    numbers = sum(one._matrix.num_outputs * one._matrix.num_inputs for one in products)
    assert 0 < beside < 0.25 * 2 * numbers
    codes = sum(one.nbytes for name, one in tensors.items() if name.endswith(("weight_packed", "qweight")))
    assert codes <= numbers * (1 if "8" in kind else 0.5)


def everything_of(products):
    return [tensor for one in products for tensor in tensors_of(one).values()]


@pytest.mark.parametrize("num_outputs", [53, 64])
@pytest.mark.parametrize("number", ["w4", "w8", "int8", "fp8", "gptq", "int4 on load", "fp8 on load"])
def test_restored_is_as_it_was(number, num_outputs):
    """Also the outputs after the last whole run, and the scales of a row that lie behind its codes."""
    generator, num_inputs = torch.Generator().manual_seed(1), 96
    if number.endswith("on load"):
        encoding = EncodedRows(OnLoadFormat(number.split()[0]), num_inputs)
        tensor, arrangement = encoding(torch.randn(num_outputs, num_inputs, generator=generator)), encoding.blocks
        expected = encoding.views(tensor)[1].clone()
    else:
        bits = 4 if number in ("w4", "gptq") else 8
        tensor = torch.randint(256, (num_outputs, num_inputs * bits // 8), generator=generator, dtype=torch.uint8)
        if number == "gptq":
            tensor = tensor.view(torch.int32).t().contiguous()
            arrangement = ColumnBlocks(Transposed(bits, num_inputs, num_outputs, 8))
        else:
            arrangement = RowBlocks(bits, num_inputs, number if number in ("int8", "fp8") else "unsigned")
    before = tensor.clone()
    arrangement.arrange(tensor)
    assert not torch.equal(tensor, before)
    if number.endswith("on load"):
        rows = arrangement.codes(tensor).restored(0, num_outputs)
        assert torch.equal(encoding.views(rows)[1], expected)
    if number in ("w4", "w8", "gptq"):
        words = before.view(torch.uint8) if number != "gptq" else before.t()
        plain = WordCodes(words, bits, num_inputs)
        for first, end in ((0, num_outputs), (17, 50)):
            assert torch.equal(arrangement.codes(tensor).numbers(first, end), plain.numbers(first, end))
    arrangement.restore(tensor)
    assert torch.equal(tensor, before)


def test_zeros_of_1_to_256_are_bytes():
    """GPTQ stores zeros of 8 bits less 1."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(256, (37, 64), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(1, 257, (37, 2), generator=generator).to(torch.int16)
    zeros[0, 0], zeros[1, 1] = 1, 256
    scales = torch.rand(37, 2, generator=generator) + 0.1
    matrix = QuantizedMatrix(WordCodes(words, 8, 64), scales, Groups(32), zeros=zeros, least_zero=1)
    product = cpu_product(matrix, None, torch.float32, updatable=False, rounding=None)
    assert isinstance(product, BlockProduct)
    for num_rows in (1, 3, 20):
        x = torch.randn(num_rows, 64, generator=generator)
        torch.testing.assert_close(product(x, NO_TOKEN_CONTEXT), x @ matrix.expanded().T, atol=2e-2, rtol=1e-4)


@pytest.mark.parametrize(
    ("num_inputs", "groups", "is_whole"),
    [
        (64, Groups(32), True),
        (64, Groups(128, 64), True),
        (96, Groups(1000), True),
        (48, Groups(48), False),
        (64, Groups(16), False),
        (64, Groups(64, 48), False),
        (64, Groups(32, index=torch.zeros(64, dtype=torch.int32)), False),
    ],
)
def test_blocks_are_whole_and_of_one_scale(num_inputs, groups, is_whole):
    assert has_whole_blocks(num_inputs, groups) == is_whole
