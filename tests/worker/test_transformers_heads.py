"""Heads of models that transformers' modules compute: they draft what plain torch finds over the same states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_runner import rows_on_device
from fake_graphs import head_graphs_on_cpu
from head_rows import drafted, greedy
from safetensors.torch import load_file, save_file
from step_driver import make_config
from tiny_heads import HeadReference, head_tensors, write_head
from tiny_mtp import MTP_MODELS, NUM_LAYERS, SIZES, MtpReference, spread

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError, ModelLoadError
from ringcore.model_executor.models.transformers.folder_check import check_folder
from ringcore.model_executor.models.transformers.fusion import fused_model
from ringcore.model_executor.models.transformers.fusion.recognised import Recognised
from ringcore.protocol.folder_check import FolderCheckStart
from ringcore.worker.worker import Worker

MTP = {"method": "mtp", "num_drafts": 4}


def check_eagle(config: EngineConfig, model: Any, monkeypatch: pytest.MonkeyPatch, **of_head: Any) -> None:
    written, found = drafted(config, monkeypatch)
    reference = HeadReference(head_tensors(), model, **of_head)
    assert [drafts for _, drafts in found] == [reference.drafts(tokens, 4) for tokens, _ in found]
    assert written == greedy(model, len(written))


# ---------------------------------------------------------------------------------------------------------------------
# EAGLE-3.


def nothing_recognised(recognise: Callable[..., Recognised]) -> Callable[..., Recognised]:
    return lambda *given: Recognised(recognise(*given).layers)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("layers", [[0, 1, 3], [1, 2, 3]])
def test_eagle_heads(
    tiny_llama: tuple[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_fused: bool,
    layers: list[int],
) -> None:
    """Over our layers, whose stream goes from one to the next, and over the model's own."""
    if not is_fused:
        monkeypatch.setattr(fused_model, "recognise", nothing_recognised(fused_model.recognise))
    head = write_head(tmp_path, eagle_aux_hidden_state_layer_ids=layers)
    speculative = {"method": "eagle3", "model": head}
    config = make_config(tiny_llama[0], model_impl="transformers", speculative=speculative)
    check_eagle(config, tiny_llama[1], monkeypatch, layers=layers)


def test_layers_with_a_scale_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our layers have the stream in units of it."""
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes = {name: size for name, size in SIZES.items() if "expert" not in name}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = GraniteConfig(**sizes, num_hidden_layers=NUM_LAYERS, residual_multiplier=0.3, embedding_multiplier=2.0)
        model = GraniteForCausalLM(config).float().eval()
        spread(model)
    folder = tmp_path / "granite"
    model.save_pretrained(folder)
    head = write_head(tmp_path / "head")
    check_eagle(make_config(str(folder), speculative={"method": "eagle3", "model": head}), model, monkeypatch)


def test_a_model_with_windows_and_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's attention sees all, in a KV cache group that the model's windows are not in."""
    from transformers import GptOssConfig, GptOssForCausalLM

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    of_kinds = {"layer_types": kinds, "sliding_window": 6, "head_dim": 16, "num_local_experts": 4}
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = GptOssForCausalLM(GptOssConfig(**SIZES | of_kinds, num_hidden_layers=NUM_LAYERS)).float().eval()
        spread(model)
    folder = tmp_path / "gpt-oss"
    model.save_pretrained(folder)
    head = write_head(tmp_path / "head")
    check_eagle(make_config(str(folder), speculative={"method": "eagle3", "model": head}), model, monkeypatch)


def test_embeddings_that_are_scaled_by_their_module_are_refused(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {name: size for name, size in SIZES.items() if "expert" not in name} | {"head_dim": 16}
    folder = tmp_path / "gemma"
    Gemma2ForCausalLM(Gemma2Config(**sizes, num_hidden_layers=NUM_LAYERS)).float().save_pretrained(folder)
    head = write_head(tmp_path / "head")
    config = make_config(str(folder), speculative={"method": "eagle3", "model": head})
    check_folder(FolderCheckStart(config.model.spec, config.model.files))
    with pytest.raises(ModelLoadError, match="its embeddings are more than rows of a table"):
        check_folder(FolderCheckStart(config.model.spec, config.model.files, config.model.draft_head))
    worker = Worker(config, 0, None)
    worker.init_device()
    with pytest.raises(ModelLoadError, match="its embeddings are more than rows of a table"):
        worker.load_model()
    worker.shutdown()


# ---------------------------------------------------------------------------------------------------------------------
# Layers of multi-token prediction.


@pytest.mark.parametrize(("model_type", "by_graphs"), [*((name, False) for name in MTP_MODELS), ("glm4_moe", True)])
def test_mtp_layers(model_type: str, by_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """by_graphs: by a GPU's runner, with interpreted kernels."""
    if by_graphs:
        rows_on_device(monkeypatch, plans_on_device=True)
        head_graphs_on_cpu(monkeypatch)
    reference = MtpReference(model_type)
    folder = reference.save(tmp_path / "model")
    model = reference.cut()
    written, found = drafted(make_config(folder, speculative=MTP), monkeypatch)
    assert [drafts for _, drafts in found] == [reference.drafts(tokens, 4) for tokens, _ in found]
    assert written == greedy(model, len(written))


def test_what_cannot_be_served_is_refused(tmp_path: Path, tiny_llama: tuple[str, Any]) -> None:
    reference = MtpReference("glm4_moe")
    folder = reference.save(tmp_path / "none", num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=r"has no layers of multi-token prediction"):
        make_config(folder, speculative=MTP)
    with pytest.raises(ConfigError, match=r"of MiMoForCausalLM, deepseek_v3, glm4_moe, glm4_moe_lite, and not"):
        make_config(tiny_llama[0], model_impl="transformers", speculative=MTP)
    config = make_config(str(reference.save(tmp_path / "shapes")), speculative=MTP)
    check_folder(FolderCheckStart(config.model.spec, config.model.files, config.model.draft_head))
    tensors = load_file(tmp_path / "shapes" / "model.safetensors")
    del tensors["model.layers.3.mlp.experts.1.up_proj.weight"]
    save_file(tensors, tmp_path / "shapes" / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"'model.layers.3.mlp.experts.1.up_proj.weight' is missing"):
        check_folder(FolderCheckStart(config.model.spec, config.model.files, config.model.draft_head))
    del reference.own["eh_proj"]
    folder = reference.save(tmp_path / "cut")
    with pytest.raises(ModelLoadError, match=r"'model.layers.3.eh_proj.weight' is missing"):
        make_config(folder, speculative=MTP)
