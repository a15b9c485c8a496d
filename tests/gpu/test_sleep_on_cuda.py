"""SmolLM2-135M on a GPU sleeps, wakes and gets new weights: its graphs go on, and its memory is free meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from device_sleep import Batch, broadcast, save_model, update, used_bytes
from engine import generate, make_core, tokens
from new_weights import OtherWeights
from sleeping import AWAKE, PROMPTS, check_no_growth, check_tokens, expected, greedy, holdings, is_empty, token_ids
from sleeping import OPTIONS as SMALL

from ringcore import LLM
from ringcore.errors import CapacityError, SleepingError
from ringcore.worker.memory.cuda_memory import CudaVirtualMemory
from ringcore.worker.memory.nvml import process_bytes

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]

MIB, GIB = 1 << 20, 1 << 30
OPTIONS = SMALL | {"device": "cuda", "kv_cache_bytes": 8 * GIB}
TOKENS = 24  # of each prompt: all that the reference has
MAX_RESIDUE = 3 * GIB // 2
NOISE = 64 * MIB


@pytest.fixture(scope="module", autouse=True)
def _needs_arenas():
    refusal = CudaVirtualMemory.refusal(0)
    if refusal is not None:
        pytest.skip(refusal)
    torch.zeros(1, device="cuda")


@pytest.fixture(scope="module")
def idle_bytes():
    """In use on the card before the engine is there."""
    torch.cuda.empty_cache()
    return used_bytes()


@pytest.fixture(scope="module")
def engine(smollm2, idle_bytes):
    with LLM(smollm2, **OPTIONS) as one:
        yield one


@pytest.fixture
def llm(engine, smollm2):
    """Awake, with the checkpoint's weights; and so again when the test is over."""
    torch.cuda.empty_cache()
    yield engine
    torch.cuda.empty_cache()
    engine.wake_up()
    if engine.health().memory["weights"] == "stale":
        engine.reload_weights(smollm2)


@pytest.fixture(scope="module")
def core(smollm2):
    """Its steps are the test's."""
    with make_core(smollm2, executor="multiproc", **OPTIONS | {"kv_cache_bytes": GIB}) as one:
        yield one


@pytest.fixture
def trained(llm, smollm2):
    """One whose weights the test replaces."""
    yield llm
    llm.wake_up()
    llm.reload_weights(smollm2)
    check_tokens(llm)


@pytest.fixture(scope="module")
def other(smollm2):
    return OtherWeights(smollm2)


@pytest.fixture(scope="module")
def other_folder(smollm2, other, tmp_path_factory):
    return save_model(other, smollm2, tmp_path_factory.mktemp("models") / "other")


@pytest.fixture(scope="module")
def other_tokens(other_folder):
    """Those of a fresh engine with the other weights."""
    with LLM(other_folder, **OPTIONS | {"kv_cache_bytes": GIB}) as fresh:
        generated = token_ids(fresh.generate(PROMPTS, greedy(TOKENS), use_tqdm=False))
    assert generated != expected(TOKENS)
    return generated


def check_other_tokens(llm, other_tokens):
    assert token_ids(llm.generate(PROMPTS, greedy(TOKENS), use_tqdm=False)) == other_tokens


# ---------------------------------------------------------------------------------------------------------------
# Sleep.


@pytest.mark.parametrize("level", [1, 2])
def test_graphs_go_on_right_after_the_wake_up(llm, smollm2, level):
    check_tokens(llm, TOKENS)
    for _ in range(2):
        llm.sleep(level)
        with pytest.raises(SleepingError):
            llm.generate(PROMPTS[0], greedy(1), use_tqdm=False)
        llm.wake_up()
        if level == 2:
            llm.reload_weights(smollm2)
        check_tokens(llm, TOKENS)


