"""What keeps a pass of transformers' modules from CUDA graphs, as far as a pass on meta tells."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ringcore.checkpoint import ModelFiles
from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.transformers_spec import read_transformers_spec
from ringcore.model_executor.models.transformers.body import Body, NewTensors
from ringcore.model_executor.models.transformers.construction import on_meta
from ringcore.model_executor.models.transformers.graph_capture import kept_from_graphs

CONFIG = {
    "model_type": "olmo2",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def with_hook(change: Callable[[torch.Tensor], torch.Tensor]):
    """A model whose first MLP gets something else, made in the pass."""
    files = ModelFiles("dummy", "", None, [], "")
    model = on_meta(read_transformers_spec(Metadata(CONFIG, ""), files), torch.bfloat16)
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: (change(args[0]),))
    return Body(model)


def test_a_model_that_stays_on_its_device():
    assert kept_from_graphs(with_hook(lambda x: x * 2)) is None
    assert kept_from_graphs(with_hook(lambda x: x + torch.zeros(32, device=x.device))) is None
    assert kept_from_graphs(with_hook(lambda x: x * torch.tensor(2.0))) is None  # a number, not a tensor of the device
    assert kept_from_graphs(with_hook(lambda x: torch.maximum(x, torch.tensor(1e-5).to(x.device)))) is None
    assert kept_from_graphs(with_hook(lambda x: x * torch.tensor(1, dtype=x.dtype, device=x.device))) is None


@pytest.mark.parametrize("number", [1e-5, 3, True])
def test_a_number_is_filled_on_the_device_as_torch_would_copy_it(number):
    with NewTensors(torch.device("meta")) as new:
        host, half = torch.tensor(number), torch.tensor(number, dtype=torch.float16, device="meta")
        moved = [host.to("meta"), host.to(half), host.to(device="meta", dtype=torch.float64), host.to(torch.float64)]
    assert new.was_needed
    assert host.device.type == "cpu"  # a model may ask for its value
    assert half.dtype == torch.float16
    assert [(one.shape, one.device.type) for one in moved] == [((), "meta")] * 3 + [((), "cpu")]
    dtype = torch.tensor(number).dtype
    assert [one.dtype for one in moved] == [dtype, torch.float16, torch.float64, torch.float64]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x + torch.tensor([1.0], device=x.device), "copies constants from the host"),
        (lambda x: x + x.new_tensor([1.0]), "copies constants from the host"),
        (lambda x: x + torch.tensor([1.0]).to(x.device), "copies constants from the host"),
        (lambda x: x + torch.tensor([1.0] * 32), "makes tensors on the host"),
    ],
)
def test_a_model_that_needs_the_host(change, reason):
    assert reason in str(kept_from_graphs(with_hook(change)))
