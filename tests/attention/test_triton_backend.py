"""Plans of the triton backend beyond the common suite: of graphs of mixed steps, of sequences that share a prefix, and
of prompts that cuDNN takes."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from attention_bench import HAS_GPU, Bench, layer_of, run_case, spec_of
from torch.nn.attention import SDPBackend

from ringcore.attention.backends import fused_prompts
from ringcore.attention.backends import triton as triton_backend
from ringcore.attention.backends.fused_prompts import Prompts, batches_of_equal_length
from ringcore.attention.metadata import AttentionMetadata
from ringcore.kernels.attention.head_rotation import HeadRotation

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

PADDED_TOKENS, PADDED_SEQS = 192, 11


class MixedBench(Bench):
    """Plans as a graph of mixed steps does, of tensors of a fixed size; the host knows no more than that size."""

    def plan(self, metadata: AttentionMetadata) -> object:
        decodes, n = metadata.num_decodes, metadata.num_seqs
        starts = np.full(PADDED_SEQS + 1, metadata.num_tokens, np.int32)
        starts[: decodes + 1] = decodes
        starts[decodes : n + 1] = metadata.query_start_loc_cpu[decodes:]
        seq_lens = np.zeros(PADDED_SEQS, np.int32)
        seq_lens[:n] = metadata.seq_lens_cpu
        decode_seq_lens = np.where(np.arange(PADDED_SEQS) < decodes, seq_lens, 0).astype(np.int32)
        table = np.zeros((PADDED_SEQS, metadata.block_table_cpu.shape[1]), np.int32)
        table[:n] = metadata.block_table_cpu
        arrays = (starts, seq_lens, table, decode_seq_lens)
        return self.backend.plan_mixed_on_device(
            *(torch.from_numpy(array).to(self.device) for array in arrays), PADDED_TOKENS
        )

    def forward(self, q, k, v, metadata, plan) -> torch.Tensor:
        padding = torch.full_like(q[:1], torch.nan).expand(PADDED_TOKENS - len(q), -1, -1)
        return super().forward(torch.cat((q, padding)), k, v, metadata, plan)[: len(q)]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    "case",
    [
        [(40, 1), (70, 1), (0, 1), (0, 5), (16, 11), (48, 2), (9, 1)],
        [(40, 1), (3, 1)],
        [(0, 33), (20, 20)],
        [(17, 1), *[(i, 1) for i in range(5)], (0, 50)],
    ],
    ids=["mixed", "decodes", "prompts", "many"],
)
@pytest.mark.parametrize("name", ["triton", "triton_rows"])
def test_a_mixed_step_planned_on_the_device(name: str, case: list[tuple[int, int]], window: int | None) -> None:
    is_long = (window is not None) == (len(case) < 8) or (name == "triton_rows" and (16, 11) not in case)
    if not HAS_GPU and is_long:
        pytest.skip("takes the interpreter too long")
    run_case(MixedBench(name, spec_of(16, 2, window=window), 4), case)


class DecodeBench(Bench):
    """Plans as a graph of decoding steps does."""

    def plan(self, metadata: AttentionMetadata) -> object:
        arrays = metadata.seq_lens_cpu, metadata.block_table_cpu
        return self.backend.plan_on_device(*(torch.from_numpy(array).to(self.device) for array in arrays))


@pytest.mark.parametrize(
    "kind", [MixedBench, *(pytest.param(one, marks=pytest.mark.long_form) for one in (Bench, DecodeBench))]
)
def test_decodes_that_share_a_prefix(monkeypatch: pytest.MonkeyPatch, kind: type[Bench]) -> None:
    """Eight of nine do; beside them are a chunk, and none in a step of decodes alone."""
    from ringcore.kernels.attention import prefix_tiling

    monkeypatch.setattr(prefix_tiling, "_MIN_SAVED_BYTES", 1)
    monkeypatch.setattr(prefix_tiling, "_MAX_SPANS", 2)
    planned, num_shared, own = [], 256, [1, 20, 64, 3, 2, 1, 5, 9]
    bench = Bench("triton", spec_of(16, 1, "float16"), 2)
    bench.allocate([*(num_shared + n + 1 for n in own), 70, 9], consecutive=False)
    bench.check([(0, num_shared)])
    first = bench.sequences[0]
    for sequence in bench.sequences[1:8]:
        sequence.blocks[: num_shared // 16] = first.blocks[: num_shared // 16]
        sequence.keys, sequence.values = first.keys, first.values
    bench.check([*enumerate(own), (8, 69), (9, 4)])
    decoding = kind("triton", spec_of(16, 1, "float16"), 2)
    decoding.cache, decoding.sequences = bench.cache, bench.sequences

    def plan(metadata: AttentionMetadata) -> object:
        planned.append(kind.plan(decoding, metadata))
        return planned[-1]

    decoding.plan = plan
    decoding.check([(i, 1) for i in range(9)] + ([] if kind is DecodeBench else [(9, 5)]))
    (step,) = planned
    assert step.decodes.shared.tiles[:9].tolist() == [4] * 8 + [0]


PROMPTS_AMONG_OTHERS = [(40, 1), (0, 33), (0, 33), (0, 32), (0, 5), (16, 40), (0, 70)]


def test_long_fresh_prompts_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that cuDNN's go, with attention that runs anywhere."""
    attended: list[Prompts] = []

    def attend(prompts, query, key, value, scale, out):
        attended.append(prompts)
        fused_prompts.attend_prompts(prompts, query, key, value, scale, out)

    monkeypatch.setattr(fused_prompts, "_BACKEND", SDPBackend.MATH)
    monkeypatch.setattr(fused_prompts, "_MIN_TOKENS", 32)
    monkeypatch.setattr(triton_backend, "can_fuse", lambda spec, device: True)
    monkeypatch.setattr(triton_backend, "attend_prompts", attend)
    bench = Bench("triton", spec_of(16, 2), 4)
    run_case(bench, PROMPTS_AMONG_OTHERS)
    assert attended[-3:] == [Prompts(1, 2, 33), Prompts(67, 1, 32), Prompts(144, 1, 70)]


