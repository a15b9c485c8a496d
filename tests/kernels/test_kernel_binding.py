"""Whole models with the kernels bound in every layer, on whatever device the kernels run here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "model_executor"))  # the tiny models and their attention

from dense_attention import DenseAttention, DenseRun
from rounding import rounding
from tiny_checkpoints import FAMILY_NAMES, MAX_LEN, hf_model, load, random_ids

from ringcore.kernels import activation, rms_norm
from ringcore.kernels.attention.qk_norm_rope import qk_norm_rope_reference
from ringcore.kernels.linears import skinny_configs
from ringcore.kernels.linears.skinny_tiles import DotConfig
from ringcore.kernels.partials import Partials
from ringcore.model_executor import ops
from ringcore.model_executor.layers.activation import bind_activation
from ringcore.model_executor.layers.norm import RMSNorm, bind_rms_norm
from ringcore.model_executor.layers.rotary import ComplexRotation, CpuRotation, KernelRotation
from ringcore.model_executor.linear_schemes.dense import PlainProduct
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.residual import Residual

CPU = torch.device("cpu")


@pytest.fixture
def with_kernels(monkeypatch):
    """Layers that are bound from now on take the kernels, also on a CPU, in Triton's interpreter."""
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)


def few_programs(num_outputs, num_inputs, num_rows, *, is_gated=False):
    """In place of `skinny_configs.choose`: the interpreter goes from program to program, and in sums of several things
    at once from number to number."""
    return DotConfig(64, 64, 4, 2, 2)


@pytest.fixture
def in_good_time(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(skinny_configs, "choose", few_programs)


class PrewrittenAttention(DenseAttention):
    """Takes keys and values from pages of the kernels' layout, where they are written already."""

    accepts_prewritten_kv = True

    def kv_cache_shape(self, num_blocks):
        return (num_blocks, 2, self.spec.num_kv_heads, self.spec.block_size, self.spec.head_size)

    def forward(self, query, key, value, kv_cache, metadata, plan, layer, sinks=None):
        assert key is None
        assert value is None
        kv_heads, head_size = self.spec.num_kv_heads, self.spec.head_size
        rows = kv_cache.permute(1, 0, 3, 2, 4).reshape(2, -1, kv_heads, head_size)
        key, value = rows[:, metadata.slot_mapping]
        return super().forward(query, key, value, rows, metadata, plan, layer, sinks)


class RotatingAttention(PrewrittenAttention):
    """Takes the output of the QKV projection; from its plan the slots."""

    def plan(self, metadata):
        return metadata

    def rotates(self, plan):
        return True

    def forward_unrotated(self, qkv, rotation, kv_cache, plan, layer, sinks=None):
        norm = {"norm_weight": rotation.norm_weight, "eps": rotation.eps}
        heads = self.num_heads, self.spec.num_kv_heads
        written = {"kv_cache": kv_cache, "slot_mapping": plan.slot_mapping}
        qk_norm_rope_reference(qkv, None, rotation.cos_sin, *heads, **norm, **written)
        query = qkv.view(len(qkv), -1, self.spec.head_size)[:, : self.num_heads]
        return self.forward(query.contiguous(), None, None, kv_cache, plan, plan, layer, sinks)


def logits(folder, device, dtype, attention=DenseAttention):
    """[9, vocab_size]: a prompt of 6 tokens, then 3 single ones, with one sequence beside them."""
    run = DenseRun(load(folder, dtype=dtype, device=device), MAX_LEN, 2, str(dtype).removeprefix("torch."))
    run.backends = [attention(backend.spec, [run.model.attention_layers[0].spec]) for backend in run.backends]
    shape = run.backends[0].kv_cache_shape(2)
    run.kv_caches = tuple(cache.new_zeros(shape) for cache in run.kv_caches)
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


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_models_compute_the_same_with_kernels(folder_of, device, monkeypatch, family):
    """In float32, where only the order of sums differs."""
    folder = folder_of(family, head_dim=24)
    expected = logits(folder, "cpu", torch.float32)
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    for attention in (DenseAttention, PrewrittenAttention, RotatingAttention):
        ours = logits(folder, device, torch.float32, attention)
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)


