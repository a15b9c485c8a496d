"""Layers that compute the same are computed once in a recorded pass, and what is not quite the same is computed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_transformers_model import EXPERTS, config_of
from torch import nn

from ringcore.model_executor.models.transformers.alike_layers import Journal, RepeatedLayers
from ringcore.model_executor.models.transformers.attention_calls import RECORD, record, record_masked
from ringcore.model_executor.models.transformers.body import Body
from ringcore.model_executor.models.transformers.construction import build_on_meta
from ringcore.model_executor.models.transformers.fusion.recognition import recognise

NUM_LAYERS = 4
# By type: options, and how many of four layers are computed.
TYPES: dict[str, tuple[dict[str, Any], int]] = {
    "gemma3_text": ({"head_dim": 8, "sliding_window_pattern": 3}, 2),
    "qwen3_moe": ({"head_dim": 8, **EXPERTS}, 1),
}


class _Inner(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.factor = layer_idx, 2.0


class _Layer(nn.Module):
    def __init__(self, layer_idx: int, noted: list[tuple[nn.Module, int]]) -> None:
        super().__init__()
        self.inner, self.noted, self.reads_index = _Inner(layer_idx), noted, False

    def forward(self, x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, None, torch.Tensor]:
        (inner,) = self.children()
        self.noted.append((inner, inner.layer_idx if self.reads_index else x.shape[0]))
        return x * inner.factor, None, others[0]


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[nn.Module, int]] = []
        self.layers = nn.ModuleList(_Layer(index, self.noted) for index in range(NUM_LAYERS))

    def passed(self, *others: Any, has_size_alone: bool = True) -> dict[str, str]:
        """-> the layers that were not computed. others: arguments, a function for what differs by layer."""
        journal = Journal(self.noted, lambda one, modules: (modules[one[0]], one[1]))
        repeated = RepeatedLayers(self, [journal], lambda one: has_size_alone)
        x = torch.empty(5, 3, device="meta")
        with repeated.instead():
            for layer in self.layers:
                given = [one() if callable(one) else one for one in others]
                x, nothing, last = layer(x, *given)
                assert x.shape == (5, 3)
                assert nothing is None
                assert last is given[0]
        assert all("forward" not in vars(layer) for layer in self.layers)
        assert {type(inner) for layer in self.layers for inner in layer.children()} == {_Inner}
        return repeated.found


def test_alike_layers_are_computed_once_and_each_is_noted() -> None:
    layers = _Layers()
    assert layers.passed(torch.empty(2), 7) == {f"layers.{index}": "layers.0" for index in (1, 2, 3)}
    assert layers.noted == [(layer.inner, 5) for layer in layers.layers]


def test_a_layer_that_reads_its_place_is_computed() -> None:
    layers = _Layers()
    for layer in layers.layers:
        layer.reads_index = True
    assert layers.passed(torch.empty(2)) == {}
    assert layers.noted == [(layer.inner, index) for index, layer in enumerate(layers.layers)]


def test_a_layer_with_another_attribute_is_computed() -> None:
    layers = _Layers()
    layers.layers[2].inner.factor = 3.0
    assert layers.passed(torch.empty(2)) == {"layers.1": "layers.0", "layers.3": "layers.0"}


def test_layers_with_other_modules_are_of_another_kind() -> None:
    layers = _Layers()
    for layer in layers.layers[:2]:
        layer.other = layer.inner
        del layer.inner
    assert layers.passed(torch.empty(2)) == {"layers.1": "layers.0", "layers.3": "layers.2"}


@pytest.mark.parametrize("other", [lambda: torch.empty(2, device="meta"), object])
def test_layers_that_are_given_something_else_are_computed(other: Any) -> None:
    assert _Layers().passed(torch.empty(2), other) == {}


def test_layers_are_computed_where_more_than_the_size_of_their_input_is_known() -> None:
    assert _Layers().passed(torch.empty(2), has_size_alone=False) == {}


@pytest.mark.parametrize("model_type", TYPES)
def test_a_pass_that_repeats_layers_says_what_one_that_computes_them_says(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, num_computed = TYPES[model_type]
    config = config_of(model_type, num_hidden_layers=NUM_LAYERS, **options).to_dict()
    with torch.no_grad():
        body = Body(build_on_meta(config, torch.float32, RECORD))
        calls, masked = record(body, 64), record_masked(body, 64)
        found = recognise(body.module, masked, 64, alike=body.alike)
        assert len(body.alike) == NUM_LAYERS - num_computed
        monkeypatch.setattr(RepeatedLayers, "instead", lambda self: nullcontext())
        assert (record(body, 64), record_masked(body, 64)) == (calls, masked)
        assert body.alike == {}
        each = recognise(body.module, masked, 64)
    assert found.plans
    names = ("layers", "plans", "attentions", "mlps", "norms", "final_norm", "reasons", "num_results", "linears")
    for name in names:
        assert vars_of(found)[name] == vars_of(each)[name]


def vars_of(recognised: Any) -> dict[str, Any]:
    return {name: getattr(recognised, name) for name in type(recognised).__slots__}
