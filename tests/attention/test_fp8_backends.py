"""KV in FP8: attention over keys and values as `fp8_rows` rounds them, in every kind of step, and nothing beside it."""

from __future__ import annotations

import pytest
import torch
from attention_bench import HAS_GPU, Bench, run_case, spec_of
from test_backends import CHUNKS, DECODE, DECODES_FIRST, LONG, MIXED, PROMPTS, is_here
from torch.nn.attention import SDPBackend

from ringcore.attention.backends import BACKENDS, choose_backend, fused_prompts
from ringcore.attention.backends import triton as triton_backend
from ringcore.attention.spec import AttentionSpec
from ringcore.errors import ConfigError

pytestmark = pytest.mark.sampled

CASES = {"decode": DECODE, "prompts": PROMPTS, "chunks": CHUNKS, "mixed": MIXED, "first": DECODES_FIRST, "long": LONG}
needs_triton = pytest.mark.skipif(not is_here("triton"), reason="triton is not installed")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"chunk": 20}, {"v_head_size": 24}], ids=str)
def test_on_a_cpu(case, options):
    run_case(Bench("torch_sdpa", spec_of(16, 2, is_fp8=True, **options), 6), CASES[case], case == "long")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scores", [{}, {"softcap": 2.0, "sinks": True}], ids=str)
def test_half_formats_on_a_cpu(dtype, scores):
    run_case(Bench("torch_sdpa", spec_of(4, 2, dtype, is_fp8=True), 4, **scores), MIXED)


def test_layers_that_share_memory():
    spec, other = spec_of(16, 4, is_fp8=True), spec_of(32, 2, window=20, is_fp8=True)
    assert spec.page_size_bytes == other.page_size_bytes
    for one, shares in ((spec, other), (other, spec)):
        run_case(Bench("torch_sdpa", one, 4, [shares]), MIXED)


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "options", "case"),
    [
        ("float32", {}, [(40, 1), (0, 5), (16, 11)]),
        ("float16", {"head_size": 64, "window": 20}, [(70, 1), (3, 1)]),
        *(
            pytest.param(dtype, options, case, marks=pytest.mark.skipif(not HAS_GPU, reason="needs a GPU"))
            for dtype in ("bfloat16", "float16", "float32")
            for options in ({"head_size": 128}, {"head_size": 64, "window": 30}, {"head_size": 80, "chunk": 20})
            for case in CASES.values()
        ),
    ],
    ids=str,
)
def test_by_kernels(dtype, options, case):
    run_case(Bench("triton", spec_of(16, 2, dtype, is_fp8=True, **options), 6), case)


@needs_triton
def test_long_fresh_prompts_by_cudnn_see_what_later_steps_read(monkeypatch):
    """The way that cuDNN's go, with attention that runs anywhere."""
    monkeypatch.setattr(fused_prompts, "_BACKEND", SDPBackend.MATH)
    monkeypatch.setattr(fused_prompts, "_MIN_TOKENS", 32)
    monkeypatch.setattr(triton_backend, "can_fuse", lambda spec, device: True)
    run_case(Bench("triton", spec_of(16, 2, is_fp8=True), 4), [(0, 33), (0, 33), (0, 40)])


def test_who_has_no_fp8():
    cuda, layer = torch.device("cuda"), [AttentionSpec(4, 0.25)]
    for name, spec, reason in (
        ("flash_attn", spec_of(16, 2, "bfloat16", head_size=64, is_fp8=True), "it has no FP8"),
        ("triton", spec_of(16, 2, "bfloat16", head_size=24, is_fp8=True), "a multiple of 16 numbers, not 24"),
        ("triton", spec_of(16, 2, head_size=32, v_head_size=16, is_fp8=True), "as wide as its keys, 32, not 16"),
    ):
        if is_here(name) or (HAS_GPU and name == "triton"):
            assert reason in str(BACKENDS[name].refusal(spec, layer, cuda))
    with pytest.raises(ConfigError, match="kv_cache_dtype='auto'"):
        choose_backend("torch_sdpa", spec_of(16, 2, head_size=24, is_fp8=True), layer, cuda)
