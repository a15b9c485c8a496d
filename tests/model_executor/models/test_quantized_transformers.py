"""Quantized models that transformers computes: fused parts and single linears in their formats, on one rank and two."""

from __future__ import annotations

import pytest
import torch
import transformers
from dense_attention import DenseRun
from quantized_checkpoints import ROUNDS_INPUTS, save_quantized
from thread_tp import on_all_ranks
from tiny_checkpoints import MAX_LEN, hf_logits, random_ids

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.families import FAMILIES
from ringcore.model_executor.loader import pending_weights
from ringcore.model_executor.models import build_model
from ringcore.model_executor.models.transformers.folder_check import check_folder
from ringcore.protocol.folder_check import FolderCheckStart

IDS = random_ids(30, seed=4)


def tiny(kind):
    """With norms after its sublayers, which no native family has."""
    options = {
        "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": MAX_LEN, "tie_word_embeddings": False,
        "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if "bias" in name or "norm" in name else 0.12)
    return model


def logits(files, spec, tp):
    model = build_model(spec, tp, torch.float32, MAX_LEN)
    with pending_weights(model.weights(), files, 0, torch.device("cpu"), None, model.may_ignore) as tensors:
        model.bind(tensors)
    return DenseRun(model, MAX_LEN, 1, device=torch.device("cpu")).step({0: IDS}), model.report()


@pytest.mark.parametrize(("kind", "is_fused"), [("w4 asym", True), ("gptq order", False), ("fp8 channel", False)])
def test_logits_are_those_of_the_expanded_model(tmp_path, kind, is_fused, monkeypatch):
    if not is_fused:
        from ringcore.model_executor.models.transformers.fusion import fused_model

        monkeypatch.setattr(fused_model, "recognise", nothing_recognised(fused_model.recognise))
    expected = hf_logits(save_quantized(tmp_path, tiny("Olmo2"), kind), IDS)
    files = find_model(tmp_path)
    spec = read_model_spec(files, FAMILIES, "transformers")
    check_folder(FolderCheckStart(spec, files))
    for size in (1, 2):
        for found, report in on_all_ranks(size, lambda tp: logits(files, spec, tp)):
            torch.testing.assert_close(found, expected, atol=0.2 if kind in ROUNDS_INPUTS else 3e-4, rtol=0)
            assert torch.equal(found.argmax(-1), expected.argmax(-1)) or kind in ROUNDS_INPUTS
            assert bool(report.fused["mlps"]) == is_fused


def nothing_recognised(recognise):
    from dataclasses import replace

    def blind(*args):
        found = recognise(*args)
        return replace(found, plans={}, attentions={}, mlps={}, norms={}, final_norm=None)

    return blind
