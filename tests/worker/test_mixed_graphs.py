"""Graphs of mixed steps on a CPU, in two KV cache groups: a replay reads the step and padding, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_runner import PlansOnDevice, rows_on_device
from fake_graphs import capture_at_once, captured
from step_driver import admit, decode, make_config, plan, run, sampled

from ringcore.attention.metadata import AttentionMetadata
from ringcore.config.options import MAX_GRAPH_TOKENS
from ringcore.errors import ConfigError
from ringcore.worker.runner.graph_capture import mixed_sizes
from ringcore.worker.worker import Worker

Reference = Callable[[Sequence[int], int], list[int]]

WINDOWS = [6, None, 6, 6]
SIZES = (2, 4, 8)
LONG = [5, 17, 80, 3, 44, 9, 61, 2, 33, 70, 12, 90, 28, 7, 55]
OTHER = [11, 60, 23, 51, 4, 88, 19, 37, 2, 71]
SHORT = [8, 41, 6]


class PlansMixed(PlansOnDevice):
    """It reads the numbers when it plans, as `PlansOnDevice` does, and holds them to the contract."""

    def plan_mixed_on_device(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        decode_seq_lens: torch.Tensor,
        num_tokens: int,
    ) -> object:
        starts, decode_lens = query_start_loc.numpy(), decode_seq_lens.numpy()
        num_seqs, num_decodes, past = len(seq_lens), int(np.count_nonzero(decode_lens)), int(starts[-1])
        assert (starts.shape, block_table.shape[0]) == ((num_seqs + 1,), num_seqs)
        assert len(decode_lens) <= num_seqs <= num_tokens
        assert decode_lens[:num_decodes].all(), "decodes come first"
        assert (starts[: num_decodes + 1] == num_decodes).all(), "decodes are empty"
        num_others = int(np.count_nonzero(np.diff(starts)))
        n, num_padding = num_decodes + num_others, num_tokens - past
        assert (starts[n:] == past).all(), "padding is empty and comes last"
        lens = np.concatenate([decode_lens[:num_decodes], seq_lens.numpy()[num_decodes:n]])
        of_others = starts[num_decodes + 1 : n + 1]
        max_len = int(lens.max(initial=1))
        table = np.zeros((n + num_padding, -(-max_len // self.spec.block_size)), dtype=np.int32)
        table[:n] = block_table[:n, : table.shape[1]].numpy()
        query_starts = [np.arange(num_decodes + 1), of_others, np.arange(past + 1, num_tokens + 1)]
        query_start_loc_cpu = np.concatenate(query_starts).astype(np.int32)
        return self.plan(
            AttentionMetadata(
                num_tokens=num_tokens,
                num_seqs=n + num_padding,
                max_query_len=int(np.diff(query_start_loc_cpu).max()),
                max_seq_len=max_len,
                query_start_loc_cpu=query_start_loc_cpu,
                # Of padding a token sees one of the null block: what it leaves there must be finite.
                seq_lens_cpu=np.concatenate([lens, np.ones(num_padding)]).astype(np.int32),
                block_table_cpu=table,
                slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
            )
        )


@pytest.fixture
def worker(tiny_mixed: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """Mixed steps of up to 8 tokens are graphs of 2, 4 and 8; one is not there before a step misses it."""
    rows_on_device(monkeypatch, plans_on_device=True, backend=PlansMixed)
    from ringcore.worker.runner import graph_capture
    from ringcore.worker.runner.mixed_graphs import MixedGraphs

    monkeypatch.setattr(graph_capture, "capture", captured)
    monkeypatch.setattr(graph_capture, "_MIXED_SIZES", SIZES)
    capture_at_once(monkeypatch)
    worker = Worker(make_config(tiny_mixed[0]), 0, None)
    worker.init_device()
    worker.load_model()
    assert worker._loaded is not None
    model: Any = worker._loaded.model
    for layer, window in zip(model.layers, WINDOWS, strict=True):
        layer.self_attention.attention = replace(layer.self_attention.attention, sliding_window=window)
    model.attention_layers = [layer.self_attention.attention for layer in model.layers]
    worker.initialize_from_config(plan(worker, 80))
    launcher: Any = worker._runner.launcher  # type: ignore[union-attr]
    launcher._mixed = MixedGraphs(launcher._stages.paged, launcher._device_rows, 64)
    yield worker
    worker.shutdown()


def mixed_graphs(worker: Worker) -> Any:
    runner: Any = worker._runner
    return runner.launcher._mixed


def test_prompts_and_decodes_side_by_side(worker: Worker, mixed_reference: Reference) -> None:
    """Sizes go up and down, so that a step finds what a larger one left; the rows of the decodes come in any place."""
    prompts = {0: OTHER[:5], 3: SHORT, 5: LONG, 2: OTHER, 4: SHORT[::-1]}
    written: dict[int, list[int]] = {row: [] for row in prompts}

    def step(scheduled: dict[int, int], *new: int) -> None:
        admitted = [
            admit(row, prompts[row], range(1 + 6 * row, 7 + 6 * row), range(72 - 6 * row, 66 - 6 * row, -1))
            for row in new
        ]
        for row, token in sampled(run(worker, scheduled, new=admitted)).items():
            written[row].append(token)

    step({0: 5, 3: 3}, 0, 3)  # 8 tokens: nothing is padding
    step({5: 2, 0: 1, 3: 1}, 5)  # 4, the decodes last
    step({3: 1, 5: 2})
    step({0: 1, 5: 4, 3: 1})  # 6 of 8
    assert mixed_graphs(worker)._decode_seq_lens.count_nonzero() == 2, "the decodes have their own kernel"
    step({2: 1}, 2)  # 1 of 2
    step({4: 3, 2: 2, 0: 1}, 4)
    step({5: 7, 2: 7, 0: 1, 4: 1, 3: 1})  # 17: too large for a graph
    for row, tokens in decode(worker, [4, 0, 5, 3, 2], 4).items():
        written[row] += tokens
    for row, prompt in prompts.items():
        assert written[row] == mixed_reference(prompt, len(written[row])), row
    assert [len(written[row]) for row in (0, 2, 3, 4, 5)] == [9, 5, 9, 6, 5]
    assert list(mixed_graphs(worker)._graphs) == [8, 4, 2]


def test_a_step_uses_the_smallest_graph_that_holds_it(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = mixed_graphs(worker)
    assert (graphs.max_tokens, graphs.missing) == (8, [2, 4, 8])
    run(worker, {0: 4}, new=[admit(0, LONG, range(1, 6), range(6, 11))])
    assert graphs.missing == [2, 8]
    run(worker, {0: 5})
    assert graphs.missing == [2]
    replays: list[int] = []
    lens: list[int] = []
    forward = graphs.forward
    monkeypatch.setattr(graphs, "forward", lambda *args: lens.append(len(found := forward(*args))) or found)
    for size, (graph, hidden) in list(graphs._graphs.items()):
        spy = SimpleNamespace(replay=lambda size=size, graph=graph: (replays.append(size), graph.replay()))
        graphs._graphs[size] = spy, hidden
    run(worker, {0: 3})
    run(worker, {1: 8}, new=[admit(1, OTHER, range(11, 15), range(15, 19))])
    run(worker, {0: 3, 2: 10}, new=[admit(2, OTHER, range(20, 23), range(23, 26))])
    assert (replays, lens) == ([4, 8], [3, 8]), "of the step's tokens, without padding"


def test_a_step_without_its_graph_is_launched_as_it_is(
    worker: Worker, mixed_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is captured by an idle engine: the same tokens, padded alike."""
    from ringcore.worker.runner import graph_demand

    monkeypatch.setattr(graph_demand, "_MISSES", 100)
    first = sampled(run(worker, {0: 5}, new=[admit(0, OTHER[:5], range(1, 7), range(7, 13))]))
    assert mixed_graphs(worker).missing == [2, 4, 8]
    sampled(run(worker, {0: 1, 1: 2}, new=[admit(1, SHORT, range(21, 27), range(27, 33))]))
    second = sampled(run(worker, {1: 1}))
    assert mixed_graphs(worker).missing == [2, 4, 8]
    assert [first[0]] == mixed_reference(OTHER[:5], 1)
    assert [second[1]] == mixed_reference(SHORT, 1)