def test_prompts_of_layers_that_are_not_plain_stay_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*args: object, **options: object) -> None:
        pytest.fail("cuDNN has no softcap and no sinks")

    for module in (fused_prompts, triton_backend):
        monkeypatch.setattr(module, "can_fuse", lambda spec, device: True)
        monkeypatch.setattr(module, "attend_prompts", attend)
    monkeypatch.setattr(fused_prompts, "_MIN_TOKENS", 32)
    bench = Bench("triton", spec_of(16, 2), 4, softcap=2.0, sinks=True)
    bench.backend.warm_up(64, 64, torch.device("cpu"))
    run_case(bench, [(0, 33), (0, 5)])


@pytest.mark.parametrize(
    ("num_tokens", "max_len", "expected"),
    [(200, 64, [Prompts(0, 3, 64)]), (48, 64, [Prompts(0, 1, 48)]), (31, 64, []), (200, 31, [])],
)
def test_what_long_fresh_prompts_need_is_set_up(monkeypatch, num_tokens, max_len, expected) -> None:
    attended: list[Prompts] = []

    def attend(prompts, query, key, value, scale, out):
        attended.append(prompts)
        assert query.shape == (prompts.tokens.stop, 4, 16)
        assert key.shape == value.shape == (prompts.batch, prompts.query_len, 2, 16)

    monkeypatch.setattr(fused_prompts, "_MIN_TOKENS", 32)
    monkeypatch.setattr(fused_prompts, "can_fuse", lambda spec, device: True)
    monkeypatch.setattr(fused_prompts, "attend_prompts", attend)
    backend = Bench("triton", spec_of(16, 2), 4).backend
    backend.warm_up(num_tokens, max_len, torch.device("cpu"))
    assert attended == expected


def test_cudnn_has_long_fresh_prompts() -> None:
    if not HAS_GPU or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    bench = Bench("triton", spec_of(16, 2, "bfloat16", head_size=128), 8)
    run_case(bench, [(700, 1), (0, 2100), (0, 2048), (0, 2048), (30, 500), (0, 3000)])