@pytest.mark.parametrize("tags", [["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_the_tags_wake_in_either_order(llm, tags):
    llm.sleep()
    for tag in tags:
        llm.wake_up([tag])
    check_tokens(llm, TOKENS)


@pytest.mark.parametrize("level", [1, 2])
def test_the_memory_is_free_meanwhile(llm, idle_bytes, level):
    check_tokens(llm)
    table = llm.collective_rpc("memory", unique_reply_rank=0)
    contents = table["weights_bytes"] + table["kv_cache_bytes"]
    assert contents > OPTIONS["kv_cache_bytes"]
    before = used_bytes()
    (report,) = llm.sleep(level).ranks
    asleep = used_bytes()
    assert before - asleep >= 0.99 * contents
    assert report["weights_freed_bytes"] + report["kv_cache_freed_bytes"] >= contents
    assert report.get("copied_bytes", 0) >= (table["weights_bytes"] if level == 1 else 0)
    assert asleep - idle_bytes <= MAX_RESIDUE
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    if process_bytes(uuid, llm.ready.pids["worker 0"]) is not None:
        assert report["residue_bytes"] <= MAX_RESIDUE
    assert llm.wake_up().ranks[0]["mapped_bytes"] >= contents
    assert abs(used_bytes() - before) <= NOISE + report["cached_freed_bytes"]


def test_graphs_of_more_sizes_leave_little(llm):
    """A workspace of cuBLAS for each of them alone would be 192 MiB."""
    llm.generate(PROMPTS, greedy(4), use_tqdm=False)
    before = llm.sleep().ranks[0]["residue_bytes"]
    llm.wake_up()
    for num_rows in (20, 36, 44, 52, 90, 150):
        llm.generate(PROMPTS[:1] * num_rows, greedy(4), use_tqdm=False)
    assert llm.sleep().ranks[0]["residue_bytes"] - before <= NOISE
    llm.wake_up()
    check_tokens(llm)


def test_fifty_times_without_growth(llm):
    def cycle(num_times):
        for _ in range(num_times):
            llm.sleep()
            llm.wake_up()
        check_tokens(llm)
        return holdings(llm), used_bytes()

    held, used = cycle(3)
    held_later, used_later = cycle(50)
    check_no_growth(held, held_later, 32 * MIB)
    assert used_later - used <= NOISE


def test_a_wake_up_without_room_changes_nothing_and_succeeds_later(llm):
    away = llm.sleep().states
    torch.cuda.synchronize()
    tenant = torch.empty(torch.cuda.mem_get_info(0)[0] - 2 * GIB, dtype=torch.uint8, device="cuda")
    asleep = used_bytes()
    for tags in (None, ["kv_cache"]):
        with pytest.raises(CapacityError) as caught:
            llm.wake_up(tags)
        needed, available = (caught.value.details[name] for name in ("needed_bytes", "available_bytes"))
        assert needed >= 0.99 * OPTIONS["kv_cache_bytes"]
        assert 0 < available <= 2 * GIB + NOISE
        assert llm.health().memory == away
        assert llm.collective_rpc("memory_states", unique_reply_rank=0) == away
        assert used_bytes() - asleep <= NOISE
    assert llm.wake_up(["weights"]).states == {"weights": "resident", "kv_cache": "discarded"}
    with pytest.raises(CapacityError):
        llm.wake_up()
    del tenant
    torch.cuda.empty_cache()
    assert llm.wake_up().states == AWAKE
    check_tokens(llm, TOKENS)


def test_weights_in_a_file(smollm2, tmp_path):
    with LLM(smollm2, sleep_directory=tmp_path, **OPTIONS | {"kv_cache_bytes": GIB}) as llm:
        for _ in range(3):
            llm.sleep()
            assert is_empty(tmp_path)  # it has no name
            llm.wake_up()
            check_tokens(llm, TOKENS)


class TestRunningRequests:
    @pytest.mark.parametrize("level", [1, 2])
    def test_kept_ones_have_the_tokens_of_an_undisturbed_run(self, core, smollm2, level):
        batch = Batch(core, TOKENS)
        batch.step(7)
        core.sleep(level, mode="keep")
        assert core.health().num_running + core.health().num_waiting == len(PROMPTS)
        core.wake_up()
        if level == 2:
            core.reload_weights(smollm2)
        assert batch.finish() == expected(TOKENS)

    def test_those_that_are_waited_for_finish_first(self, core):
        batch = Batch(core, TOKENS)
        batch.step(7)
        core.sleep(1, mode="wait")
        assert core.health().num_running + core.health().num_waiting == 0
        assert batch.finish() == expected(TOKENS)
        core.wake_up()
        assert Batch(core, TOKENS).finish() == expected(TOKENS)

    def test_aborted_ones_end_with_what_they_have(self, core):
        batch = Batch(core, TOKENS)
        batch.step(7)
        core.sleep(1)
        for got, whole in zip(batch.finish(), expected(TOKENS), strict=True):
            assert got == whole[: len(got)]
            assert 0 < len(got) < TOKENS
        core.wake_up()


# ---------------------------------------------------------------------------------------------------------------
# New weights.


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensors_of_this_process(trained, other, other_tokens, device):
    """On the host they go through shared memory, on the GPU by CUDA's handles."""
    check_tokens(trained)
    for _ in range(2):
        update(trained, other, device)
        check_other_tokens(trained, other_tokens)


def test_cuda_handles_leave_nothing_behind(trained, other):
    update(trained, other, "cuda")
    torch.cuda.empty_cache()
    before = used_bytes()
    for _ in range(5):
        update(trained, other, "cuda")
    torch.cuda.empty_cache()
    assert used_bytes() - before <= NOISE


def test_a_folder(trained, other_folder, other_tokens):
    trained.reload_weights(other_folder)
    check_other_tokens(trained, other_tokens)


def test_a_training_loop_on_one_card(trained, other, other_tokens):
    """The weights are taken while there is no room for the KV cache."""
    trained.sleep(2)
    tenant = torch.empty(torch.cuda.mem_get_info(0)[0] - 6 * GIB, dtype=torch.uint8, device="cuda")
    trained.wake_up(["weights"])
    update(trained, other, "cuda")
    with pytest.raises(CapacityError):
        trained.wake_up(["kv_cache"])
    del tenant
    torch.cuda.empty_cache()
    assert trained.wake_up(["kv_cache"]).states == AWAKE
    check_other_tokens(trained, other_tokens)


def test_a_trainer_broadcasts_by_way_of_the_host(trained, other, other_tokens):
    broadcast(trained, other, "gloo", "cpu")
    check_other_tokens(trained, other_tokens)


def test_a_trainer_broadcasts_from_another_card(trained, other, other_tokens, monkeypatch):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {torch.cuda.device_count()}")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # as the workers have it
    with torch.cuda.device(1):
        broadcast(trained, other, "nccl", "cuda:1")
    check_other_tokens(trained, other_tokens)


# ---------------------------------------------------------------------------------------------------------------
# Two ranks.


def test_two_ranks(tiny_qwen2, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {torch.cuda.device_count()}")
    prompts = [[3 + (7 * i + j * j) % 300 for j in range(n)] for i, n in enumerate([1, 5, 16, 40])]
    options = OPTIONS | {"kv_cache_bytes": GIB}
    other = OtherWeights(tiny_qwen2)

    def generated(core):
        return tokens(generate(core, prompts, greedy(16)))

    with make_core(save_model(other, tiny_qwen2, tmp_path / "other"), **options) as fresh:
        new = generated(fresh)
    with make_core(tiny_qwen2, tensor_parallel_size=2, **options) as core:
        usual = generated(core)
        assert usual != new
        for level in (1, 2):
            before = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
            assert len(core.sleep(level).ranks) == 2
            for index in range(2):
                assert torch.cuda.mem_get_info(index)[0] - before[index] >= 0.99 * GIB
            core.wake_up()
            if level == 2:
                core.reload_weights(tiny_qwen2)
            assert generated(core) == usual
        update(core, other, "cpu")
        assert generated(core) == new
