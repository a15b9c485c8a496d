"""Whole models with the kernels bound in every layer, on whatever device the kernels run here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

sys.path.insert(0, str(Path(__file__).parent.parent / "model_executor"))  # the tiny models and their attention

from dense_attention import DenseRun
from rounding import rounding
from tiny_checkpoints import FAMILIES, MAX_LEN, hf_model, load, random_ids

from ringcore.kernels import activation, rms_norm
from ringcore.model_executor import ops
from ringcore.model_executor.layers.activation import bind_activation
from ringcore.model_executor.layers.norm import bind_add_rms_norm, bind_rms_norm
from ringcore.model_executor.layers.rotary import ComplexRotation, KernelRotation

CPU = torch.device("cpu")


@pytest.fixture
def with_kernels(monkeypatch):
    """Layers that are bound from now on take the kernels, also on a CPU, in Triton's interpreter."""
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)


def logits(folder, device, dtype):
    """[9, vocab_size]: a prompt of 6 tokens, then 3 single ones, with one sequence beside them."""
    run = DenseRun(load(folder, dtype=dtype, device=device), MAX_LEN, 2, str(dtype).removeprefix("torch."))
    ids = random_ids(8)
    steps = [{0: ids[:6]}, {0: ids[6:7], 1: ids[2:4]}, {0: ids[7:]}]
    return torch.cat([run.step(step) for step in steps]).cpu()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    def make(family, dtype=torch.float32, **options):
        folder = tmp_path_factory.mktemp(family)
        hf_model(family, num_hidden_layers=2, **options).to(dtype).save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_models_compute_the_same_with_kernels(folder_of, device, monkeypatch, family):
    """In float32, where only the order of sums differs."""
    folder = folder_of(family, head_dim=24)
    expected = logits(folder, "cpu", torch.float32)
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    torch.testing.assert_close(logits(folder, device, torch.float32), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3"])
def test_models_of_16_bits_are_no_further_off_with_kernels(folder_of, device, monkeypatch, family):
    """The kernels round once where the separate functions round twice. In float16: see `rounds_to_nearest`."""
    folder = folder_of(family, torch.float16)
    exact = logits(folder, "cpu", torch.float32).log_softmax(-1)
    without = logits(folder, "cpu", torch.float16).log_softmax(-1)
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    ours = logits(folder, device, torch.float16).log_softmax(-1)
    assert (ours - exact).abs().mean() < 1.2 * (without - exact).abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.usefixtures("with_kernels")
def test_norms(device, plus_one, dtype):
    hidden, addend = (torch.randn(3, 48, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    weight = torch.linspace(-0.4, 0.4, 48).to(dtype)
    hidden, addend, weight = hidden.to(device), addend.to(device), weight.to(device)
    gain = weight.double() + plus_one
    total = hidden + addend
    rtol = rounding(dtype, device) + 4e-6

    def assert_normed(ours):
        """Of hidden as it is now."""
        exact = hidden.double() * (hidden.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain
        torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=rtol)

    assert_normed(bind_rms_norm(weight, 1e-5, plus_one=plus_one)(hidden))
    assert_normed(bind_add_rms_norm(weight, 1e-5, plus_one=plus_one)(hidden, addend))
    torch.testing.assert_close(hidden, total, atol=0, rtol=torch.finfo(dtype).eps)


@pytest.mark.usefixtures("with_kernels")
def test_every_layer_binds_them(folder_of, device):
    model = load(folder_of("Gemma3"), device=device)
    assert isinstance(model.rotaries[0](torch.zeros(1, dtype=torch.int64, device=device)), KernelRotation)
    for layer in model.layers:
        assert layer.mlp._activate_and_multiply is activation.gelu_tanh_and_mul
        for norm in (layer.input_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm):
            assert norm._normalise.func is rms_norm.rms_norm
    assert bind_activation("silu", device) is activation.silu_and_mul


def test_on_a_cpu_no_layer_does(folder_of):
    model = load(folder_of("Qwen3"))
    assert isinstance(model.rotaries[0](torch.zeros(1, dtype=torch.int64)), ComplexRotation)
    assert model.layers[0].mlp._activate_and_multiply is ops.silu_and_mul
    assert model.layers[0].input_norm._normalise.func is ops.rms_norm_by_gain
    assert not ops.has_kernels(CPU)
    assert ops.has_kernels(torch.device("cuda", 1))
