"""Models of transformers with our layers in them, and the kernels bound in these."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "model_executor"))  # the tiny models and their attention
sys.path.insert(0, str(Path(__file__).parent.parent / "model_executor" / "models"))

from dense_attention import DenseAttention, DenseRun
from test_fusion import IDS, TYPES
from test_kernel_binding import PrewrittenAttention, few_programs
from test_transformers_model import built, logits_of, theirs

from ringcore.attention.backend import LatentBackend
from ringcore.attention.backends.torch_mla import TorchMLABackend
from ringcore.attention.backends.triton_mla import TritonMLABackend
from ringcore.checkpoint import find_model
from ringcore.kernels.linears import skinny_configs
from ringcore.model_executor import ops
from ringcore.model_executor.loader import load_weights
from ringcore.model_executor.models.transformers.fusion.fused_modules import FusedMLP
from ringcore.model_executor.models.transformers.mixtures import BoundMixture
from ringcore.model_executor.residual import NormedRows, Residual


def logits(folder, device, dtype, has_kernels, monkeypatch):
    """[12, vocab_size]: a prompt of 9 tokens, then 3 single ones."""
    model = built(folder, dtype=dtype)  # without kernels: its layers are compared with transformers' on the CPU
    monkeypatch.setattr(ops, "has_kernels", lambda device: has_kernels)
    model.bind(load_weights(model.weights(), find_model(folder), 0, device))
    run = DenseRun(model, 64, 1, str(dtype).removeprefix("torch."), device)
    if isinstance(run.backends[0], LatentBackend):
        attention = TritonMLABackend if has_kernels else TorchMLABackend
    else:
        attention = PrewrittenAttention if has_kernels else DenseAttention
    run.backends = [attention(backend.spec, [model.attention_layers[0].spec]) for backend in run.backends]
    run.kv_caches = tuple(cache.new_zeros(run.backends[0].kv_cache_shape(1)) for cache in run.kv_caches)
    steps = [IDS[:9], *([token] for token in IDS[9:])]
    out = torch.cat([run.step({0: step}) for step in steps]).cpu()
    monkeypatch.undo()
    return out


@pytest.mark.parametrize(
    "model_type",
    [*("phi3", "glm", "olmo2", "granite", "smollm3", "gpt_neox"), "deepseek_v3", "deepseek_v2"],
)
def test_logits_are_those_of_transformers(tmp_path, device, monkeypatch, model_type):
    reference = theirs(tmp_path, model_type, **TYPES[model_type][0])
    ours = logits(tmp_path, device, torch.float32, True, monkeypatch)
    torch.testing.assert_close(ours, logits_of(reference, IDS), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v2"])
def test_few_tokens_of_a_mixture_are_added_to_the_stream(tmp_path, device, monkeypatch, model_type):
    """By its experts' last kernel or the next norm, and by the last kernel of the shared experts."""
    shared = {"first_k_dense_replace": 0, "n_routed_experts": 4, "num_experts_per_tok": 2, "topk_method": "greedy"}
    shared |= {"moe_intermediate_size": 16, "n_shared_experts": 1}
    options = shared if model_type == "deepseek_v2" else {}
    reference = theirs(tmp_path, model_type, **TYPES[model_type][0] | options)
    added, add_to = [], BoundMixture.add_to
    monkeypatch.setattr(BoundMixture, "add_to", lambda self, *given: (added.append(self), add_to(self, *given)))
    deferred, filled, defer_add, to_fill = [], [], Residual.defer_add, NormedRows.to_fill
    monkeypatch.setattr(
        Residual, "defer_add", lambda self, rows: (deferred.append(rows.weights), defer_add(self, rows))
    )
    monkeypatch.setattr(NormedRows, "to_fill", lambda self, dtype: (filled.append(len(self)), to_fill(self, dtype))[1])
    ours = logits(tmp_path, device, torch.float32, True, monkeypatch)
    torch.testing.assert_close(ours, logits_of(reference, IDS), atol=2e-4, rtol=2e-4)
    num_layers = len({id(one) for one in added})
    assert len(added) == 4 * num_layers > 0
    # Of the prompt of 9: the sum over experts is left to the next norm, and the router leaves the rows of its norm.
    assert [weights.shape for weights in deferred] == [(9, 2)] * num_layers
    assert filled == [9] * num_layers
    assert all(isinstance(one._shared, FusedMLP) for one in added) == (model_type == "deepseek_v2")


@pytest.mark.parametrize("model_type", ["olmo2", "granite", "glm4", "cohere2", "starcoder2"])
@pytest.mark.parametrize("fused", ["products", "split-K"])
def test_of_16_bits_they_are_no_further_off_with_kernels(tmp_path, device, monkeypatch, model_type, fused, request):
    """split-K: adds that are deferred from one layer to the next."""
    theirs(tmp_path, model_type, **TYPES[model_type][0]).half().save_pretrained(tmp_path)
    exact, without = (
        logits(tmp_path, torch.device("cpu"), dtype, False, monkeypatch).log_softmax(-1)
        for dtype in (torch.float32, torch.float16)
    )
    if fused == "products":
        monkeypatch.setattr(skinny_configs, "choose", few_programs)
    else:
        request.getfixturevalue("split_k")
        monkeypatch.setattr(skinny_configs, "choose", lambda *shape, is_gated=False: None)
    deferred, defer_add = [], Residual.defer_add
    monkeypatch.setattr(
        Residual, "defer_add", lambda self, partials: (deferred.append(partials), defer_add(self, partials))
    )
    ours = logits(tmp_path, device, torch.float16, True, monkeypatch).log_softmax(-1)
    assert (ours - exact).abs().mean() < 1.2 * (without - exact).abs().mean()
    has_post_norms = model_type in ("olmo2", "glm4")
    splits = fused == "split-K" and model_type != "starcoder2"  # which has biases
    assert len(deferred) == (4 * 4 if has_post_norms or splits else 0)
    assert all((partials.norm is not None) == has_post_norms for partials in deferred)
    assert all((len(partials.rows) > 1) == splits for partials in deferred)
