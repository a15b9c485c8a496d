"""New weights in a GPU's memory: from files, from another process's memory of the same GPU, from a trainer on another
GPU. Graphs were captured before; what they compute afterwards is what a new engine computes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import hf_model

from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.errors import InvalidRequestError
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.weights import WeightGroup, ipc_handles

OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "enable_sleep_mode": True, "kv_cache_bytes": 1 << 24}
PROMPTS = [[3 + (7 * i + j * j) % 120 for j in range(n)] for i, n in enumerate([1, 5, 16, 40])]
# Heads of 64, which every kernel takes; biases; norms of heads, with 1 added.
FAMILIES = {
    "Llama": {"head_dim": 64, "attention_bias": True},
    "Qwen3": {"head_dim": 64},
    "Gemma3": {"head_dim": 64, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def folders_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    def make(family: str) -> list[Path]:
        folders = []
        for seed in (1, 2):
            folders.append(tmp_path_factory.mktemp(family))
            hf_model(family, seed=seed, **FAMILIES[family]).bfloat16().save_pretrained(folders[-1])
        return folders

    return make


def generate(core: EngineCore) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    ids = [f"{time.monotonic_ns()}-{index}" for index in range(len(PROMPTS))]
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        core.add_request(
            EngineCoreRequest(
                request_id=request_id, prompt_token_ids=prompt, sampling_params=params, arrival_s=time.monotonic()
            )
        )
    written: dict[str, list[int]] = {request_id: [] for request_id in ids}
    while core.has_unfinished:
        for output in core.step().outputs:
            written[output.request_id] += output.new_token_ids
    return list(written.values())


def new_engine(folder: Path) -> EngineCore:
    return EngineCore(EngineConfig.from_options(model=str(folder), **OPTIONS))


def expected_of(folder: Path) -> list[list[int]]:
    with new_engine(folder) as core:
        return generate(core)


def update(core: EngineCore, weights: Any) -> None:
    core.start_weight_update()
    core.update_weights(weights, timeout=120)
    core.finish_weight_update()


@pytest.mark.parametrize("family", FAMILIES)
def test_files_and_shared_memory(folders_of: Callable[[str], list[Path]], family: str) -> None:
    before, after = folders_of(family)
    old, new = expected_of(before), expected_of(after)
    assert old != new
    with new_engine(before) as core:
        assert generate(core) == old
        update(core, after)
        assert generate(core) == new
        update(core, load_file(before / "model.safetensors"))
        assert generate(core) == old


# ---------------------------------------------------------------------------------------------------------------
# A trainer in a process of its own, on `gpu`.


def serve_ipc(pipe: Connection, file: str, gpu: int) -> None:
    state = load_file(file, device=f"cuda:{gpu}")
    pipe.send(ipc_handles(state))
    pipe.recv()
    del state
    torch.cuda.ipc_collect()


def serve_group(pipe: Connection, file: str, gpu: int, backend: str, dies: bool) -> None:
    torch.cuda.set_device(gpu)
    state = load_file(file, device=f"cuda:{gpu}")
    with WeightGroup("127.0.0.1", 0, 2, backend, timeout_s=30) as group:
        pipe.send((group.port, WeightGroup.describe(state)))
        group.connect()
        if dies:
            first = next(iter(state))
            group.broadcast({first: state[first]})
            os.kill(os.getpid(), signal.SIGKILL)
        group.broadcast(state)
        pipe.recv()


@contextmanager
def trainer(work: Callable[..., None], *args: Any) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def test_another_process_on_the_same_gpu(folders_of: Callable[[str], list[Path]]) -> None:
    """Its memory is closed again: it can free it."""
    before, after = folders_of("Qwen3")
    new = expected_of(after)
    with new_engine(before) as core, trainer(serve_ipc, str(after / "model.safetensors"), 0) as pipe:
        assert pipe.poll(120)
        tensors = pipe.recv()
        update(core, {"kind": "ipc", "tensors": tensors})
        assert generate(core) == new
        pipe.send("over")


def test_a_tensor_of_another_gpu_is_refused(folders_of: Callable[[str], list[Path]]) -> None:
    before, after = folders_of("Llama")
    with new_engine(before) as core, trainer(serve_ipc, str(after / "model.safetensors"), 0) as pipe:
        assert pipe.poll(120)
        tensors = [tensor | {"gpu": "another"} for tensor in pipe.recv()]
        core.start_weight_update()
        with pytest.raises(InvalidRequestError, match="is on the GPU another, this rank's is"):
            core.update_weights({"kind": "ipc", "tensors": tensors})


def join(core: EngineCore, pipe: Connection, backend: str, timeout_s: float = 30) -> dict[str, Any]:
    """-> the source."""
    assert pipe.poll(120)
    port, tensors = pipe.recv()
    core.collective_rpc("join_weight_group", ("127.0.0.1", port, 2, 1, backend, timeout_s), timeout=60)
    return {"kind": "group", "tensors": tensors}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_trainers_broadcasts(folders_of: Callable[[str], list[Path]], backend: str) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes a GPU for each rank, and this machine has one")
    before, after = folders_of("Gemma3")
    new = expected_of(after)
    gpu = 1 if backend == "nccl" else 0
    with (
        new_engine(before) as core,
        trainer(serve_group, str(after / "model.safetensors"), gpu, backend, False) as pipe,
    ):
        update(core, join(core, pipe, backend))
        assert generate(core) == new
        core.collective_rpc("leave_weight_group")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_trainer_that_dies_leaves_the_engine_alive(folders_of: Callable[[str], list[Path]], backend: str) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes a GPU for each rank, and this machine has one")
    before, after = folders_of("Llama")
    old = expected_of(before)
    gpu = 1 if backend == "nccl" else 0
    with (
        new_engine(before) as core,
        trainer(serve_group, str(after / "model.safetensors"), gpu, backend, True) as pipe,
    ):
        source = join(core, pipe, backend, timeout_s=5)
        core.start_weight_update()
        with pytest.raises(InvalidRequestError, match="was not broadcast"):
            core.update_weights(source, timeout=60)
        core.reload_weights(before)
        assert generate(core) == old
