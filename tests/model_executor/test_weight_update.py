"""Bound to one checkpoint and updated to another, a model is exactly what is loaded from the other; and nothing of it
has moved."""

from __future__ import annotations

import functools

import pytest
import torch
from dense_attention import DenseRun
from hypothesis import given, settings
from hypothesis import strategies as st
from placed_models import placed, tensors_of
from safetensors.torch import save_file
from thread_tp import ThreadRank, on_all_ranks
from tiny_checkpoints import FAMILY_NAMES, MAX_LEN, hf_logits, hf_model, load, random_ids, saved_state

from ringcore.errors import InvalidRequestError, ModelLoadError
from ringcore.model_executor import loader, ops, weight_update
from ringcore.model_executor.tensor_source import SafetensorsSource
from ringcore.model_executor.weight import Uniform, Weight, WeightPart
from ringcore.model_executor.weight_update import WeightUpdate, row_pieces

# More than one layer, and a rank of two with a share of each thing.
OPTIONS = {"num_hidden_layers": 2, "attention_bias": True}


def options_of(family):
    """Biases where the family leaves the choice; Gemma 3 shares its two ends."""
    if family == "Gemma3":
        return {**OPTIONS, "tie_word_embeddings": True}
    return OPTIONS if family in ("Llama", "Qwen3") else {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """two(family) -> (folder of one model, the other transformers model, its folder, its tensors)."""

    @functools.cache
    def make(family):
        models = [hf_model(family, seed=seed, **options_of(family)) for seed in (1, 2)]
        folders = [tmp_path_factory.mktemp(family) for _ in models]
        for model, folder in zip(models, folders, strict=True):
            model.save_pretrained(folder, max_shard_size="100KB")
        return folders[0], models[1], folders[1], saved_state(folders[1])

    return make


@pytest.fixture
def in_small_pieces(monkeypatch):
    """Pieces that end anywhere: within a head, within a matrix of one that is fused."""
    monkeypatch.setattr(weight_update, "row_pieces", functools.partial(row_pieces, max_bytes=1800))
    monkeypatch.setattr(loader, "_PIECE_BYTES", 3000)


def places(model):
    return {way: tensor.data_ptr() for way, tensor in tensors_of(model).items()}


def assert_same(model, fresh):
    ours, theirs = tensors_of(model), tensors_of(fresh)
    assert list(ours) == list(theirs)
    for way, tensor in ours.items():
        assert torch.equal(tensor, theirs[way]), way


def take_all(update, state):
    for name, tensor in state.items():
        update.take(name, tensor)


def read_all(update, folder):
    with SafetensorsSource(sorted(map(str, folder.glob("*.safetensors")))) as source:
        update.read(source)


@pytest.mark.parametrize("way", ["taken", "read"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.usefixtures("in_small_pieces")
def test_updated_is_as_loaded(two, family, size, way):
    before, hf, after, state = two(family)

    @torch.inference_mode()
    def on_rank(tp):
        model, tensors = placed(before, tp)
        where = places(model)
        update = WeightUpdate(model.weights(), tensors)
        take_all(update, state) if way == "taken" else read_all(update, after)
        update.check_complete()
        model.refresh()
        assert places(model) == where
        assert_same(model, placed(after, tp)[0])
        return DenseRun(model, MAX_LEN, 1).step({0: random_ids(40)})

    for logits in on_all_ranks(size, on_rank):
        torch.testing.assert_close(logits, hf_logits(hf, random_ids(40)), atol=1e-4, rtol=0)


def test_every_kind_of_derived_tensor_is_seen(two):
    """The search for tensors finds what is derived, and an update without `refresh` would leave it behind."""
    before, _, after, state = two("Gemma3")
    model, tensors = placed(before)
    names = {way.rpartition(".")[2] for way in tensors_of(model)}
    assert {"gain", "floor", "weight", "table"} <= names
    update = WeightUpdate(model.weights(), tensors)
    take_all(update, state)
    with pytest.raises(AssertionError, match=r"gain|_made"):
        assert_same(model, placed(after)[0])
    model.refresh()
    assert_same(model, placed(after)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["Qwen3", "Gemma3"])
@pytest.mark.parametrize("kernels", [False, True])
def test_updated_is_as_loaded_in_16_bits(two, monkeypatch, family, dtype, kernels):
    """And with the kernels bound, which hold addresses too."""
    if kernels:
        monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    before, _, after, state = two(family)
    model, tensors = placed(before, dtype=dtype)
    where = places(model)
    update = WeightUpdate(model.weights(), tensors)
    take_all(update, state)
    model.refresh()
    assert places(model) == where
    assert_same(model, placed(after, dtype=dtype)[0])


def test_a_model_that_stays_computes_as_a_packed_one(two):
    before, *_ = two("Llama")
    ids = random_ids(30)
    packed, stays = (DenseRun(model, MAX_LEN, 1).step({0: ids}) for model in (load(before), placed(before)[0]))
    torch.testing.assert_close(packed, stays, atol=2e-5, rtol=0)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_chunks_in_any_order_and_some_twice(two, data):
    before, _, after, state = two("Qwen3")
    names = data.draw(st.permutations(list(state)))
    again = data.draw(st.lists(st.sampled_from(names), max_size=4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    tp = ThreadRank(data.draw(st.integers(0, 1)), 2, None, [])
    model, tensors = placed(before, tp)
    update = WeightUpdate(model.weights(), tensors)
    for name in [*again, *names]:
        if name in again and data.draw(st.booleans()):
            update.take(name, torch.full_like(state[name], float("nan")))
        update.take(name, state[name].to(dtype))
    update.check_complete()
    assert update.num_taken == len(state)
    model.refresh()
    assert_same(model, placed(after, tp)[0])


@given(
    shape=st.tuples(st.integers(1, 50), st.integers(1, 9)), itemsize=st.sampled_from([2, 4]), most=st.integers(1, 200)
)
def test_pieces_cover_every_row_once(shape, itemsize, most):
    rows = [row for first, end in row_pieces(shape, itemsize, most) for row in range(first, end)]
    assert rows == list(range(shape[0]))
    for first, end in row_pieces(shape, itemsize, most):
        assert (end - first) * shape[1] * itemsize <= most or end - first == 1


def test_views_and_parameters_of_a_trainer_are_taken(two):
    before, _, after, state = two("Llama")
    model, tensors = placed(before)
    update = WeightUpdate(model.weights(), tensors)
    with torch.no_grad():
        for name, tensor in state.items():
            strided = torch.stack([tensor, tensor], -1)[..., 0]
            update.take(name, torch.nn.Parameter(strided, requires_grad=True))
    model.refresh()
    assert_same(model, placed(after)[0])


def test_padding_of_the_vocabulary_is_zero_again(two):
    """Memory that was given back comes without contents; no checkpoint has these rows."""
    before, _, after, state = two("Qwen2")
    tp = ThreadRank(1, 2, None, [])
    model, tensors = placed(before, tp)
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    update = WeightUpdate(model.weights(), tensors)
    take_all(update, state)
    model.refresh()
    assert not model.embed_tokens.table[-1].any()
    assert_same(model, placed(after, tp)[0])


def test_bytes_are_those_of_the_rank(two):
    before, _, _, state = two("Llama")
    tp = ThreadRank(0, 2, None, [])
    model, tensors = placed(before, tp)
    update = WeightUpdate(model.weights(), tensors)
    assert update.take("model.layers.0.self_attn.q_proj.weight", state["model.layers.0.self_attn.q_proj.weight"]) == (
        32 * 64 * 4
    )
    total = sum(update.take(name, tensor) for name, tensor in state.items())
    assert total == sum(
        weight.num_filled * weight.nbytes // weight.shape[weight.parts[0].dim] for weight in model.weights()
    )


# ---------------------------------------------------------------------------------------------------------------
# What does not fit.


@pytest.fixture
def update(two):
    """An update of a rank's Llama, and its tensors, which no test of these changes."""
    model, tensors = placed(two("Llama")[0])
    found = WeightUpdate(model.weights(), tensors)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    yield found
    assert found.num_taken == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


UP = "model.layers.1.mlp.up_proj.weight"


def test_an_unknown_name_is_refused(update):
    with pytest.raises(InvalidRequestError, match=r"tensor 'model\.layers\.9\.x' has no place in the model") as e:
        update.take("model.layers.9.x", torch.ones(3))
    assert e.value.details == {"field": "tensor", "value": "model.layers.9.x"}


@pytest.mark.parametrize("shape", [(64, 80), (80,), (80, 64, 1), (40, 64)])
def test_a_wrong_shape_is_refused(update, shape):
    with pytest.raises(
        InvalidRequestError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' has the shape .*\[80, 64\]"
    ):
        update.take(UP, torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_a_wrong_dtype_is_refused(update, dtype):
    with pytest.raises(
        InvalidRequestError, match=rf"{UP}' is {str(dtype)[6:]}; give it in float64, float32, float16, bfloat16"
    ):
        update.take(UP, torch.ones(80, 64).to(dtype))


def test_tensors_that_no_model_needs_are_ignored(update):
    assert update.take("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8)) == 0


def test_a_tied_head_is_ignored(two):
    before, _, _, state = two("Gemma3")
    model, tensors = placed(before)
    update = WeightUpdate(model.weights(), tensors)
    assert update.take("lm_head.weight", torch.ones(131, 64)) == 0
    take_all(update, state)
    update.check_complete()


def test_what_is_missing_is_named(two):
    before, _, _, state = two("Llama")
    model, tensors = placed(before)
    update = WeightUpdate(model.weights(), tensors)
    left = ["model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    take_all(update, {name: tensor for name, tensor in state.items() if name not in left})
    with pytest.raises(InvalidRequestError, match=rf"tensor '{left[0]}' has not come \(and 1 more\)"):
        update.check_complete()
    update.take(left[0], state[left[0]])
    with pytest.raises(InvalidRequestError, match=rf"tensor '{left[1]}' has not come; every tensor"):
        update.check_complete()
    update.take(left[1], state[left[1]])
    update.check_complete()


def test_of_a_file_that_does_not_fit_nothing_is_read(update, two, tmp_path):
    state = two("Llama")[3]
    for change in ({UP: torch.ones(64, 80)}, {"model.surplus": torch.ones(3)}):
        save_file(state | change, tmp_path / "model.safetensors")
        with SafetensorsSource([str(tmp_path / "model.safetensors")]) as source, pytest.raises(InvalidRequestError):
            update.read(source)


def test_a_quantized_file_is_refused(two, tmp_path):
    before, _, _, state = two("Llama")
    model, tensors = placed(before)
    update = WeightUpdate(model.weights(), tensors)
    save_file({UP: state[UP].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    old = tensors["layers.1.gate_up_proj.weight"].clone()
    with SafetensorsSource([str(tmp_path / "model.safetensors")]) as source, pytest.raises(ModelLoadError, match=UP):
        update.read(source)
    assert update.num_taken == 0
    assert torch.equal(tensors["layers.1.gate_up_proj.weight"], old)


def test_an_order_is_for_whole_runs():
    with pytest.raises(AssertionError):
        WeightPart("x", (8, 2), 0, 0, 6, order=(0, 2, 1, 3))
    with pytest.raises(AssertionError):
        WeightPart("x", (8, 2), 0, 0, 8, order=(0, 1, 1, 3))
    whole = WeightPart("x", (8, 2), 0, 0, 8, order=(1, 0))
    assert Weight("w", (10, 2), torch.float32, (whole,), Uniform(0, 1)).num_filled == 8