def test_padding_writes_into_no_block(worker: Worker) -> None:
    """It has the places in the static buffers at which the step before had tokens."""
    blocks = [*range(1, 4), *range(4, 7)]
    run(worker, {0: 8}, new=[admit(0, LONG, blocks[:3], blocks[3:])])
    assert worker._runner is not None
    before = [cache[:, :, blocks].clone() for cache in worker._runner.paged.kv_caches.values()]
    run(worker, {1: 5}, new=[admit(1, OTHER, range(11, 14), range(15, 18))])
    assert list(mixed_graphs(worker)._graphs) == [8]
    for cache, old in zip(worker._runner.paged.kv_caches.values(), before, strict=True):
        assert torch.equal(cache[:, :, blocks], old)


def test_a_capture_sees_only_padding(worker: Worker) -> None:
    """Between steps, when the static buffers hold the tokens and slots of the step before."""
    run(worker, {0: 8}, new=[admit(0, LONG, range(1, 6), range(6, 11))])
    assert worker._runner is not None
    before = [cache[:, :, 1:].clone() for cache in worker._runner.paged.kv_caches.values()]
    worker.capture_graph()
    worker.capture_graph()
    assert mixed_graphs(worker).missing == []
    for cache, old in zip(worker._runner.paged.kv_caches.values(), before, strict=True):
        assert torch.equal(cache[:, :, 1:], old)


