"""Models that see images, served as text: the same logits, of the tensors of their text model alone."""

from __future__ import annotations

import io
import json
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from dense_attention import DenseRun
from safetensors.torch import load_file, save_file
from thread_tp import on_all_ranks

from ringcore.checkpoint import TransformersSpec, find_model, read_model_spec
from ringcore.distributed.parallel import SingleRank, TensorParallel
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES
from ringcore.model_executor.loader import pending_weights
from ringcore.model_executor.models import build_model
from ringcore.model_executor.models.transformers import text_defaults
from ringcore.model_executor.models.transformers.folder_check import check_folder
from ringcore.protocol.folder_check import FolderCheckStart

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 14, 3, 77, 21, 8], [40], [6, 5, 4, 90, 12, 13, 60, 33, 2, 17, 54]]
TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
QWEN = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
PER_LAYER = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 97}
SHARED = {  # the last layer has the keys and values of the one before
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
# By type: the text model's configuration, the vision model's, and that of the whole.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (TEXT | WINDOWS, VISION, {}),
    "gemma4": (  # the whole puts padding where images are; embeddings of each layer
        TEXT | WINDOWS | SHARED | {"global_head_dim": 8, "num_global_key_value_heads": 2} | PER_LAYER,
        VISION | {"head_dim": 8, "position_embedding_size": 16},
        {"image_token_id": 96, "video_token_id": 96, "audio_token_id": 96},
    ),
    "llava": (TEXT | {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}, {"image_token_index": 96}),
    "mistral3": (
        TEXT | {"model_type": "mistral"},
        VISION | {"model_type": "pixtral", "head_dim": 8},
        {"image_token_index": 96, "spatial_merge_size": 1},
    ),
    "qwen2_5_vl": (TEXT | SECTIONS, QWEN | {"fullatt_block_indexes": [0]}, {"image_token_id": 96}),
    "qwen3_vl": (TEXT | SECTIONS, QWEN | {"deepstack_visual_indexes": [0]}, {"image_token_id": 96}),
    "llama4": (
        TEXT | {"attention_chunk_size": 4, "num_local_experts": 2, "moe_layers": [1], "intermediate_size_mlp": 48},
        VISION | {"projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16},
        {"image_token_index": 96},
    ),
    "mllama": (  # layers that attend to images alone, which text does not reach
        TEXT | {"num_hidden_layers": 4, "cross_attention_layers": [1, 2]},
        VISION
        | {"attention_heads": 2, "num_global_layers": 1, "vision_output_dim": 32, "max_num_tiles": 1}
        | {"supported_aspect_ratios": [[1, 1]], "intermediate_layers_indices": [0]},
        {"image_token_index": 96},
    ),
}


def saved(model_type: str, folder):
    """A random model of transformers, saved in the folder."""
    from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM

    torch.manual_seed(1)
    text, vision, whole = MODELS[model_type]
    config = CONFIG_MAPPING[model_type](text_config=text, vision_config=vision, **whole)
    model = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    return model


def logits_of(model, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def loaded(folder, tp: TensorParallel | None = None):
    files = find_model(folder)
    model = build_model(read_model_spec(files, FAMILIES), tp or SingleRank(), torch.float32, 64)
    with pending_weights(model.weights(), files, 0, CPU, may_ignore=model.may_ignore) as tensors:
        model.bind(tensors)
    return model


@pytest.mark.parametrize("model_type", MODELS)
def test_logits_are_those_of_the_whole_model_on_text(tmp_path, model_type):
    reference = torch.cat([logits_of(saved(model_type, tmp_path), ids) for ids in PROMPTS])
    model = loaded(tmp_path)
    together = DenseRun(model, 64, 3, device=CPU).step(dict(enumerate(PROMPTS)))
    torch.testing.assert_close(together, reference, atol=1e-4, rtol=1e-4)
    assert not [weight.name for weight in model.weights() if "vision" in weight.name or "visual" in weight.name]


def test_layers_that_text_does_not_reach_are_left_out(tmp_path):
    saved("mllama", tmp_path)
    model = loaded(tmp_path)
    assert len(model.attention_layers) == 2
    assert not [weight.name for weight in model.weights() if "cross_attn" in weight.name]
    assert model.report().num_layers == 2


def test_fields_that_are_left_out_are_transformers_defaults(monkeypatch, capsys):
    given = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(given)))
    text_defaults.main()
    text = json.loads(capsys.readouterr().out)
    assert [text[name] for name in ("num_hidden_layers", "vocab_size", "hidden_size")] == [2, 262_208, 2304]


