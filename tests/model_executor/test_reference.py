"""The reference of `ringcore verify`: transformers' model, step by step."""

from __future__ import annotations

import pytest
import torch
from tiny_checkpoints import hf_logits, hf_model, random_ids

from ringcore.model_executor.reference import generated


def test_it_is_what_the_model_computes_without_a_cache(tmp_path):
    model = hf_model("Qwen3")
    model.save_pretrained(tmp_path)
    prompts = [random_ids(9), random_ids(30, seed=1)]
    for prompt, got in zip(prompts, generated(str(tmp_path), "float32", prompts, 5), strict=True):
        logits = hf_logits(model, prompt + got["token_ids"])[len(prompt) - 1 : -1].float()
        assert got["token_ids"] == logits.argmax(-1).tolist()
        best = logits.topk(2).values
        assert got["logprobs"] == pytest.approx(logits.log_softmax(-1).amax(-1).tolist(), abs=1e-4)
        assert got["gaps"] == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-4)
    assert torch.is_inference_mode_enabled() is False
