"""What models ask of attention beyond a softmax of scaled scores: softcaps, sinks, chunks, values of another width.

Every backend that does not refuse a feature is compared with its definition in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attention_bench import CPU, HAS_GPU, RUNS_ON, Bench, attend, layer_of, run_case, spec_of
from test_backends import BOTH, CASES, CHUNKINGS, LONG, LONG_INTERPRETED, NAMES, SMALL, matrix, product

from ringcore.attention.backends import BACKENDS, choose_backend
from ringcore.attention.backends.fused_prompts import can_fuse
from ringcore.attention.context import ForwardContext, GroupContext
from ringcore.attention.layer import Attention
from ringcore.attention.metadata import AttentionMetadata
from ringcore.errors import ConfigError
from ringcore.kv_cache.spec import ChunkedAttentionSpec, FullAttentionSpec, KVCacheSpec

# Softcaps and sinks are right where 2^x is infinite, on which numpy, and so the interpreter, remarks.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")

# (what `spec_of` takes, what `Bench` takes)
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softcap": ({}, {"softcap": 1.5}),
    "sinks": ({}, {"sinks": True}),
    "softcap and sinks": ({}, {"softcap": 3.0, "sinks": True}),
    "sinks in a window": ({"window": 20}, {"sinks": True}),
    "softcap in a window": ({"window": 9}, {"softcap": 1.5}),
    "chunks": ({"chunk": 12}, {}),
    "chunks of whole blocks": ({"chunk": 32}, {}),
    "chunks of one token": ({"chunk": 1}, {}),
    "narrow values": ({"head_size": 48, "v_head_size": 32}, {}),
    "wide values": ({"head_size": 16, "v_head_size": 40}, {}),
    "narrow values in a window": ({"head_size": 24, "v_head_size": 16, "window": 20}, {}),
    "all of them": ({"head_size": 24, "v_head_size": 16, "chunk": 21}, {"softcap": 2.0, "sinks": True}),
}
# Each of another one's kind; tests/kernels has them too.
LATER = [
    *("softcap", "sinks", "softcap in a window", "sinks in a window"),
    *("chunks of whole blocks", "chunks of one token", "narrow values"),
]
DTYPE = dict.fromkeys(BACKENDS, "float32") | {"flash_attn": "float16"}
STEPS = list(CASES)


def bench_of(name: str, feature: str, num_kv_heads: int = 2, dtype: str | None = None) -> Bench:
    of_spec, of_layer = FEATURES[feature]
    spec = spec_of(SMALL[name], num_kv_heads, dtype or DTYPE[name], **of_spec)
    return Bench(name, spec, 3 * num_kv_heads, **of_layer)


@pytest.mark.parametrize(
    ("name", "feature", "case", "consecutive"),
    matrix(
        dict.fromkeys(BACKENDS, product(FEATURES, STEPS, BOTH)),
        [*product(FEATURES, ["first"], [False]), ("all of them", "mixed", False)],
        later=product(LATER, ["first"], [False]),
    ),
)
def test_every_feature_in_every_kind_of_step(name: str, feature: str, case: str, consecutive: bool) -> None:
    num_kv_heads = 1 if name == "triton" and not HAS_GPU else 2  # the interpreter takes its time for every head
    run_case(bench_of(name, feature, num_kv_heads), CASES[case], consecutive)


@pytest.mark.parametrize(
    ("name", "feature", "num_kv_heads"),
    matrix(dict.fromkeys(BACKENDS, product(FEATURES, [1, 3])), [("all of them", 1)]),
)
def test_features_over_chunks_and_contexts_of_several_tiles(name: str, feature: str, num_kv_heads: int) -> None:
    bench = bench_of(name, feature, num_kv_heads)
    run_case(bench, LONG_INTERPRETED if bench.is_interpreted else LONG)


@pytest.mark.parametrize(
    ("name", "feature", "dtype"),
    matrix(dict.fromkeys(BACKENDS, product(FEATURES, ["bfloat16", "float16"])), [("all of them", "float16")]),
)
def test_features_of_half_formats(name: str, feature: str, dtype: str) -> None:
    run_case(bench_of(name, feature, dtype=dtype), CASES["mixed" if HAS_GPU or name != "triton" else "decode"])


@pytest.mark.parametrize(
    ("name", "chunk", "chunks"),
    matrix(
        {
            "triton": product([4, 16, 21], CHUNKINGS),
            "flash_attn": [],
            "torch_sdpa": product([1, 4, 6, 9], CHUNKINGS),
            "cpu_attn": product([1, 9], CHUNKINGS),
        },
        [(9, [13, 1, 26])],
    ),
)
def test_chunked_attention_in_prefill_chunks_of_any_length(name: str, chunk: int, chunks: list[int]) -> None:
    """Beside it a sequence that decodes from one chunk to the next."""
    bench = Bench(name, spec_of(SMALL[name], 2, chunk=chunk), 4, seed=5)
    bench.allocate([40, 60], consecutive=False)
    bench.step([(1, 11)])
    for query_len in chunks:
        bench.check([(0, query_len), (1, 1)])


SHARING = [
    (spec_of(16, 2, head_size=24, v_head_size=16), spec_of(32, 1, head_size=24, v_head_size=16, window=9)),
    (spec_of(16, 4, head_size=24, v_head_size=16, chunk=20), spec_of(32, 2, head_size=24, v_head_size=16)),
]


@pytest.mark.parametrize(
    ("name", "one", "other"),
    matrix({"triton": SHARING, "flash_attn": [], "torch_sdpa": SHARING, "cpu_attn": SHARING}, SHARING[:1]),
)
def test_layers_with_values_of_another_width_share_memory(name: str, one: KVCacheSpec, other: KVCacheSpec) -> None:
    """The even blocks are the one's, the odd ones the other's."""
    benches = [Bench(name, one, 4, [other]), Bench(name, other, 4, [one], seed=1)]
    pool = benches[0].tensor(*benches[0].backend.kv_cache_shape(21))
    for bench, ids in zip(benches, (np.arange(2, 21, 2), np.arange(1, 21, 2)), strict=True):
        bench.cache = pool.view(bench.backend.kv_cache_shape(21))
        bench.place(bench.order.permutation(ids), [bench.num_blocks(n) for n in (40, 30)])
    for parts in ([(0, 7)], [(1, 20), (0, 1)], [(1, 1), (0, 1)], [(0, 12)]):
        for bench in benches:
            bench.check(parts)


# Controls: the suite sees a backend that is told something else than what is expected of it.


def other_cap(bench: Bench) -> None:
    bench.told = dataclasses.replace(bench.layer, softcap=2.2)


def no_cap(bench: Bench) -> None:
    bench.told = dataclasses.replace(bench.layer, softcap=None)


def other_sinks(bench: Bench) -> None:
    assert bench.sinks is not None
    bench.told_sinks = bench.sinks.flip(0)


def other_chunks(bench: Bench) -> None:
    bench.spec = spec_of(SMALL[bench.backend.name], 2, chunk=13)


CONTROLS = (("softcap", other_cap), ("softcap", no_cap), ("sinks", other_sinks), ("chunks", other_chunks))


@pytest.mark.parametrize(
    ("name", "feature", "spoil"),
    matrix(
        dict.fromkeys(BACKENDS, CONTROLS),
        CONTROLS,
    ),
)
@pytest.mark.parametrize("case", ["decode", "prompts"])
@pytest.mark.sampled
def test_a_wrong_feature_is_seen(name: str, feature: str, spoil: Callable[[Bench], None], case: str) -> None:
    bench = bench_of(name, feature)
    spoil(bench)
    with pytest.raises(AssertionError, match="largest difference"):
        run_case(bench, CASES[case])


class _SharedBench(Bench):
    """After each call that of a layer with the same keys and values, and of one with others, which must not be written
    (the same ones would leave no trace)."""

    def forward(self, q, k, v, metadata, plan):
        out, written, own = super().forward(q, k, v, metadata, plan), self.cache.clone(), self.told
        if k is not None:
            self.told = dataclasses.replace(own, shares_kv=True)
            super().forward(q, -k, v + 1, metadata, plan)
            assert torch.equal(self.cache.view(torch.uint8), written.view(torch.uint8))
            shared = super().forward(q, k, v, metadata, plan)
            torch.testing.assert_close(shared, out, rtol=0, atol=0, equal_nan=True)  # a step of the bench is all NaN
            self.told = own
        return out


@pytest.mark.parametrize(
    ("name", "window", "is_fp8"),
    matrix(
        dict.fromkeys(BACKENDS, product([None, 9], BOTH)),
        product([None, 9], BOTH),
        later=[(None, True), (9, False)],
    ),
)
def test_a_layer_that_shares_kv_reads_it_and_writes_nothing(name: str, window: int | None, is_fp8: bool) -> None:
    bench = _SharedBench(name, spec_of(SMALL[name], 1, DTYPE[name], window, is_fp8=is_fp8), 3)
    run_case(bench, CASES["mixed"])


# Layers of one group may differ in all but the number of heads.


def test_layers_of_a_group_have_each_their_own_scores() -> None:
    spec = spec_of(4, 2)
    layers = [layer_of(4), layer_of(4, softcap=1.5), layer_of(4, sinks=True)]
    backend = choose_backend("auto", spec, layers, CPU)
    for layer in layers:
        bench = Bench("torch_sdpa", spec, 4, softcap=layer.softcap, sinks=layer.has_sinks)
        bench.backend = backend
        run_case(bench, CASES["mixed"])


def test_layers_of_a_group_have_one_number_of_heads() -> None:
    with pytest.raises(ConfigError, match="layers that share a block table have 4 and 8 query heads"):
        choose_backend("auto", spec_of(4, 2), [layer_of(4), layer_of(8)], CPU)


# Refusals.


def test_what_torch_sdpa_refuses() -> None:
    """Its keys and its values are apart over all blocks."""
    one, other = spec_of(4, 2, head_size=16), spec_of(4, 2, head_size=24, v_head_size=8)
    assert one.page_size_bytes == other.page_size_bytes
    with pytest.raises(ConfigError, match="torch_sdpa: layers that share its memory have other shares of keys"):
        choose_backend("torch_sdpa", one, [layer_of(2)], CPU, sharing_specs=[other])
    assert choose_backend("torch_sdpa", one, [layer_of(2)], CPU, sharing_specs=[one]).name == "torch_sdpa"


@pytest.mark.skipif("triton" not in NAMES, reason="triton is not installed")
def test_what_triton_refuses() -> None:
    cuda = torch.device("cuda")
    for v_head_size in (8, 20, 264):
        with pytest.raises(ConfigError, match=f"from 16 to 256 numbers, not {v_head_size}"):
            choose_backend("triton", spec_of(16, 1, head_size=64, v_head_size=v_head_size), [layer_of(1)], cuda)


def test_cudnn_has_plain_full_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    cuda = torch.device("cuda")
    assert can_fuse(spec_of(16, 1, "bfloat16", head_size=128), cuda)
    assert not can_fuse(spec_of(16, 1, "bfloat16", head_size=128, v_head_size=64), cuda)
    assert not can_fuse(spec_of(16, 1, "bfloat16", head_size=128, chunk=64), cuda)


def flash_attn_3(
    q: object, k_cache: object, v_cache: object, *, softmax_scale: float, causal: bool, softcap: float = 0.0
) -> None: ...


def flash_attn_before_softcaps(q: object, k_cache: object, v_cache: object, *, softmax_scale: float) -> None: ...


@pytest.mark.parametrize(
    ("function", "spec", "options", "reason"),
    [
        (flash_attn_3, {}, {}, None),
        (flash_attn_3, {}, {"softcap": 30.0}, None),
        (flash_attn_before_softcaps, {}, {"softcap": 30.0}, "this version of flash_attn_interface has no softcap"),
        (flash_attn_3, {}, {"sinks": True}, "it has no attention sinks"),
        (flash_attn_3, {"v_head_size": 32}, {}, "as many numbers as its keys, 64, not 32"),
        (flash_attn_3, {"chunk": 32}, {}, "blocks that a sliding window or chunk has passed"),
        (flash_attn_3, {"window": 32}, {}, "blocks that a sliding window or chunk has passed"),
    ],
)
@pytest.mark.skipif("triton" not in NAMES, reason="triton is not installed")
def test_what_flash_attn_refuses(
    monkeypatch: pytest.MonkeyPatch, function: object, spec: Any, options: Any, reason: str | None
) -> None:
    from ringcore.attention.backends import flash_attn

    monkeypatch.setattr(flash_attn, "_find_module", lambda: ("flash_attn_interface", ""))
    monkeypatch.setattr(flash_attn, "_function", lambda module: function)
    described, layer = spec_of(16, 1, "float16", head_size=64, **spec), layer_of(1, **options)
    refused = BACKENDS["flash_attn"].refusal(described, [layer], torch.device("cuda"))
    assert refused is None if reason is None else refused is not None and reason in refused


def test_flash_attn_is_told_the_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    if "triton" not in NAMES:
        pytest.skip("triton is not installed")
    from ringcore.attention.backends import flash_attn

    calls = []

    def attends(query: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        calls.append(options)
        return query

    monkeypatch.setattr(flash_attn, "_find_module", lambda: ("flash_attn_interface", ""))
    monkeypatch.setattr(flash_attn, "_function", lambda module: attends)
    spec, layers = spec_of(16, 1, "float16", head_size=64), [layer_of(1, 64), layer_of(1, 64, softcap=30.0)]
    backend = flash_attn.FlashAttnBackend(spec, layers)
    step = one_prompt(2)
    q, cache = torch.zeros(2, 1, 64, dtype=torch.float16), torch.zeros(backend.kv_cache_shape(2), dtype=torch.float16)
    for layer in layers:
        backend.forward(q, None, None, cache, step, backend.plan(step), layer)
    assert ["softcap" in options for options in calls] == [False, True]
    assert (calls[1]["softcap"], calls[1]["softmax_scale"]) == (30.0, 0.125)


# The layer.


def one_prompt(num_tokens: int) -> AttentionMetadata:
    return AttentionMetadata(
        num_tokens=num_tokens,
        num_seqs=1,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        query_start_loc_cpu=np.array([0, num_tokens], np.int32),
        seq_lens_cpu=np.array([num_tokens], np.int32),
        block_table_cpu=np.array([[1]], np.int32),
        slot_mapping=torch.arange(num_tokens) + 16,
    )


def test_what_a_layer_says_of_itself() -> None:
    plain = Attention(0, 4, 2, 64, 0.125, 512)
    assert plain.spec.is_plain
    assert Attention(0, 4, 2, 64, 0.125, v_head_size=64).kv_cache_spec(16, "float32") == FullAttentionSpec(
        16, 2, 64, "float32"
    )
    layer = Attention(0, 4, 2, 192, 0.1, chunk_size=8192, v_head_size=128, softcap=30.0, has_sinks=True)
    spec = layer.kv_cache_spec(16, "bfloat16")
    assert spec == ChunkedAttentionSpec(16, 2, 192, "bfloat16", 8192, 128)
    assert spec.page_size_bytes == 16 * 2 * (192 + 128) * 2
    assert (layer.spec.softcap, layer.spec.has_sinks, layer.spec.scale) == (30.0, True, 0.1)
    with pytest.raises(AssertionError, match="a window within chunks"):
        Attention(0, 4, 2, 64, 0.125, 512, 8192)


@pytest.mark.parametrize("name", [name for name in NAMES if RUNS_ON[name] == "cpu"])
def test_a_layer_with_sinks_and_narrow_values(name: str) -> None:
    """From the layer on: nobody writes its keys and values but the backend, and what it wrote can be zeroed."""
    layer = Attention(0, 4, 2, 24, 0.2, v_head_size=16, softcap=2.0, has_sinks=True)
    spec = layer.kv_cache_spec(16, "float32")
    backend = choose_backend(name, spec, [layer.spec], CPU)
    group = GroupContext.of(one_prompt(5), backend)
    cache = torch.zeros(backend.kv_cache_shape(3))
    ctx = ForwardContext((group,), {0: 0}, {0: cache})
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, n, size, generator=random) for n, size in ((4, 24), (2, 24), (2, 16)))
    sinks = torch.randn(4, generator=random)
    assert layer.kv_write_target(ctx) is None
    out = layer(q, k, v, ctx, sinks)
    torch.testing.assert_close(out.double(), attend(q, k, v, spec, layer.spec, sinks), atol=2e-5, rtol=0)
    assert cache.count_nonzero() == 5 * 2 * (24 + 16)
    layer.zero_kv(group, cache)
    assert not cache.any()
    with pytest.raises(AssertionError):
        layer(q, k, v, ctx)