def test_a_text_model_with_other_attention_as_a_part_is_refused(tmp_path, monkeypatch):
    """Here the whole lets every layer see all that was before."""
    from transformers.masking_utils import create_causal_mask
    from transformers.models.llama4.modeling_llama4 import Llama4ForConditionalGeneration

    def forward(self, input_ids, attention_mask, position_ids, use_cache, ringcore):
        embeds = self.get_input_embeddings()(input_ids)
        mask = create_causal_mask(self.config.text_config, embeds, attention_mask, None, position_ids)
        masks = {"full_attention": mask, "chunked_attention": mask}
        inputs = {"attention_mask": masks, "position_ids": position_ids, "use_cache": False, "ringcore": ringcore}
        return self.language_model(inputs_embeds=embeds, **inputs)

    saved("llama4", tmp_path)
    monkeypatch.setattr(Llama4ForConditionalGeneration, "forward", forward)
    with pytest.raises(ModelLoadError, match="its text model computes something else by itself than as a part of it"):
        loaded(tmp_path)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma3")
    saved("gemma3", folder)
    return folder, load_file(folder / "model.safetensors")


NORM = "language_model.model.norm.weight"


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"vision_tower.post_layernorm.weight": None}, None),
        ({"vision_tower.vision_model.extra": torch.ones(3)}, None),  # of another release of the vision model
        ({NORM: None}, f"tensor '{NORM}' is missing"),
        ({NORM: torch.ones(7)}, rf"model.safetensors: tensor '{NORM}' has the shape \[7\], .* \[32\]"),
        ({"language_model.model.extra": torch.ones(3)}, "tensor 'language_model.model.extra' has no place"),
    ],
)
def test_a_folder_must_have_the_tensors_of_the_text_model_alone(tmp_path, gemma3, changed, match):
    folder, tensors = gemma3
    assert all(tensor is not None or name in tensors for name, tensor in changed.items())
    left = {name: tensor for name, tensor in (tensors | changed).items() if tensor is not None}
    save_file(left, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    files = find_model(tmp_path)
    spec = read_model_spec(files, FAMILIES)
    assert isinstance(spec, TransformersSpec)
    with nullcontext() if match is None else pytest.raises(ModelLoadError, match=match):
        check_folder(FolderCheckStart(spec, files))


def test_the_names_in_the_model_are_read_as_well(tmp_path):
    """As newer releases save them."""
    reference = saved("llava", tmp_path)
    tensors = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    assert "model.language_model.norm.weight" in tensors
    assert NORM in load_file(tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    logits = DenseRun(loaded(tmp_path), 64, 1, device=CPU).step({0: PROMPTS[0]})
    torch.testing.assert_close(logits, logits_of(reference, PROMPTS[0]), atol=1e-4, rtol=1e-4)


def test_two_ranks_share_a_text_model(tmp_path):
    reference = saved("gemma3", tmp_path)

    def run(tp: TensorParallel) -> tuple[set[int], torch.Tensor]:
        model = loaded(tmp_path, tp)
        heads = {layer.num_heads for layer in model.attention_layers}
        return heads, DenseRun(model, 64, 1, device=CPU).step({0: PROMPTS[2]})

    for heads, logits in on_all_ranks(2, run):
        assert heads == {2}
        torch.testing.assert_close(logits, logits_of(reference, PROMPTS[2]), atol=1e-4, rtol=1e-4)
