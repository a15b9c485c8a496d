"""Fusion by behaviour: what is recognised is ours and computes the same; what only looks the same stays the model's."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_attention import DenseRun
from test_transformers_model import EXPERTS, Rank, config_of, loaded, logits_of, theirs
from thread_tp import on_all_ranks
from torch import nn

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.distributed.parallel import SingleRank
from ringcore.families import FAMILIES
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.dense import all_dense
from ringcore.model_executor.loader import load_weights
from ringcore.model_executor.models import build_model
from ringcore.model_executor.models.transformers.attention_calls import RECORD, AttentionCall, record
from ringcore.model_executor.models.transformers.body import Body
from ringcore.model_executor.models.transformers.checkpoint_layout import read_layouts
from ringcore.model_executor.models.transformers.construction import build_on_meta
from ringcore.model_executor.models.transformers.fusion import recognition
from ringcore.model_executor.models.transformers.fusion.coverage import fitting
from ringcore.model_executor.models.transformers.fusion.fused_body import fuse
from ringcore.model_executor.models.transformers.fusion.parts import Parts
from ringcore.model_executor.models.transformers.fusion.plan import AttentionPlan, GatedPlan, RotaryPlan
from ringcore.model_executor.models.transformers.fusion.recognised import Recognised
from ringcore.model_executor.models.transformers.fusion.recognition import recognise

IDS = [3, 90, 14, 15, 92, 65, 35, 8, 9, 7, 93, 23]
MOE = {"head_dim": 8, **EXPERTS}
SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
BIGCODE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "activation_function": "relu"}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
# By type: options, and how many of two layers are ours as a whole, of their attentions, and of their MLPs.
TYPES: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "llama": ({"attention_bias": True, "mlp_bias": True}, (2, 2, 2)),
    "qwen3": ({"head_dim": 8}, (2, 2, 2)),  # norms of each head
    "phi3": ({"partial_rotary_factor": 0.5}, (2, 2, 2)),  # packed linears, and a part of each head is rotated
    "glm": ({"head_dim": 8, "attention_bias": True}, (2, 2, 2)),  # pairs are neighbours
    "glm4": ({"head_dim": 8}, (2, 2, 2)),  # norms before and after each sublayer
    "olmo2": ({}, (2, 2, 2)),  # norms after each sublayer, and of all heads
    "granite": ({"residual_multiplier": 0.3, "embedding_multiplier": 5.0, "rms_norm_eps": 0.5}, (2, 2, 2)),
    "smollm3": ({"no_rope_layers": [1, 0]}, (2, 2, 2)),  # a layer without positions
    "gemma3_text": ({"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}, (2, 2, 2)),
    "qwen3_moe": (MOE, (2, 2, 0)),
    "gpt_oss": (SINKS, (2, 2, 0)),
    "cohere2": ({"head_dim": 8}, (2, 2, 2)),  # attention beside the MLP, both of one norm, which has no bias
    "gpt_neox": ({}, (2, 2, 2)),  # each of a norm of its own; heads of q, k and v in turn in one linear
    "phi": ({}, (2, 2, 2)),
    "starcoder2": ({}, (2, 2, 2)),  # norms with a mean, an MLP without a gate
    "olmo": ({}, (2, 2, 2)),  # norms without a weight
    "arcee": ({}, (2, 2, 2)),  # the square of a ReLU
    "gpt_bigcode": (BIGCODE, (2, 2, 2)),  # one KV head, beside those of q in one linear
    "opt": (OPT, (2, 2, 2)),  # q scaled by itself, the linears of an MLP among those of the layer
    "cohere2_moe": (MOE, (2, 2, 0)),
    "nemotron": ({"num_key_value_heads": 4}, (2, 2, 2)),  # norms of 1 + weight and a bias
    "deepseek_v3": (LATENT | {"attention_bias": True, "rope_parameters": YARN | {"mscale_all_dim": 1.0}}, (2, 2, 2)),
    "deepseek_v2": (LATENT | {"q_lora_rank": None}, (2, 2, 2)),  # angles as complex numbers, and queries of no latent
    "minicpm3": (LATENT, (2, 2, 2)),  # of pairs in halves
    "persimmon": ({}, (2, 0, 2)),  # norms of each head with a mean
    "gpt2": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        (2, 0, 0),
    ),  # no nn.Linear
}


def counts(found: Recognised) -> tuple[int, int, int]:
    return len(found.plans), len(found.attentions), len(found.mlps)


def found_in(model_type: str, change=None, num_positions: int = 64, **options: Any) -> Recognised:
    return recognise(*recorded(model_type, change, **options), num_positions)


def recorded(model_type: str, change=None, **options: Any) -> tuple[Any, list[AttentionCall]]:
    """The body, on meta, and its attention calls. change: of the body."""
    model = build_on_meta(config_of(model_type, **options).to_dict(), torch.float32, RECORD)
    if change is not None:
        change(model.base_model)
    return model.base_model, record(Body(model), 64)


@pytest.mark.parametrize("model_type", TYPES)
def test_logits_are_those_of_transformers(tmp_path, model_type):
    options, expected = TYPES[model_type]
    reference, ours = theirs(tmp_path, model_type, **options), loaded(tmp_path)
    assert counts(ours._fusion.recognised) == expected, ours.report()
    run = DenseRun(ours, 64, 2, device=torch.device("cpu"))
    whole = logits_of(reference, IDS)
    got = run.step({0: IDS[:7], 1: IDS[:3]}), run.step({1: IDS[3:], 0: IDS[7:]})
    split = torch.cat((got[0][:7], got[1][len(IDS) - 3 :])), torch.cat((got[0][7:], got[1][: len(IDS) - 3]))
    for logits in split:
        torch.testing.assert_close(logits, whole, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("model_type", "is_plain"), [("llama", True), ("granite", False), ("cohere2", False), ("bert", False)]
)
def test_logits_go_where_they_are_wanted(tmp_path, model_type, is_plain):
    """Without a copy where the head is a product alone: nothing after it, and no transform before it."""
    theirs(tmp_path, model_type, **(TYPES[model_type][0] if model_type in TYPES else {"is_decoder": True}))
    model, hidden, out = loaded(tmp_path), torch.randn(3, 32), torch.empty(3, 97)
    assert (model._plain_head is not None) == is_plain
    with torch.inference_mode():
        assert model.compute_logits(hidden, out) is out
        torch.testing.assert_close(out, model.compute_logits(hidden), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_a_native_class_computes_the_same(tmp_path, model_type):
    options = {name: value for name, value in TYPES[model_type][0].items() if name != "mlp_bias"}
    theirs(tmp_path, model_type, **options)
    runs = []
    for impl in ("native", "transformers"):
        model = build_model(read_model_spec(find_model(tmp_path), FAMILIES, impl), SingleRank(), torch.float32, 64)
        model.bind(load_weights(model.weights(), find_model(tmp_path), 0, torch.device("cpu")))
        runs.append(DenseRun(model, 64, 1, device=torch.device("cpu")).step({0: IDS}))
        assert model.report().impl == impl
    torch.testing.assert_close(*runs, atol=2e-4, rtol=2e-4)


def test_layers_that_are_tried_want_no_kernels_in_c(monkeypatch):
    """They take seconds to compile, and a GPU's worker never calls them."""

    def compiled() -> None:
        raise AssertionError("compiled for a trial")

    monkeypatch.setattr(ops, "row_kernels", compiled)
    for model_type in ("qwen3", "deepseek_v2"):
        options, expected = TYPES[model_type]
        assert counts(found_in(model_type, **options)) == expected
    with pytest.raises(AssertionError, match="for a trial"):
        ops.cpu_kernels(torch.device("cpu"))


