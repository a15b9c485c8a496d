"""Mixtures of experts of transformers by our experts function: what is recognised, what each rank has, and routings
that seldom occur."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_attention import DenseRun
from thread_tp import on_all_ranks

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.distributed.parallel import SingleRank, TensorParallel
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES
from ringcore.kernels.mixtures.dense_experts import DenseExperts
from ringcore.kernels.mixtures.expert_matrices import ExpertGate, ExpertMatrices, Routing, experts_reference
from ringcore.kernels.partials import Partials
from ringcore.model_executor.layers.grouped_experts import grouped_experts
from ringcore.model_executor.loader import load_weights, pending_weights
from ringcore.model_executor.models import build_model
from ringcore.model_executor.models.mixture import Mixture
from ringcore.model_executor.models.transformers.construction import build_on_meta
from ringcore.model_executor.models.transformers.expert_forms import form_of, is_experts
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight_update import WeightUpdate

pytestmark = pytest.mark.sampled

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# How a checkpoint has the experts: each matrix by itself; under other names; of a layer together; and those transposed,
# interleaved and with biases.
TYPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 16, "intermediate_size": 48},
    "mixtral": {"intermediate_size": 16},
    "granitemoe": {"intermediate_size": 16},
    "gpt_oss": {"intermediate_size": 16, "layer_types": ["sliding_attention"], "sliding_window": 8},
}
SILU = ExpertGate()
IDS = [6, 5, 4, 90, 12, 13, 60, 33, 2, 17, 54]
WAYS = {"a share of each": False, "whole experts": True}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(the folder, transformers' model) of a type, made once."""
    made: dict[str, tuple[Any, Any]] = {}

    def of(model_type: str) -> tuple[Any, Any]:
        if model_type not in made:
            folder = tmp_path_factory.mktemp(model_type)
            model = random_model(model_type)
            model.save_pretrained(folder)
            made[model_type] = folder, model
        return made[model_type]

    return of


