"""A model of layers with and without a window, in a worker in this process; greedy tokens are transformers'.

The first group is the layers 0, 2 and 3, with a window of 6 tokens, the second is layer 1; blocks have 4 tokens. So
position 15 sees 10 to 15 in the first group, and the row's blocks 0 and 1 are of no more use there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from fake_virtual_memory import FakeVirtualMemory, view
from step_driver import admit, break_embedding, decode, make_config, plan, run, sampled

from ringcore.errors import CapacityError
from ringcore.kv_cache.planner import plan_kv_cache
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from ringcore.params.sampling_params import SamplingParams
from ringcore.worker.memory.device_memory import ArenaMemory, MemoryTag
from ringcore.worker.platforms.cpu import CpuPlatform
from ringcore.worker.worker import Worker

Reference = Callable[[Sequence[int], int], list[int]]

WINDOWS = [6, None, 6, 6]


class ArenaPlatform(CpuPlatform):
    """A CPU whose pages are in an arena of `device`."""

    def __init__(self, device: FakeVirtualMemory) -> None:
        super().__init__()
        self._memory = ArenaMemory(32 << 20, device, view)

    def allocate(self, num_bytes: int, tag: MemoryTag) -> torch.Tensor:
        return self._memory.allocate(num_bytes, tag).zero_()


LONG = [5, 17, 80, 3, 44, 9, 61, 2, 33, 70, 12, 90, 28, 7, 55]
OTHER = [11, 60, 23, 51, 4, 88, 19, 37, 2, 71]


def load(folder: str, windows: Sequence[int | None] = WINDOWS) -> Worker:
    """A worker whose layers have these windows, not yet its pages."""
    worker = Worker(make_config(folder), 0, None)
    worker.init_device()
    worker.load_model()
    assert worker._loaded is not None
    model: Any = worker._loaded.model
    for layer, window in zip(model.layers, windows, strict=True):
        layer.self_attention.attention = replace(layer.self_attention.attention, sliding_window=window)
    model.attention_layers = [layer.self_attention.attention for layer in model.layers]
    return worker


@pytest.fixture
def worker(tiny_mixed: tuple[str, Any]) -> Iterator[Worker]:
    worker = load(tiny_mixed[0])
    worker.initialize_from_config(plan(worker, 40))
    yield worker
    worker.shutdown()


def kv_caches(worker: Worker) -> tuple[torch.Tensor, ...]:
    assert worker._runner is not None
    return tuple(worker._runner.paged.kv_caches.values())


def test_layers_of_each_group_share_tensors(worker: Worker) -> None:
    config = plan(worker, 40)
    assert [group.layer_names for group in config.groups] == [
        ["layers.0.attention", "layers.2.attention", "layers.3.attention"],
        ["layers.1.attention"],
    ]
    places = [cache.data_ptr() for cache in kv_caches(worker)]
    assert places[0] == places[1]
    assert len(set(places)) == 3
    assert worker.memory()["kv_cache_bytes"] == sum(cache.nbytes for cache in kv_caches(worker)[1:])


def test_pages_in_an_arena(tiny_mixed: tuple[str, Any], mixed_reference: Reference) -> None:
    """As long as there is memory behind them they serve as any other; `shutdown` gives it back."""
    device = FakeVirtualMemory(128 << 20)
    worker = load(tiny_mixed[0])
    worker._platform = ArenaPlatform(device)
    worker.initialize_from_config(plan(worker, 40))
    for cache in kv_caches(worker):
        device.check_access(cache)
        assert cache.data_ptr() % 256 == 0
    first = sampled(run(worker, {0: 15}, new=[admit(0, LONG, [1, 2, 3, 4, 9, 1], [5, 6, 7, 8, 10, 11])]))
    assert [first[0], *decode(worker, [0], 8)[0]] == mixed_reference(LONG, 9)
    worker.shutdown()
    device.check_nothing_left()


def test_pages_that_do_not_fit_into_memory_are_a_capacity_error(tiny_mixed: tuple[str, Any]) -> None:
    """Where the device has less than it said."""
    worker = load(tiny_mixed[0])
    worker._platform = ArenaPlatform(FakeVirtualMemory(64 << 10))
    with pytest.raises(CapacityError):
        worker.initialize_from_config(plan(worker, 4000))
    worker.shutdown()


def test_blocks_that_a_window_left_behind_are_another_rows(worker: Worker, mixed_reference: Reference) -> None:
    written = [sampled(run(worker, {0: 15}, new=[admit(0, LONG, [1, 2, 3, 4], [5, 6, 7, 8])]))[0]]
    both: dict[int, list[int]] = {0: [], 1: []}
    # The new row has the blocks 2 and 1, which the table of row 0 still names.
    first = run(worker, {0: 1, 1: 10}, new=[admit(1, OTHER, [2, 1, 10], [11, 12, 13])])
    blocks = {16: (0, 14, 15), 20: (0, 3, 16), 24: (0, 4, 17), 28: (0, 14, 18)}  # its own old ones, later
    blocks_1 = {12: (1, 2, 19), 16: (1, 20, 21), 20: (1, 22, 23)}
    for row, token in sampled(first).items():
        both[row].append(token)
    for step in range(1, 13):
        new = [table[at] for table, at in ((blocks, 15 + step), (blocks_1, 9 + step)) if at in table]
        for row, token in sampled(run(worker, {0: 1, 1: 1}, blocks=new)).items():
            both[row].append(token)
    assert [*written, *both[0]] == mixed_reference(LONG, 14)
    assert both[1] == mixed_reference(OTHER, 13)


@pytest.mark.parametrize("chunks", [[5, 7, 3], [4, 4, 4, 3], [1] * 15, [13, 1, 1]])
def test_a_chunked_prompt(worker: Worker, mixed_reference: Reference, chunks: list[int]) -> None:
    """Block 1 of the first group comes again as its sixth, when the window has left it."""
    new = [admit(0, LONG, [1, 2, 3, 4, 9, 1], [5, 6, 7, 8, 10, 11])]
    outputs = [run(worker, {0: n}, new=new if i == 0 else []) for i, n in enumerate(chunks)]
    assert [sampled(output) for output in outputs[:-1]] == [{}] * (len(chunks) - 1)
    assert [sampled(outputs[-1])[0], *decode(worker, [0], 9)[0]] == mixed_reference(LONG, 10)


def test_a_prefix_of_which_the_window_needs_the_end(worker: Worker, mixed_reference: Reference) -> None:
    """Position 12 sees 7 to 12 in the first group: the blocks 1 and 2 of the row that computed them."""
    other = [*LONG[:12], 50, 51]
    run(worker, {0: 15}, new=[admit(0, LONG, [1, 2, 3, 4], [5, 6, 7, 8])])
    new = [admit(1, other, [0, 2, 3, 14, 15], [5, 6, 7, 16, 17], computed=12)]
    first = sampled(run(worker, {1: 2, 0: 1}, new=new))
    assert [first[1], *decode(worker, [1], 5)[1]] == mixed_reference(other, 6)


def test_a_prompt_that_is_wholly_cached_leaves_its_blocks_as_they_are(
    worker: Worker, mixed_reference: Reference
) -> None:
    """12 tokens in 3 blocks: the last one is computed again. A trace in its slot shows who reads and who writes it."""
    prompt = LONG[:12]
    run(worker, {0: 12}, new=[admit(0, prompt, [1, 2, 3, 20], [5, 6, 7, 21])])
    caches = kv_caches(worker)
    with torch.inference_mode():
        for layer, block in enumerate((3, 7, 3, 3)):
            caches[layer][:, :, block, :, 3] *= 1.00001
    before = [cache.clone() for cache in caches]
    new = [admit(1, prompt, [0, 2, 3, 8, 9], [5, 6, 7, 10, 11], computed=11, cached=12)]
    first = sampled(run(worker, {1: 1, 0: 1}, new=new))
    shared = [1, 2, 3, 5, 6, 7]
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[:, :, shared], old[:, :, shared])
    assert [first[1], *decode(worker, [1], 7)[1]] == mixed_reference(prompt, 8)


def test_the_slot_of_a_token_that_is_computed_again_is_read(worker: Worker) -> None:
    """With another token's numbers in it, the outcome is another one."""
    prompt, params = LONG[:12], SamplingParams(temperature=0, logprobs=0)
    run(worker, {0: 12}, new=[admit(0, prompt, [1, 2, 3], [5, 6, 7])])
    found = []
    for row in (1, 2):
        new = [admit(row, prompt, [0, 2, 3], [5, 6, 7], computed=11, cached=12, params=params)]
        logprobs = run(worker, {row: 1}, new=new).logprobs
        assert logprobs is not None
        assert logprobs[0] is not None
        found.append(logprobs[0].logprobs)
        with torch.inference_mode():
            for cache in kv_caches(worker):
                cache[:, :, [3, 7], :, 3] = cache[:, :, [3, 7], :, 2]
    assert found[0] != pytest.approx(found[1], abs=1e-3)