def with_forward(path: str, make):
    """Gives the module at `path` of each layer another forward: make(its own, it)."""

    def change(body) -> None:
        for layer in body.layers:
            module = layer.get_submodule(path) if path else layer
            own = copy.copy(module)  # its forward is bound to itself
            module.__class__ = type("Changed", (type(module),), {"forward": make(type(own).forward)})

    return change


def clamped(forward):
    return lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=0.3) * self.up_proj(x))


def reading_a_weight(forward):
    return lambda self, x: self.down_proj(self.act_fn(nn.functional.linear(x, self.gate_proj.weight)) * self.up_proj(x))


def doubled(forward):
    return lambda self, x: 2 * forward(self, x)


def rotated_twice(forward):
    def changed(self, hidden_states, position_embeddings, **kwargs):
        cos, sin = position_embeddings
        return forward(self, hidden_states, position_embeddings=(2 * cos * cos - 1, 2 * sin * cos), **kwargs)

    return changed


def halved(forward):
    def changed(self, *args, **kwargs):
        out, weights = forward(self, *args, **kwargs)
        return out / 2, weights

    return changed


def without_residual(forward):
    def changed(self, hidden_states, **kwargs):
        return forward(self, hidden_states, **kwargs) - hidden_states

    return changed


def beside_its_input(forward):
    def changed(self, hidden_states, **kwargs):
        return forward(self, hidden_states, **kwargs) + 0.01 * hidden_states.abs()

    return changed


