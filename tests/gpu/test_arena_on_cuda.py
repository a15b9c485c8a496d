"""Arenas on a real card, and what is told of its memory: beside a neighbour, and after the end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "worker"))

from step_driver import make_config, plan
from tiny_checkpoints import hf_model

from ringcore.errors import CapacityError
from ringcore.worker.memory.cuda_memory import CudaVirtualMemory
from ringcore.worker.memory.nvml import process_bytes
from ringcore.worker.platforms.cuda import CudaPlatform
from ringcore.worker.start_up.memory_budget import activation_bytes
from ringcore.worker.worker import Worker

MIB, GIB = 1 << 20, 1 << 30
NOISE = 256 * MIB  # what the driver and the libraries take and keep between two looks


@pytest.fixture(autouse=True)
def _needs_arenas(cuda):
    refusal = CudaVirtualMemory.refusal(0)
    if refusal is not None:
        pytest.skip(refusal)
    torch.zeros(1, device=cuda)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def platform():
    platform = CudaPlatform(0, device_memory="arena")
    yield platform
    platform.close()


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(0)[0]


def arena_of(platform, tag):
    return platform._memory.arenas[tag]


def test_tensors_lie_where_they_should(platform):
    tensors = [platform.allocate(size, "weights") for size in (1, 0, 1000, 3 * GIB, 70 * MIB)]
    places = [tensor.data_ptr() for tensor in tensors if len(tensor)]
    assert all(place % 256 == 0 for place in places)
    assert places == sorted(places)
    assert arena_of(platform, "weights").mapped_bytes < 3 * GIB + 512 * MIB  # a piece may be an eighth of what is there
    matrix = tensors[3].view(torch.bfloat16)[: 4096 * 4096].view(4096, 4096).normal_()
    x = torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(x @ matrix.t(), x @ matrix.clone().t())  # cuBLAS takes such memory as any other
    pages = platform.allocate(1000, "kv_cache")
    assert not pages.any()


def test_a_tensor_in_several_pieces(platform):
    """Products and copies go over their borders, also of memory that was filled piece by piece."""
    platform.allocate(1000, "weights")
    rows, columns = 65536, 20480  # 2.5 GiB
    matrix = platform.allocate(2 * rows * columns, "weights").view(torch.bfloat16).view(rows, columns).normal_()
    arena = arena_of(platform, "weights")
    x = torch.randn(8, columns, device="cuda", dtype=torch.bfloat16)
    expected = x @ matrix.t()
    torch.testing.assert_close(expected, x @ matrix.clone().t())
    host = torch.empty(arena.used_bytes, dtype=torch.uint8)
    link = platform.host_link()
    link.register(host)
    link.copy(arena.contents(), host)
    link.finish()
    arena.unmap()
    parts = []

    def restore(part, at):
        parts.append((at, len(part)))
        link.copy(host[at : at + len(part)], part)

    arena.map(restore)
    link.finish()
    assert len(parts) >= 3
    assert max(size for _, size in parts) <= GIB
    assert [at for at, _ in parts[1:]] == [at + size for at, size in parts[:-1]]
    assert torch.equal(x @ matrix.t(), expected)
    arena.contents().zero_()
    platform.synchronize()
    link.copy(host, arena.contents())  # at once, over all of them
    link.finish()
    assert torch.equal(x @ matrix.t(), expected)
    link.unregister(host)


def test_a_graph_survives_its_memory(platform):
    """Captured over tensors of arenas, whose memory goes to somebody else and comes back: the same bits."""
    rows, size = 16, 4096
    before = free_bytes()
    weight = platform.allocate(2 * size * size, "weights").view(torch.bfloat16).view(size, size)
    pages = platform.allocate(GIB, "kv_cache").view(torch.bfloat16)
    weight.normal_(0, size**-0.5)
    pages.normal_()
    x, out = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16), torch.empty(rows, size, device="cuda")

    def step():
        product = x @ weight.t()
        torch.add(product.float(), pages[: rows * size].view(rows, size), out=out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    expected, kept = out.clone(), (weight.cpu(), pages.cpu())
    arenas = [arena_of(platform, tag) for tag in ("weights", "kv_cache")]
    mapped, free = sum(arena.mapped_bytes for arena in arenas), free_bytes()
    graph.replay()  # on its way while its memory is asked for
    for arena in arenas:
        arena.unmap()
    assert free_bytes() - free >= mapped - 2 * MIB
    assert platform.process_memory().arena_bytes == 0
    tenant = torch.full((free_bytes() // 4,), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del tenant
    torch.cuda.empty_cache()
    for arena in arenas:
        arena.map()
    weight.copy_(kept[0])
    pages.copy_(kept[1])
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    del graph
    platform.close()
    assert before - free_bytes() < NOISE


def test_more_than_the_card_has(platform):
    total = platform.total_memory_bytes()
    with pytest.raises(CapacityError, match=r"cuMemCreate on cuda:0: .* GiB asked") as error:
        platform.allocate(total - 2 * MIB, "kv_cache")
    assert error.value.details["available_bytes"] < total
    assert platform.allocate(MIB, "kv_cache").sum() == 0, "the arena goes on"


def test_memory_of_torchs_cache_is_given_up(platform):
    free = free_bytes()
    torch.empty(free - 2 * GIB, dtype=torch.uint8, device="cuda")  # dropped at once, and cached
    assert free_bytes() < 3 * GIB
    assert platform.free_memory_bytes() > free - 3 * GIB
    assert len(platform.allocate(4 * GIB, "kv_cache")) == 4 * GIB


NEIGHBOUR = """
import sys, torch
held = torch.ones(2 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def neighbour():
    """Starts a process that holds 2 GiB of the card."""
    processes = []

    def begin():
        process = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout.readline() == "ready\n"

    yield begin
    for process in processes:
        process.communicate()


def test_a_neighbour_changes_nothing_in_our_figures(platform, neighbour):
    if process_bytes(str(torch.cuda.get_device_properties(0).uuid), os.getpid()) is None:
        pytest.skip("NVML does not tell processes apart here")
    platform.allocate(GIB, "weights")
    held = torch.ones(GIB // 2, dtype=torch.uint8, device="cuda")
    half = platform.shared_memory_bytes(1) // 2
    before, budget, free = platform.process_memory(), platform.memory_budget_bytes(half), free_bytes()
    assert before.own_bytes >= GIB * 3 // 2
    neighbour()
    assert free - free_bytes() > 2 * GIB
    assert platform.process_memory() == before
    assert platform.memory_budget_bytes(half) == budget
    del held


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    hf_model("Llama").to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def worker_of(folder, device_memory):
    options = {"dtype": "bfloat16", "block_size": 16, "max_num_batched_tokens": 512, "max_num_seqs": 32}
    worker = Worker(make_config(folder, device="cuda", device_memory=device_memory, **options), 0, None)
    worker.init_device()
    worker.load_model()
    return worker


@pytest.mark.parametrize("device_memory", ["arena", "plain"])
def test_the_worker_measures_and_gives_everything_back(tiny, device_memory):
    """The second of two: the first pays for what the libraries keep in a process."""
    for turn in range(2):
        before = free_bytes()
        worker = worker_of(tiny, device_memory)
        start = time.monotonic()
        table = worker.determine_available_memory()
        seconds = time.monotonic() - start
        bound = activation_bytes(worker.config.model.spec, worker.config, "bfloat16")
        assert 0 <= table["activations_bytes"] <= bound + 64 * MIB  # what torch takes more: 2 and 20 MiB at a time
        assert 0 < table["non_torch_bytes"] < 4 * GIB
        assert table["graphs_bytes"] > 0
        assert 0 < table["available_kv_cache_bytes"] < table["budget_bytes"]
        assert turn == 0 or seconds < 1, "with kernels compiled it takes no time to speak of"
        num_blocks = GIB // plan(worker, 1).block_bytes
        worker.initialize_from_config(plan(worker, num_blocks))
        now = worker.memory()
        assert now["activations_bytes"] == table["activations_bytes"]
        assert now["kv_cache_bytes"] == plan(worker, num_blocks).total_bytes
        assert before - free_bytes() > GIB - MIB
        worker.shutdown()
        del worker
        gc.collect()
        torch.cuda.empty_cache()
    assert before - free_bytes() < NOISE