def assert_no_further_off(folder, device, monkeypatch):
    """In float16 with kernels than without, both from float32. In float16: see `rounds_to_nearest`."""
    exact = logits(folder, "cpu", torch.float32).log_softmax(-1)
    without = logits(folder, "cpu", torch.float16).log_softmax(-1)
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    ours = logits(folder, device, torch.float16, PrewrittenAttention).log_softmax(-1)
    assert (ours - exact).abs().mean() < 1.2 * (without - exact).abs().mean()


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Gemma3"])
@pytest.mark.usefixtures("in_good_time")
def test_models_of_16_bits_are_no_further_off_with_kernels(folder_of, device, monkeypatch, family):
    """The kernels round once where the separate functions round twice."""
    assert_no_further_off(folder_of(family, torch.float16), device, monkeypatch)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma3"])
@pytest.mark.usefixtures("split_k")
def test_models_whose_linears_defer_split_k_partials(folder_of, device, monkeypatch, family):
    """All linears are cuBLAS's. Every reader of the stream, the last norm too, sees the deferred adds."""
    monkeypatch.setattr(skinny_configs, "choose", lambda *shape, is_gated=False: None)
    deferred = []
    defer_add = Residual.defer_add
    monkeypatch.setattr(
        Residual, "defer_add", lambda self, partials: (deferred.append(partials), defer_add(self, partials))
    )
    assert_no_further_off(folder_of(family, torch.float16), device, monkeypatch)
    assert len(deferred) == 12  # 3 steps of 2 layers, each with o_proj and down_proj
    assert all(len(partials.rows) > 1 for partials in deferred)
    assert all((partials.norm is not None) == (family == "Gemma3") for partials in deferred)  # which has post-norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.usefixtures("with_kernels")
def test_norms(device, plus_one, dtype):
    x, hidden = (torch.randn(3, 48, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    weight = torch.linspace(-0.4, 0.4, 48).to(dtype)
    x, hidden, weight = x.to(device), hidden.to(device), weight.to(device)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (weight.double() + plus_one)
    rtol = rounding(dtype, device) + 4e-6
    ours = bind_rms_norm(weight, 1e-5, plus_one=plus_one)(x)
    torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=rtol)
    norm = RMSNorm("norm", "model.norm", 48, 1e-5, dtype, plus_one=plus_one)
    norm.bind({"norm.weight": weight})
    total = hidden.double() + exact
    stream = Residual(hidden)
    norm.add_to(stream, Partials(x[None]))
    assert stream.rows is hidden
    torch.testing.assert_close(hidden.double(), total, atol=2e-5, rtol=rtol)


@pytest.mark.usefixtures("with_kernels")
def test_every_layer_binds_them(folder_of, device):
    model = load(folder_of("Gemma3"), device=device)
    assert isinstance(model.rotaries[0](torch.zeros(1, dtype=torch.int64, device=device)), KernelRotation)
    for layer in model.layers:
        assert layer.mlp.inner._gate.activate_and_multiply is activation.gelu_tanh_and_mul
        assert type(layer.mlp.inner.down_proj._product) is PlainProduct  # of float32
        for norm in (layer.input_norm, layer.self_attention.out_norm, layer.mlp_norm, layer.mlp.out_norm):
            assert norm._normalise.func is rms_norm.rms_norm
    assert bind_activation("silu", device).activate_and_multiply is activation.silu_and_mul
    half = load(folder_of("Gemma3"), device=device, dtype=torch.float16)
    attention, mlp = half.layers[0].self_attention.inner, half.layers[0].mlp.inner
    for linear in (attention.qkv_proj, mlp.down_proj, half.lm_head):
        assert isinstance(linear._product, KernelProduct)


def test_on_a_cpu_layers_have_kernels_in_c(folder_of):
    kernels = ops.cpu_kernels(CPU)
    if kernels is None:
        pytest.skip("no C compiler")
    model = load(folder_of("Qwen3"))
    assert isinstance(model.rotaries[0](torch.zeros(1, dtype=torch.int64)), CpuRotation)
    assert model.layers[0].mlp._gate.activate_and_multiply == kernels.silu_and_mul
    assert ops.cpu_kernels(torch.device("cuda", 1)) is None


def test_on_a_cpu_without_a_compiler_no_layer_has_kernels(folder_of, monkeypatch):
    monkeypatch.setattr(ops, "row_kernels", lambda: None)
    model = load(folder_of("Qwen3"))
    assert isinstance(model.rotaries[0](torch.zeros(1, dtype=torch.int64)), ComplexRotation)
    assert model.layers[0].mlp._gate.activate_and_multiply is ops.silu_and_mul
    assert model.layers[0].input_norm._normalise.func is ops.rms_norm_by_gain
    assert not ops.has_kernels(CPU)
    assert ops.has_kernels(torch.device("cuda", 1))
