"""From files to final tensors: fused, sliced, converted; and what is said of files that do not fit."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from dense_attention import DenseRun
from safetensors.torch import load_file, save_file
from thread_tp import ThreadRank
from tiny_checkpoints import (
    FAMILY_NAMES,
    GGUF_FAMILIES,
    MAX_LEN,
    hf_logits,
    hf_model,
    load,
    random_ids,
    saved_state,
)
from tiny_gguf import K_QUANTS, QUANTIZED, write_gguf

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.distributed.parallel import SingleRank
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES
from ringcore.model_executor import loader
from ringcore.model_executor.loader import PrefetchedWeights, load_weights, pending_weights
from ringcore.model_executor.models import build_model
from ringcore.model_executor.tensor_source import SafetensorsSource

pytestmark = pytest.mark.sampled

CPU = torch.device("cpu")


def place(rank, size):
    """A rank that only says where it stands: loading needs no collective."""
    return ThreadRank(rank, size, None, []) if size > 1 else SingleRank()


class Memory:
    """Memory for weights, once, full of NaN."""

    def __init__(self) -> None:
        self.whole = None

    def __call__(self, num_bytes):
        assert self.whole is None, "one piece for all"
        self.whole = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
        return self.whole


@pytest.fixture(params=["read as they are taken", "read ahead"], autouse=True)
def memory(request, monkeypatch):
    """Makes the memory to load into, for every test; None where each weight gets its own."""
    if request.param == "read as they are taken":
        monkeypatch.setitem(globals(), "make_memory", lambda: None)
    else:
        monkeypatch.setattr(loader, "_PIECE_BYTES", 2000)
        monkeypatch.setitem(globals(), "make_memory", Memory)


def make_memory():
    raise AssertionError("the fixture says")


def loaded(source, rank=0, size=1, dtype=torch.float32, load_format="auto", seed=0):
    files = find_model(source, load_format)
    spec = read_model_spec(files, FAMILIES)
    weights = build_model(spec, place(rank, size), dtype, MAX_LEN).weights()
    return weights, load_weights(weights, files, seed, CPU, make_memory())


def assemble(weight, state):
    """The final tensor from whole checkpoint tensors, as its declaration says."""
    out = torch.zeros(weight.shape)
    for part in weight.parts:
        piece = state[part.checkpoint_name].narrow(part.dim, part.start, part.length)
        if part.order is not None:
            runs = range(0, part.length, len(part.order))
            piece = torch.stack([piece[first + index] for first in runs for index in part.order])
        rows = out if part.row is None else out[part.row : part.row + len(piece)]
        rows.narrow(part.dim, part.offset, part.length).copy_(piece)
    return out


def as_in_the_checkpoint(weight, part, tensors):
    """A part's rows of the final tensor, put back in the checkpoint's order."""
    rows = tensors[weight.name].narrow(part.dim, part.offset, part.length)
    if part.order is None:
        return rows
    back = [first + part.order.index(i) for first in range(0, part.length, part.run) for i in range(part.run)]
    return rows[back]


def assert_loads(source, state, size=1, dtype=torch.float32):
    for rank in range(size):
        weights, tensors = loaded(source, rank, size, dtype)
        assert set(tensors) == {weight.name for weight in weights}
        for weight in weights:
            tensor = tensors[weight.name]
            assert tensor.shape == weight.shape
            assert tensor.dtype == dtype
            assert torch.equal(tensor, assemble(weight, state).to(dtype)), weight.name


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_safetensors(checkpoint, family, size):
    _, folder = checkpoint(family, max_shard_size="100KB")
    assert_loads(folder, saved_state(folder), size)


def test_the_fused_tensor_is_q_then_k_then_v(checkpoint):
    """By hand, once, for the second of two ranks: heads 2 and 3 of q, head 1 of k and of v, each of 16 rows; those of q
    and k with row 8 behind row 0, 9 behind 1, and so on."""
    hf, folder = checkpoint("Qwen2")
    state = hf.state_dict()
    q, k, v = (state[f"model.layers.1.self_attn.{which}_proj.weight"] for which in "qkv")
    _, tensors = loaded(folder, rank=1, size=2)
    turned = [
        matrix[first + i + half] for matrix, first in ((q, 32), (q, 48), (k, 16)) for i in range(8) for half in (0, 8)
    ]
    assert torch.equal(tensors["layers.1.qkv_proj.weight"], torch.cat([torch.stack(turned), v[16:32]]))
    down = state["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(tensors["layers.1.down_proj.weight"], down[:, 40:80])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_dtypes_are_converted(tmp_path, checkpoint, stored, wanted):
    hf, folder = checkpoint("Llama")
    state = {name: tensor.to(stored) for name, tensor in hf.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert_loads(tmp_path, {name: tensor.float() for name, tensor in state.items()}, dtype=wanted)


# The columns that K blocks need are many: a model of one narrow layer.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 16}


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """gguf_file(family, kind) -> (file, what its tensors mean by name), each made once."""

    @functools.cache
    def make(family, kind):
        hf = hf_model(family, **WIDE, attention_bias=True) if family != "Qwen2" else hf_model(family, **WIDE)
        path = tmp_path_factory.mktemp("gguf") / "model.gguf"
        expected = write_gguf(path, hf, family.lower(), kind)
        return path, {name: torch.from_numpy(array.copy()) for name, array in expected.items()}

    return make


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", [*QUANTIZED, *K_QUANTS])
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_gguf(gguf_file, family, kind, size):
    path, expected = gguf_file(family, kind)
    assert_loads(path, expected, size)


def assert_gguf_conforms(path, hf, architecture):
    write_gguf(path, hf, architecture)
    ids = random_ids(40)
    ours = DenseRun(load(path), MAX_LEN, 1).step({0: ids})
    torch.testing.assert_close(ours, hf_logits(hf, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_gguf_file_computes_what_its_model_does(tmp_path, family, tied):
    own = {"query_pre_attn_scalar": 16} if family == "Gemma3" else {}  # the file has no word for another
    hf = hf_model(family, tie_word_embeddings=tied, **own)
    assert_gguf_conforms(tmp_path / "model.gguf", hf, family.lower())


def test_a_gguf_file_of_gemma3_scales_the_layers_without_a_window_only(tmp_path):
    hf = hf_model("Gemma3", "linear", query_pre_attn_scalar=16)
    assert hf.config.rope_parameters["full_attention"]["factor"] == 3.0
    assert_gguf_conforms(tmp_path / "model.gguf", hf, "gemma3")


def test_a_gguf_file_of_a_mistral_is_a_llama(tmp_path):
    hf = hf_model("Mistral", sliding_window=None, head_dim=32)
    assert_gguf_conforms(tmp_path / "model.gguf", hf, "llama")


def test_dummy_weights_have_the_true_shapes_and_are_never_zero(checkpoint):
    _, folder = checkpoint("Qwen2")
    weights, tensors = loaded(folder, load_format="dummy")
    for weight in weights:
        tensor = tensors[weight.name]
        assert tensor.shape == weight.shape
        assert (tensor != 0).float().mean() > 0.999
        if "norm" in weight.name:
            assert 0.8 <= tensor.min() <= tensor.max() <= 1.2
        elif tensor.ndim == 2:
            assert tensor.std() == pytest.approx(weight.parts[0].checkpoint_shape[1] ** -0.5, rel=0.1)


def test_weights_that_are_read_ahead_lie_side_by_side(checkpoint):
    hf, folder = checkpoint("Qwen2")
    files, memory = find_model(folder), Memory()
    spec = read_model_spec(files, FAMILIES)
    weights = build_model(spec, place(0, 1), torch.bfloat16, 64).weights()
    with pending_weights(weights, files, 0, CPU, memory) as pending:
        assert isinstance(pending, PrefetchedWeights)
        assert len(pending) == len(weights)
        tensors = {weight.name: pending.pop(weight.name) for weight in reversed(weights)}
        assert not len(pending)
    starts = [tensors[weight.name].data_ptr() - memory.whole.data_ptr() for weight in weights]
    assert starts == sorted(starts)
    assert not any(start % 256 for start in starts)
    for weight, start, end in zip(weights, starts, [*starts[1:], len(memory.whole)], strict=True):
        assert start + weight.nbytes <= end < start + weight.nbytes + 256
        assert torch.equal(tensors[weight.name], assemble(weight, hf.state_dict()).bfloat16())


def test_weights_are_taken_in_any_order_and_the_next_is_read_meanwhile(checkpoint, monkeypatch):
    hf, folder = checkpoint("Qwen2")
    files = find_model(folder)
    weights = build_model(read_model_spec(files, FAMILIES), place(0, 1), torch.float32, 64).weights()
    read, threads = SafetensorsSource.read, {}

    def note(source, part, init, out):
        threads[part.checkpoint_name] = threading.current_thread()
        read(source, part, init, out)

    monkeypatch.setattr(SafetensorsSource, "read", note)
    first, second, *others = weights
    order = [first, second, *reversed(others)]
    with pending_weights(weights, files, 0, CPU) as pending:
        tensors = {weight.name: pending.pop(weight.name) for weight in order}
        assert not len(pending)
    for weight in weights:
        assert torch.equal(tensors[weight.name], assemble(weight, hf.state_dict()))
    by_caller, by_thread = (threads[weight.parts[0].checkpoint_name] for weight in (first, second))
    assert by_caller is threading.current_thread()
    assert by_thread is not by_caller
    assert not by_thread.is_alive()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_inference_mode_reaches_every_thread(checkpoint, load_format):
    _, folder = checkpoint("Qwen2")
    with torch.inference_mode():
        weights, tensors = loaded(folder, load_format=load_format)
        assert not any(tensors[weight.name].isnan().any() for weight in weights)


def test_an_error_of_a_reader_is_that_of_who_takes_the_weight(checkpoint, monkeypatch):
    _, folder = checkpoint("Qwen2")
    read = SafetensorsSource.read

    def fail(source, part, init, out):
        if "layers.1.mlp.up_proj" in part.checkpoint_name:
            raise ModelLoadError("it is gone", path="file", tensor=part.checkpoint_name)
        read(source, part, init, out)

    monkeypatch.setattr(SafetensorsSource, "read", fail)
    with pytest.raises(ModelLoadError, match="it is gone"):
        loaded(folder)


@pytest.mark.parametrize("size", [2, 4])
def test_dummy_weights_are_slices_of_the_same_whole(checkpoint, size):
    _, folder = checkpoint("Qwen3")
    whole = {}
    weights, tensors = loaded(folder, load_format="dummy", seed=9)
    for weight in weights:
        for part in weight.parts:
            whole[part.checkpoint_name] = as_in_the_checkpoint(weight, part, tensors)
    for rank in range(size):
        weights, tensors = loaded(folder, rank, size, load_format="dummy", seed=9)
        for weight in weights:
            assert torch.equal(tensors[weight.name], assemble(weight, whole)), weight.name


def test_dummy_weights_follow_the_seed_and_the_name(checkpoint):
    _, folder = checkpoint("Qwen2")
    first, again, other = (loaded(folder, load_format="dummy", seed=seed)[1] for seed in (1, 1, 2))
    name = "layers.0.o_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first["layers.1.o_proj.weight"])


# ---------------------------------------------------------------------------------------------------------------
# Files that do not fit.


@pytest.fixture
def altered(tmp_path, checkpoint):
    """altered(change) -> a folder whose tensors `change` was applied to."""
    _, folder = checkpoint("Qwen2", tie_word_embeddings=True)

    def make(change):
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        return tmp_path

    return make


def test_a_missing_tensor_is_named(altered):
    folder = altered(lambda state: [state.pop(f"model.layers.{i}.mlp.up_proj.weight") for i in (1, 2)])
    with pytest.raises(
        ModelLoadError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing \(and 1 more\)"
    ) as e:
        loaded(folder)
    assert e.value.details["tensor"] == "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_what_is_missing_or_too_much_in_any_layer_is_named(tmp_path, checkpoint, family):
    _, folder = checkpoint(family)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    state = load_file(folder / "model.safetensors")
    layer = "model.layers.2"
    for name in [name for name in state if name.startswith(layer)]:
        save_file({key: tensor for key, tensor in state.items() if key != name}, tmp_path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=f"tensor '{name}' is missing"):
            loaded(tmp_path)
    for name in ("self_attn.q_proj.bias", "mlp.up_proj.bias", "self_attn.sinks"):
        save_file(state | {f"{layer}.{name}": torch.ones(64)}, tmp_path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=rf"tensor '{layer}\.{name}' has no place in the model"):
            loaded(tmp_path)


def test_a_wrong_shape_names_tensor_file_and_both_shapes(altered):
    name = "model.layers.0.self_attn.k_proj.weight"
    folder = altered(lambda state: state.update({name: torch.ones(16, 64)}))
    with pytest.raises(
        ModelLoadError, match=rf"model\.safetensors: tensor '{name}' has the shape \[16, 64\], .*\[32, 64\]"
    ):
        loaded(folder)


def test_a_transposed_matrix_is_refused(altered):
    name = "model.layers.0.mlp.down_proj.weight"
    folder = altered(lambda state: state.update({name: state[name].T.contiguous()}))
    with pytest.raises(ModelLoadError, match="different models"):
        loaded(folder)


def test_a_tensor_without_a_place_is_refused(altered):
    """A checkpoint whose extra tensors change the result (adapters, quantization scales, another layer kind)."""
    folder = altered(lambda state: state.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    with pytest.raises(
        ModelLoadError, match=r"'model\.layers\.0\.self_attn\.q_norm\.weight' has no place in the model"
    ):
        loaded(folder)


def test_tensors_that_no_model_needs_are_ignored(altered):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": torch.ones(131, 64)}
    loaded(altered(lambda state: state.update(extra)))


def test_a_quantized_dtype_is_refused(altered):
    name = "model.layers.0.mlp.up_proj.weight"
    folder = altered(lambda state: state.update({name: state[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(ModelLoadError, match=f"tensor '{name}' is F8_E4M3, with which the model does not compute"):
        loaded(folder)


def test_a_missing_tensor_of_a_gguf_file_is_named(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, hf_model("Llama"), "llama", skip=("model.layers.2.input_layernorm.weight",))
    with pytest.raises(
        ModelLoadError, match=r"model\.gguf: tensor 'model\.layers\.2\.input_layernorm\.weight' is missing"
    ):
        loaded(path)