@pytest.mark.parametrize(
    ("path", "make", "expected"),
    [
        ("input_layernorm", doubled, (0, 2, 2)),
        ("mlp", clamped, (2, 2, 0)),
        ("mlp", reading_a_weight, (0, 0, 0)),
        ("self_attn", rotated_twice, (2, 0, 2)),
        ("self_attn.v_proj", doubled, (2, 0, 2)),
        ("self_attn", halved, (2, 0, 2)),
        ("", without_residual, (0, 2, 2)),
        ("", beside_its_input, (0, 2, 2)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_computes_something_else_stays_the_models_own(path, make, expected):
    unchanged = found_in("llama")
    assert counts(unchanged) == (2, 2, 2)
    changed = found_in("llama", with_forward(path, make))
    assert counts(changed) == expected
    assert changed.reasons
    assert not unchanged.reasons


def a_little_more(forward):
    def changed(self, hidden_states, **kwargs):
        return hidden_states + 1.001 * (forward(self, hidden_states, **kwargs) - hidden_states)

    return changed


def test_what_is_added_to_multiplied_embeddings_is_told_apart():
    """What a layer adds is a ten-thousandth of these, and would be rounded to three digits."""
    factors = {"embedding_multiplier": 3000.0, "residual_multiplier": 0.263}
    assert counts(found_in("granite", **factors)) == (2, 2, 2)
    assert counts(found_in("granite", with_forward("", a_little_more), **factors)) == (0, 2, 2)


def test_shared_experts_whose_gate_and_up_are_as_wide_as_the_model():
    """Beside what stands for the routed experts they look like the gate and the up of one MLP."""
    sizes = {"num_local_experts": 4, "intermediate_size": 48, "shared_intermediate_size": 16}  # 2 * 16 = 32
    kinds = {"mlp_layer_types": ["sparse"] * 2, "layer_types": ["full_attention"] * 2}
    found = found_in("minimax_m3_vl_text", head_dim=8, num_experts_per_tok=2, **sizes, **kinds)
    assert counts(found) == (2, 2, 0)
    assert found.reasons["layers.1.mlp"] == "layers.1.mlp is no MLP, with a gate or without"


def added_later(forward):
    """The MLP reads what attention has been added to."""

    def changed(self, hidden_states, **kwargs):
        attended = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        return attended + self.mlp(self.input_layernorm(attended))

    return changed


def shifted(forward):
    return lambda self, x: forward(self, x) + 0.01 * x


@pytest.mark.parametrize(
    ("model_type", "path", "make", "expected"),
    [
        ("phi", "input_layernorm", shifted, (0, 2, 2)),
        ("phi", "mlp", shifted, (2, 2, 0)),
        ("phi", "mlp.activation_fn", shifted, (2, 2, 0)),
        ("phi", "", added_later, (0, 2, 2)),
        ("phi", "", beside_its_input, (0, 2, 2)),
        ("starcoder2", "self_attn", halved, (2, 0, 2)),
        ("starcoder2", "post_attention_layernorm", shifted, (0, 2, 2)),
        ("gpt_neox", "", beside_its_input, (0, 2, 2)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_layers_with_a_mean_that_compute_something_else_stay_the_models_own(model_type, path, make, expected):
    assert counts(found_in(model_type)) == (2, 2, 2)
    changed = found_in(model_type, with_forward(path, make))
    assert counts(changed) == expected
    assert changed.reasons


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "relu2", "silu"])
def test_an_mlp_without_a_gate_has_the_activation_of_its_model(activation):
    """The two forms of GELU differ by less than a thousandth."""
    kinds = {"gelu_new": "gelu_tanh", "relu2": "relu_squared"}
    found = found_in("starcoder2", hidden_act=activation)
    assert [plan.activation for plan in found.mlps.values()] == [kinds.get(activation, activation)] * 2


def test_norms_of_heads_with_a_mean_stay_the_models_own():
    def change(body) -> None:
        for layer in body.layers:
            layer.self_attn.q_norm, layer.self_attn.k_norm = (nn.LayerNorm(8, elementwise_affine=False) for _ in "qk")

    assert counts(found_in("qwen3", change, head_dim=8)) == (2, 0, 2)


def test_an_mlp_of_several_modules_is_ours_with_its_layer_alone():
    def change(body) -> None:
        first = body.decoder.layers[0]
        first.final_layer_norm.__class__ = type("Changed", (nn.LayerNorm,), {"forward": shifted(nn.LayerNorm.forward)})

    body, calls = recorded("opt", change, **OPT)
    found = recognise(body, calls, 64)
    assert list(found.plans) == ["decoder.layers.1"]
    assert len(found.mlps) == 2
    found = fitting(found, calls, {}, torch.float32, 1)
    assert list(found.mlps) == ["decoder.layers.1.fc1"]
    centred = {path for path, norm in found.norms.items() if norm.is_centred}
    in_second = {f"decoder.layers.1.{name}" for name in ("self_attn_layer_norm", "final_layer_norm")}
    assert centred == in_second | {"decoder.final_layer_norm"}


def test_what_lies_between_the_layers_counts(monkeypatch):
    """Here another norm than the last is taken for it: each layer agrees, the body does not."""
    find = recognition._Search._final_norm
    monkeypatch.setattr(recognition._Search, "_final_norm", lambda self, last: replace(find(self, last), plus_one=True))
    found = found_in("llama")
    assert counts(found) == (0, 0, 0)
    assert "between them it computes something else" in found.reasons[""]


def test_one_layer_of_another_kind():
    def change(body) -> None:
        body.layers[1].mlp.act_fn = nn.ReLU()

    found = found_in("llama", change)
    assert (list(found.plans), list(found.mlps)) == (["layers.0", "layers.1"], ["layers.0.mlp"])


def test_a_norm_among_experts_stays_theirs():
    def change(body) -> None:
        for layer in body.layers:
            layer.mlp.inner = copy.deepcopy(layer.input_layernorm)
        with_forward("mlp", lambda forward: lambda self, x: forward(self, self.inner(x)))(body)

    found = found_in("qwen3_moe", change, **MOE)
    assert counts(found) == (2, 2, 0)
    assert len(found.norms) == len(found_in("qwen3_moe", **MOE).norms)


class Summed(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.one, self.other = linear, copy.deepcopy(linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.other(x)


def test_a_head_of_two_linears_stays_the_models_own():
    def change(body) -> None:
        for layer in body.layers:
            layer.self_attn.q_proj = Summed(layer.self_attn.q_proj)

    found = found_in("llama", change)
    assert counts(found) == (2, 0, 2)
    assert found.reasons["layers.0.self_attn"] == "a head depends on 2 linears"


def fused_llama(change):
    """Our parts, installed after a change of what was found and of the tensors' layouts."""
    model = build_on_meta(config_of("llama").to_dict(), torch.float32, RECORD)
    calls = record(Body(model), 64)
    found, layouts = change(recognise(model.base_model, calls, 64), read_layouts(model))
    in_body = {name.removeprefix("model."): layout for name, layout in layouts.items()}
    found = fitting(found, calls, in_body, torch.float32, 1)
    names = {name: layout.pieces[0].checkpoint_name for name, layout in in_body.items()}
    parts = Parts(names, dict(model.base_model.named_modules()), 32, torch.float32, SingleRank(), all_dense)
    return found, fuse(model.base_model, found, calls, lambda scale: parts, lambda index, plan: index)


def test_a_tensor_in_another_form_leaves_its_part_to_the_model():
    def change(found, layouts):
        name = "model.layers.1.self_attn.o_proj.weight"
        return found, layouts | {name: replace(layouts[name], dtype=torch.float64)}

    found, fused = fused_llama(change)
    assert counts(found) == (1, 1, 2)
    assert "layers.1.self_attn.o_proj.weight in another form" in found.reasons["layers.1.self_attn"]
    assert list(fused.attentions) == [0]


@pytest.mark.parametrize("continues", [True, False])
def test_a_stream_goes_on_where_nothing_is_between(continues):
    kept = frozenset({"layers.1"}) if continues else frozenset()
    _, fused = fused_llama(lambda found, layouts: (replace(found, continues=kept & found.continues), layouts))
    first, second = (fused.modules[f"layers.{index}"] for index in range(2))
    assert (first._is_continued, second._continues) == (continues, continues)
    assert (first._continues, second._is_continued) == (False, False)


def test_how_heads_and_pairs_lie():
    phi3, glm = (found_in(name, **TYPES[name][0]) for name in ("phi3", "glm"))
    attention, mlp = phi3.attentions["layers.0.self_attn"], phi3.mlps["layers.0.mlp"]
    assert isinstance(attention, AttentionPlan)
    assert isinstance(mlp, GatedPlan)
    assert [(rows.start, rows.length) for rows in attention.q + attention.k + attention.v] == [
        (8 * head, 8) for head in range(8)
    ]
    assert (mlp.gate.start, mlp.up.start) == (0, 48)
    assert attention.rotary == RotaryPlan(0, 4, halves=True, stride=1)
    rotary = glm.attentions["layers.0.self_attn"].rotary
    assert rotary is not None
    assert not rotary.halves
    neox = found_in("gpt_neox").attentions["layers.1.attention"]
    assert [rows.start for rows in neox.q] == [0, 24, 48, 72]
    assert [rows.start for rows in neox.v] == [16, 40, 64, 88]


@pytest.mark.parametrize(
    "model_type",
    [
        *("phi3", "olmo2", "granite", "qwen3_moe", "gpt_oss", "gpt_neox", "cohere2", "phi", "starcoder2", "opt"),
        *("nemotron", "deepseek_v3", "deepseek_v2"),
    ],
)
def test_two_ranks_compute_the_same(tmp_path, model_type):
    theirs(tmp_path, model_type, **TYPES[model_type][0])
    alone = DenseRun(loaded(tmp_path), 64, 1, device=torch.device("cpu")).step({0: IDS})

    def on_rank(tp):
        return DenseRun(loaded(tmp_path, tp), 64, 1, device=torch.device("cpu")).step({0: IDS})

    for logits in on_all_ranks(2, on_rank):
        torch.testing.assert_close(logits, alone, atol=2e-4, rtol=2e-4)


def test_latents_are_whole_on_every_rank(tmp_path):
    theirs(tmp_path, "deepseek_v3", **TYPES["deepseek_v3"][0])
    shapes = [{weight.name: weight.shape for weight in loaded(tmp_path, tp).weights()} for tp in (None, Rank(1, 2))]
    assert shapes[0]["layers.1.qkv_a_proj.weight"] == shapes[1]["layers.1.qkv_a_proj.weight"] == (24 + 16 + 8, 32)
    assert [one["layers.1.q_b_proj.weight"] for one in shapes] == [(4 * 12, 24), (2 * 12, 24)]
    assert [one["layers.1.kv_b_proj.weight"] for one in shapes] == [(4 * 16, 16), (2 * 16, 16)]


def without_the_norm_of_latents(forward):
    return lambda self, x: x * self.weight


@pytest.mark.parametrize(
    ("path", "make", "expected"),
    [
        ("self_attn", rotated_twice, (2, 0, 2)),
        ("self_attn", halved, (2, 0, 2)),
        ("self_attn.kv_b_proj", doubled, (2, 0, 2)),
        ("self_attn.kv_a_layernorm", without_the_norm_of_latents, (2, 0, 2)),
        ("self_attn.q_a_layernorm", shifted, (2, 0, 2)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_latent_attention_that_computes_something_else_stays_the_models_own(path, make, expected):
    changed = found_in("minicpm3", with_forward(path, make), **LATENT)
    assert counts(changed) == expected
    assert changed.reasons


def test_attention_that_depends_on_far_positions_stays_the_models_own():
    """Its queries are scaled beyond the first 1024 positions."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
    options = {"head_dim": 8, "max_position_embeddings": 4096, "rope_parameters": rope | {"llama_4_scaling_beta": 0.5}}
    assert len(found_in("ministral3", num_positions=1024, **options).attentions) == 2
    assert found_in("ministral3", num_positions=4096, **options).attentions == {}