def random_model(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(1)
    config = CONFIG_MAPPING[model_type](**SIZES | TYPES[model_type])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model


def loaded(
    folder,
    tp: TensorParallel | None = None,
    expert_parallel: bool = False,
    impl: str = "transformers",
    redundant_experts: int | None = None,
) -> Any:
    files = find_model(folder)
    spec = read_model_spec(files, FAMILIES, impl)
    split = {"expert_parallel": expert_parallel, "redundant_experts": redundant_experts}
    model = build_model(spec, tp or SingleRank(), torch.float32, 64, **split)
    with pending_weights(model.weights(), files, 0, CPU, may_ignore=model.may_ignore) as tensors:
        model.bind(tensors, updatable=True)
    return model


def step(model) -> torch.Tensor:
    return DenseRun(model, 64, 1, device=CPU).step({0: IDS})


def logits_of(hf) -> torch.Tensor:
    with torch.inference_mode():
        return hf(torch.tensor([IDS]), use_cache=False).logits[0]


@pytest.mark.parametrize("model_type", TYPES)
def test_logits_are_those_of_transformers(saved, model_type):
    folder, hf = saved(model_type)
    model = loaded(folder)
    torch.testing.assert_close(step(model), logits_of(hf), atol=1e-4, rtol=1e-4)
    assert model.report().fused["experts"] == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", TYPES)
def test_two_ranks_have_half_of_the_experts(saved, model_type, way):
    folder, hf = saved(model_type)

    def run(tp: TensorParallel) -> tuple[int, torch.Tensor]:
        model = loaded(folder, tp, WAYS[way])
        return sum(weight.nbytes for weight in model.weights() if is_of_experts(weight.name)), step(model)

    whole = sum(weight.nbytes for weight in loaded(folder).weights() if is_of_experts(weight.name))
    for nbytes, logits in on_all_ranks(2, run):
        torch.testing.assert_close(logits, logits_of(hf), atol=1e-4, rtol=1e-4)
        assert whole / 2 <= nbytes < whole * 0.53  # a bias of outputs is whole


def is_of_experts(name: str) -> bool:
    return ".experts." in name


@pytest.mark.parametrize("impl", ["transformers", "native"])
@pytest.mark.parametrize("way", WAYS)
def test_only_a_ranks_experts_are_read(saved, way, impl):
    """Of whole experts, those of the other rank are no tensor of this one's."""
    folder, _ = saved("qwen3_moe")
    names = on_all_ranks(
        2,
        lambda tp: {
            part.checkpoint_name
            for weight in loaded(folder, tp, WAYS[way], impl).weights()
            for part in weight.parts
            if ".experts." in part.checkpoint_name
        },
    )
    assert len(names[0] | names[1]) == 4 * 3
    assert bool(names[0] & names[1]) == (not WAYS[way])


@pytest.mark.parametrize("impl", ["transformers", "native"])
@pytest.mark.parametrize("way", [None, *WAYS])
@pytest.mark.parametrize("routing", ["ties", "one expert"])
def test_forced_routings(saved, tmp_path, routing, way, impl):
    """Where all experts are equal to the router, ties are broken as transformers does; so one rank of two has no expert
    of any token. And all tokens to one expert, beside another one of each."""
    _, hf = saved("qwen3_moe")
    routers = [layer.mlp.gate.weight for layer in hf.model.layers]
    kept = [router.detach().clone() for router in routers]
    with torch.no_grad():
        for router in routers:
            if routing == "ties":
                router.zero_()
            else:
                router[2:] = 0
                router[1] = 50 * router[0]  # it or its opposite is far above the others for every token
                router[2] = -router[1]
    try:
        hf.save_pretrained(tmp_path)
        expected = logits_of(hf)
    finally:
        with torch.no_grad():
            for router, before in zip(routers, kept, strict=True):
                router.copy_(before)
    if way is None:
        torch.testing.assert_close(step(loaded(tmp_path, impl=impl)), expected, atol=1e-4, rtol=1e-4)
        return
    for logits in on_all_ranks(2, lambda tp: step(loaded(tmp_path, tp, WAYS[way], impl))):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("impl", ["transformers", "native"])
@pytest.mark.parametrize("way", WAYS)
def test_new_weights_for_experts(saved, way, impl):
    """In place, by the names of a checkpoint: each rank takes its share of them."""
    folder, hf = saved("qwen3_moe")

    def run(tp: TensorParallel) -> torch.Tensor:
        spec = read_model_spec(find_model(folder), FAMILIES, impl)
        model = build_model(spec, tp, torch.float32, 64, expert_parallel=WAYS[way])
        tensors = load_weights(model.weights(), find_model(folder, "dummy"), 0, CPU, new_memory)
        model.bind(dict(tensors), updatable=True)
        update = WeightUpdate(model.weights(), tensors, model.elsewhere)
        for name, tensor in checkpoint(folder).items():
            update.take(name, tensor)
        update.check_complete()
        model.refresh()
        return step(model)

    for logits in on_all_ranks(2, run):
        torch.testing.assert_close(logits, logits_of(hf), atol=1e-4, rtol=1e-4)


def new_memory(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def checkpoint(folder) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_experts_that_do_not_divide_are_refused(saved):
    folder, _ = saved("qwen3_moe")
    with pytest.raises(ModelLoadError, match="its 4 experts do not divide over 3 ranks; give expert_parallel=False"):
        loaded(folder, Third(), expert_parallel=True)


class Third(SingleRank):
    size = 3


def experts_module(model_type: str, **options: Any) -> Any:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**SIZES | options).to_dict()
    model = build_on_meta(config, torch.float32, "eager")
    return next(module for module in model.modules() if is_experts(module))


@pytest.mark.parametrize(
    ("model_type", "options", "expected"),
    [
        ("qwen3_moe", {}, SILU),
        ("qwen3_moe", {"hidden_act": "gelu_pytorch_tanh"}, ExpertGate(is_gelu=True)),
        ("gpt_oss", {}, ExpertGate(alpha=1.702, limit=7.0, offset=1.0, is_interleaved=True)),
        ("mixtral", {"hidden_act": "relu"}, None),
    ],
)
def test_gates_are_recognised_by_what_they_compute(model_type, options, expected):
    form = form_of(experts_module(model_type, **options))
    assert form.gate == expected
    assert form.is_split


def test_a_gate_over_all_entries_is_not_split():
    """And computed by the model's own code between the products."""
    module = experts_module("mixtral")
    module._apply_gate = lambda rows: rows.chunk(2, -1)[0].softmax(-1)
    form = form_of(module)
    assert form.gate is None
    assert not form.is_split


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(32, 16), (30, 18)], ids=["grouped", "rows that torch's grouped product refuses"])
@pytest.mark.parametrize("first", [0, 2])
def test_on_a_cpu_the_product_is_that_of_the_reference(sizes, transposed, first):
    """All experts, or those of one rank, which may be none of a token's."""
    hidden, size = sizes
    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(3, 2 * size, hidden, generator=generator), torch.randn(3, hidden, size, generator=generator)
    up, down = up / hidden**0.5, down / size**0.5
    biases = torch.randn(3, 2 * size, generator=generator), torch.randn(3, hidden, generator=generator)
    if transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    matrices = ExpertMatrices(DenseExperts(up, transposed), DenseExperts(down, transposed), *biases, first=first)
    x = torch.randn(7, hidden, generator=generator)
    for chosen in (torch.rand(7, 5, generator=generator).topk(2).indices, torch.zeros(7, 2, dtype=torch.long)):
        routing = Routing(chosen, torch.rand(7, 2, generator=generator))
        expected = experts_reference(x, routing, matrices, SILU)
        torch.testing.assert_close(grouped_experts(x, routing, matrices, SILU), expected, atol=1e-5, rtol=1e-5)


def test_a_deferred_add_is_left_to_the_norm():
    """Reading the stream first would be a launch of its own in each layer."""
    stream, seen = Residual(torch.zeros(2, 4)), []
    stream.defer_add(Partials(torch.ones(1, 2, 4)))

    def norm(x, partials=None):
        seen.append(partials is not None)
        return x.add_(partials.total())

    experts = SimpleNamespace(add_to=lambda stream, x, routing: stream.rows.add_(routing))
    norm.gain = None
    Mixture(lambda x: 2 * x.rows, experts).add_to(stream, norm, stream, None)
    assert seen == [True]
    assert torch.equal(stream.rows, torch.full((2, 4), 3.0))
