"""The tensors that a configuration asks for, and a checkpoint that has others."""

import json
import math

import numpy as np
import pytest
from raw_files import model_folder, safetensors_file, tiny_gguf, tiny_metadata

from ringcore.checkpoint import ModelSpec, find_model, read_model_spec
from ringcore.checkpoint.expected_tensors import check_checkpoint, expected_tensors, num_parameters
from ringcore.checkpoint.gguf_names import gguf_tensor_names
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES
from ringcore.families.llama import LLAMA

VARIANTS = [
    {},
    {"attention_bias": True, "mlp_bias": True},
    {"tie_word_embeddings": True, "head_dim": 12, "num_key_value_heads": 4},
]
EXTRA = {"Gemma3ForCausalLM": {"hidden_activation": "gelu_pytorch_tanh"}}


def spec_of(folder) -> ModelSpec:
    return read_model_spec(find_model(folder, "dummy"), FAMILIES)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", FAMILIES.architectures)
def test_they_are_those_of_the_model(tmp_path, architecture, variant):
    torch = pytest.importorskip("torch")
    from ringcore.distributed.parallel import SingleRank
    from ringcore.model_executor.models import build_model

    folder = model_folder(tmp_path / "m", architectures=[architecture], **EXTRA.get(architecture, {}), **variant)
    spec = spec_of(folder)
    model = build_model(spec, SingleRank(), torch.float32, 16)
    parts = {part.checkpoint_name: part.checkpoint_shape for weight in model.weights() for part in weight.parts}
    assert expected_tensors(spec, FAMILIES[architecture]) == parts


def checkpoint(folder, **changed):
    """A folder whose weights are those of `LLAMA_CONFIG`, and whose config.json has `changed` in it."""
    model_folder(folder)
    shapes = expected_tensors(spec_of(folder), LLAMA)
    safetensors_file(folder / "model.safetensors", **{name: np.zeros(shape) for name, shape in shapes.items()})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def test_parameters_are_counted_by_the_headers_of_the_files(tmp_path):
    folder = checkpoint(tmp_path / "m")
    file = tiny_gguf(tmp_path / "x.gguf", tiny_metadata(), {"token_embd.weight": np.ones((16, 32)), "x": np.ones(3)})
    counted = sum(math.prod(shape) for shape in expected_tensors(spec_of(folder), LLAMA).values())
    assert num_parameters(find_model(folder)) == counted
    assert num_parameters(find_model(file)) == 16 * 32 + 3
    assert num_parameters(find_model(file, "dummy")) == 0


def check(folder):
    files = find_model(folder)
    check_checkpoint(files, read_model_spec(files, FAMILIES), FAMILIES)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"head_dim": 4096}, r"'model\.layers\.0\.self_attn\.q_proj\.weight' has the shape .* asks for \[16384, 32\]"),
        ({"vocab_size": 1 << 22}, r"'model\.embed_tokens\.weight' has the shape \[128, 32\], .* \[4194304, 32\]"),
        ({"hidden_size": 64, "head_dim": 8}, r"'model\.embed_tokens\.weight' has the shape"),
        ({"intermediate_size": 1 << 20}, r"'model\.layers\.0\.mlp\.gate_proj\.weight' has the shape"),
        ({"num_key_value_heads": 4}, r"'model\.layers\.0\.self_attn\.k_proj\.weight' has the shape"),
        ({"num_hidden_layers": 1000}, r"'model\.layers\.2\.[a-z_.]*' is missing \(and 8981 more\)"),
        ({"num_hidden_layers": 1}, r"'model\.layers\.1\.[a-z_.]*' has no place in the model \(and 8 more\)"),
        ({"attention_bias": True}, r"'model\.layers\.0\.self_attn\.q_proj\.bias' is missing"),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": 8}, r"q_norm\.weight' is missing"),
    ],
)
def test_a_configuration_of_other_sizes_is_refused(tmp_path, changed, match):
    with pytest.raises(ModelLoadError, match=match) as caught:
        check(checkpoint(tmp_path / "m", **changed))
    assert caught.value.details["tensor"].startswith("model.")


def test_what_fits_is_not_refused(tmp_path):
    check(checkpoint(tmp_path / "m"))
    check(checkpoint(tmp_path / "m", tie_word_embeddings=True))  # a copy of the table is no harm


def test_a_gguf_file_of_other_sizes_is_refused(tmp_path):
    path = tiny_gguf(tmp_path / "x.gguf", tiny_metadata(), {"token_embd.weight": np.ones((16, 32))})
    spec = read_model_spec(find_model(path), FAMILIES)
    names = gguf_tensor_names(LLAMA, spec.num_layers)
    arrays = {names[name]: np.zeros(shape) for name, shape in expected_tensors(spec, LLAMA).items()}
    check(tiny_gguf(path, tiny_metadata(), arrays))
    with pytest.raises(ModelLoadError, match=r"mlp\.gate_proj\.weight' has the shape \[48, 32\], .* \[1048576, 32\]"):
        check(tiny_gguf(path, tiny_metadata(feed_forward_length=("u32", 1 << 20)), arrays))
    with pytest.raises(
        ModelLoadError, match=r"'llama\.attention\.key_length' is 1000000000, it must be from 1 to 4096"
    ):
        check(tiny_gguf(path, tiny_metadata(attention__key_length=("u32", 10**9)), arrays))