def test_a_step_with_kernels_of_the_host_has_no_graph(
    worker: Worker, mixed_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As cuDNN's, of long prompts: it is launched as it is, though a graph of its size is there."""
    run(worker, {0: 8}, new=[admit(0, LONG, range(1, 6), range(6, 11))])
    (graph, _) = mixed_graphs(worker)._graphs[8]
    monkeypatch.setattr(graph, "replay", lambda: pytest.fail("a graph was replayed"))
    monkeypatch.setattr(PlansMixed, "has_host_kernels", lambda self, metadata: metadata.max_query_len > 6)
    step = run(worker, {1: 7}, new=[admit(1, OTHER[:7], range(11, 14), range(15, 18))])
    assert [sampled(step)[1]] == mixed_reference(OTHER[:7], 1)


def test_sizes_waste_at_most_an_eighth_above_512() -> None:
    assert mixed_sizes(512) == [16, 32, 64, 128, 192, 256, 384, 512]
    assert mixed_sizes(100) == [16, 32, 64, 100]
    sizes = mixed_sizes(MAX_GRAPH_TOKENS)
    assert (sizes[:8], sizes[-1]) == (mixed_sizes(512), MAX_GRAPH_TOKENS)
    for smaller, larger in pairwise(sizes[7:]):
        assert 8 * (larger - smaller) <= larger, (smaller, larger)
    assert mixed_sizes(900)[-2:] == [896, 900]


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 2048),
        ({"max_cudagraph_capture_size": 512}, 512),
        ({"max_cudagraph_capture_size": 64}, 64),
        ({"max_num_batched_tokens": 300}, 300),
    ],
)
def test_the_largest_mixed_graph(tiny_mixed: tuple[str, Any], options: dict[str, int], tokens: int) -> None:
    config = make_config(tiny_mixed[0], **{"max_num_batched_tokens": 4096, **options})
    assert config.max_mixed_graph_tokens == tokens


@pytest.mark.parametrize("value", [0, -1, 2049, True, "512"])
def test_a_size_that_cannot_be(tiny_mixed: tuple[str, Any], value: object) -> None:
    with pytest.raises(ConfigError, match=r"max_cudagraph_capture_size=.*: give an integer of at (least 1|most 2048)"):
        make_config(tiny_mixed[0], max_cudagraph_capture_size=value)