def test_no_fused_attention_where_cudnn_has_none() -> None:
    cuda, full = torch.device("cuda"), spec_of(16, 1, "bfloat16", head_size=128)
    assert not fused_prompts.can_fuse(full, torch.device("cpu"))
    for spec in (
        spec_of(16, 1, "float32", head_size=128),
        spec_of(16, 1, "bfloat16", window=64, head_size=128),
        spec_of(16, 1, "bfloat16", head_size=256),
    ):
        assert not fused_prompts.can_fuse(spec, cuda)


def test_only_whole_prompts_are_worth_it() -> None:
    query_lens, seq_lens = np.array([2048, 2047, 4000, 1]), np.array([2048, 2047, 4001, 1])
    assert fused_prompts.is_profitable(query_lens, seq_lens).tolist() == [True, False, False, False]


def test_a_step_with_a_prompt_for_cudnn_is_planned_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_host_kernels(lens: list[tuple[int, int]], num_decodes: int) -> bool:
        query_lens, seq_lens = np.array([new for _, new in lens]), np.array([sum(one) for one in lens])
        starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        slots = torch.zeros(int(starts[-1]), dtype=torch.int64)
        table = np.zeros((len(lens), 1), np.int32)
        longest = int(query_lens.max()), int(seq_lens.max())
        step = AttentionMetadata(len(slots), len(lens), *longest, starts, seq_lens, table, slots, num_decodes)
        return Bench("triton", spec_of(16, 2), 4).backend.has_host_kernels(step)

    long = [(40, 1), (0, 2048)]
    assert not has_host_kernels(long, 1), "a CPU has no cuDNN"
    monkeypatch.setattr(triton_backend, "can_fuse", lambda spec, device: True)
    assert has_host_kernels(long, 1)
    for others in ([(40, 1), (0, 2047)], [(40, 1), (1, 2048)], [(40, 1)]):
        assert not has_host_kernels(others, 1)


def test_neighbours_of_one_length_share_a_call() -> None:
    assert batches_of_equal_length(7, [5, 5, 9, 5]) == [Prompts(7, 2, 5), Prompts(17, 1, 9), Prompts(26, 1, 5)]


def test_lengths_are_rounded_up_to_few() -> None:
    padded = [Prompts(0, 1, n).padded_len for n in range(2048, 8193)]
    assert all(0 <= p - n <= n / 7 for n, p in zip(range(2048, 8193), padded, strict=True))
    assert len(set(padded)) == 17
    assert [Prompts(0, 1, n).padded_len for n in (1, 2, 3, 16, 2048, 2049, 4096)] == [1, 2, 3, 16, 2048, 2304, 4096]


@pytest.mark.parametrize(
    ("rows", "by_warps", "one_token_each", "rotates"),
    [
        (1, True, True, True),
        (64, True, True, True),
        (65, True, True, False),
        (8, False, True, False),
        (8, True, False, False),
    ],
)
def test_which_steps_rotate_within_attention(monkeypatch, rows, by_warps, one_token_each, rotates) -> None:
    bench = Bench("triton", spec_of(16, 1, "float16"), 2)
    backend, device = bench.backend, bench.device
    tiling = backend._tiling.choose(rows, 16, torch.float16)._replace(by_warps=by_warps)
    monkeypatch.setattr(backend, "_tiling_for", lambda *step: tiling)
    lens, table = (torch.ones(*shape, dtype=torch.int32, device=device) for shape in ((rows,), (rows, 1)))
    plan = backend.plan_on_device(lens, table, one_token_each=one_token_each)
    assert backend.rotates(plan) == rotates
    if rotates:
        given: dict = {}
        monkeypatch.setattr(backend, "_decode", lambda *step, **options: given.update(options, step=step))
        qkv = torch.randn(rows, (2 + 2 * 1) * 16, device=device).half()
        rotation, layer, sinks = HeadRotation(qkv.float(), None, 0.0), layer_of(2, sinks=True), torch.zeros(2)
        out = backend.forward_unrotated(qkv, rotation, qkv, plan, layer, sinks)
        query = given["step"][0]
        assert query.data_ptr() == qkv.data_ptr()
        assert query.stride() == (64, 16, 1)
        assert out.shape == query.shape == given["out"].shape == (rows, 2, 16)
        assert given["rotation"] is rotation
        assert given["sinks"] is sinks
    starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    assert not backend.rotates(backend.plan_mixed_on_device(starts, lens, table, lens, rows)), "prompts are beside them"
