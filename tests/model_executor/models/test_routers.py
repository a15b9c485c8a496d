"""Routers of transformers that are recognised by what they compute, and the kernel in their place."""

from __future__ import annotations

import copy

import interpreted_triton  # noqa: F401, before the kernels
import pytest
import torch
from test_mixtures import SIZES, TYPES
from torch import nn
from transformers import CONFIG_MAPPING

from ringcore.model_executor import ops
from ringcore.model_executor.models.transformers.attention_calls import record
from ringcore.model_executor.models.transformers.body import Body
from ringcore.model_executor.models.transformers.construction import build_on_meta
from ringcore.model_executor.models.transformers.mixtures import Mixtures
from ringcore.model_executor.models.transformers.routers import Routers

SOFTMAX = ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "qwen2_moe", "deepseek_v2"]
SIGMOID = {"n_routed_experts": 4, "first_k_dense_replace": 0, "routed_scaling_factor": 2.5}


def routers_of(model_type: str, dtype=torch.float32, **options):
    config = CONFIG_MAPPING[model_type](**SIZES | TYPES.get(model_type, {}) | options).to_dict()
    model = build_on_meta(config, dtype, "eager")
    return model, Routers(model, dtype, lambda: record(Body(model), 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", SOFTMAX)
def test_softmax_routers_are_recognised(model_type, dtype):
    (form,) = routers_of(model_type, dtype)[1]._forms.values()
    assert not form.is_sigmoid


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_router_of_sigmoids_with_a_correction_is(dtype):
    (form,) = routers_of("glm4_moe", dtype, **SIGMOID, n_group=1, topk_group=1)[1]._forms.values()
    assert (form.is_sigmoid, form.scale, form.normalises) == (True, 2.5, True)
    assert form.rounds_logits == (dtype == torch.float32), "which is the same in float32"


def test_routers_that_differ_in_a_number_are_tried_each():
    config = CONFIG_MAPPING["qwen3_moe"](**SIZES | TYPES["qwen3_moe"] | {"num_hidden_layers": 2}).to_dict()
    model = build_on_meta(config, torch.float32, "eager")
    first, second = (one for one in model.modules() if type(one).__name__ == "Qwen3MoeTopKRouter")
    first.norm_topk_prob, second.norm_topk_prob = True, False
    forms = Routers(model, torch.float32, lambda: record(Body(model), 64))._forms.values()
    assert [form.normalises for form in forms] == [True, False]


def test_a_router_of_another_formula_is_not():
    """Experts of a group of two that is chosen first."""
    assert len(routers_of("glm4_moe", **SIGMOID, n_group=2, topk_group=1)[1]) == 0


def test_a_mixture_that_reads_the_logits_keeps_its_router():
    config = CONFIG_MAPPING["mixtral"](**SIZES | TYPES["mixtral"]).to_dict()
    model = build_on_meta(config, torch.float32, "eager")
    router = next(one for one in model.modules() if type(one).__name__ == "MixtralTopKRouter")

    def reads() -> None:
        logits, _, _ = router(torch.empty(3, SIZES["hidden_size"], device="meta"))
        logits.softmax(-1)

    assert len(Routers(model, torch.float32, reads)) == 0


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("model_type", ["gpt_oss", "olmoe", "glm4_moe"])
def test_kernels_take_the_place_of_its_forward(monkeypatch, model_type, normalises):
    options = {} if model_type == "gpt_oss" else {"norm_topk_prob": normalises}
    options |= SIGMOID | {"n_group": 1, "topk_group": 1} if model_type == "glm4_moe" else {}
    model, routers = routers_of(model_type, **options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    router: nn.Module = next(one for one in model.modules() if "Router" in type(one).__name__)
    for name, parameter in router._parameters.items():
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
        router._parameters[name] = nn.Parameter(values.to(device), requires_grad=False)
    for name, buffer in router._buffers.items():
        router._buffers[name] = torch.linspace(0, 1, len(buffer), device=device)
    own = copy.deepcopy(router)
    routers.bind()
    for num_tokens in (3, 70, 300):
        rows = torch.randn(num_tokens, SIZES["hidden_size"], device=device)
        (logits, weights, experts), (_, own_weights, own_experts) = router(rows), own(rows)
        assert logits is None
        (experts, order), (own_experts, own_order) = experts.long().sort(-1), own_experts.sort(-1)
        assert torch.equal(experts, own_experts)
        ours, theirs = weights.gather(1, order), own_weights.gather(1, own_order)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "glm4_moe"])
def test_mixtures_of_experts_and_one_more_module_at_most(model_type):
    options = SIGMOID | {"n_group": 1, "topk_group": 1} if model_type == "glm4_moe" else {}
    model, routers = routers_of(model_type, **options)
    found = Mixtures(model, routers.paths, SIZES["hidden_size"])
    assert [shared for _, shared in found._found] == ["shared_experts" if options else None]


def test_a_mixture_that_weights_its_shared_expert_is_none():
    model, routers = routers_of("qwen2_moe")
    assert len(Mixtures(model, routers.paths, SIZES["hidden_size"])) == 0
    mixture = model.get_submodule(next(iter(routers.paths)).rpartition(".")[0])
    assert all(isinstance(one.forward.__self__, nn.Module) for one in mixture.children()), "all are where they were"


def test_a_mixture_that_changes_the_rows_of_its_experts_is_none(monkeypatch):
    model, routers = routers_of("gpt_oss")
    mixture = type(model.get_submodule(next(iter(routers.paths)).rpartition(".")[0]))
    own = mixture.forward
    monkeypatch.setattr(mixture, "forward", lambda self, x: (own(self, x)[0] * 2, None))
    assert len(Mixtures(model, routers.paths, SIZES["hidden_size"])) == 0