def test_logprobs_are_those_of_a_dense_computation(worker: Worker, tiny_mixed: tuple[str, Any]) -> None:
    params = SamplingParams(temperature=0, logprobs=5)
    new = [admit(0, LONG, [1, 2, 3, 4, 9, 1], [5, 6, 7, 8, 10, 11], params=params)]
    outputs = [run(worker, {0: 15}, new=new)] + [run(worker, {0: 1}) for _ in range(8)]
    tokens = list(LONG)
    for output in outputs:
        assert output.logprobs is not None
        assert output.logprobs[0] is not None
        with torch.inference_mode():
            right = tiny_mixed[1](torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        found = output.logprobs[0]
        assert found.logprobs == pytest.approx(right[found.token_ids].tolist(), abs=2e-5)
        tokens.append(sampled(output)[0])


def test_several_steps_in_one_message(worker: Worker, mixed_reference: Reference) -> None:
    new = [
        admit(0, LONG, [1, 2, 3, 4, 9, 10], [5, 6, 7, 8, 11, 12]),
        admit(1, OTHER, [13, 14, 15, 16], [17, 18, 19, 20]),
    ]
    first = sampled(run(worker, {0: 15, 1: 10}, new=new))
    output = run(worker, {1: 1, 0: 1}, num_steps=6)
    assert [first[1], *output.token_ids[:6].tolist()] == mixed_reference(OTHER, 7)
    assert [first[0], *output.token_ids[6:].tolist()] == mixed_reference(LONG, 7)


def test_what_is_not_finite_is_erased_in_every_group(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    break_embedding(monkeypatch, worker, 96)
    output = run(worker, {0: 9}, new=[admit(0, [96] * 10, [1, 2, 3], [4, 5, 6])])
    assert [error.row for error in output.row_errors] == [0]
    assert all(torch.isfinite(cache).all() for cache in kv_caches(worker))


# The plan may store a layer otherwise than it reported.


def test_blocks_have_the_plans_size(tiny_mixed: tuple[str, Any], mixed_reference: Reference) -> None:
    """Of 8 tokens, where the engine's option is 4."""
    worker = load(tiny_mixed[0])
    config = plan(worker, 20)
    groups = [
        msgspec.structs.replace(group, spec=msgspec.structs.replace(group.spec, block_size=8))
        for group in config.groups
    ]
    worker.initialize_from_config(msgspec.structs.replace(config, groups=groups, max_model_len=24))
    assert worker._runner is not None
    assert worker._runner.rows.token_ids.shape == (6, 24)
    first = sampled(run(worker, {0: 15}, new=[admit(0, LONG, [1, 2, 3], [5, 6, 7])]))
    assert [first[0], *decode(worker, [0], 8)[0]] == mixed_reference(LONG, 9)


def test_a_window_that_hides_nothing_is_planned_as_none(tiny_mixed: tuple[str, Any]) -> None:
    """The planner's own plan for windows of 6, none, 6 and 128, of which the last is no shorter than the model."""
    worker = load(tiny_mixed[0], [6, None, 6, 128])
    config = plan_kv_cache(
        [worker.get_kv_cache_spec()],
        [0],
        max_model_len=128,
        fit_max_model_len=False,
        max_tokens_in_flight=worker.config.scheduler.max_tokens_in_flight,
        num_blocks_override=150,
    )
    assert [type(group.spec) for group in config.groups] == [SlidingWindowSpec, FullAttentionSpec]
    worker.initialize_from_config(config)
    mine = drive(worker)
    worker.shutdown()
    alike = load(tiny_mixed[0], [6, None, 6, None])
    alike.initialize_from_config(plan(alike, 150))
    assert drive(alike) == mine
    alike.shutdown()


def drive(worker: Worker) -> list[int]:
    first = sampled(run(worker, {0: 15}, new=[admit(0, LONG, range(1, 9), range(11, 19))]))
    return [first[0], *decode(worker, [0], 12)[0]]


def test_a_plan_with_other_layers_is_our_bug(tiny_mixed: tuple[str, Any]) -> None:
    worker = load(tiny_mixed[0])
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float32")
    with pytest.raises(AssertionError, match="other layers than the model"):
        worker.initialize_from_config(KVCacheConfig(9, [KVCacheGroup(["layers.0.attention"], spec)], 128, 64))
