"""New weights through a worker's methods, from files, shared memory, a trainer's broadcasts and another process's GPU
memory: the tokens are then those of the new model, and nothing has moved."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from step_driver import admit, decode, engine_call, execute, make_config, make_step, run, sampled, start

from ringcore.errors import InvalidRequestError
from ringcore.weights import SharedTensors, WeightGroup
from ringcore.worker.rpc import call_rpc
from ringcore.worker.weights import weight_sources
from ringcore.worker.weights.weight_group import BroadcastGroup
from ringcore.worker.weights.weight_sources import WeightReceiver
from ringcore.worker.worker import Worker

PROMPT = [11, 60, 23, 8, 90]
TRAINER = Path(__file__).with_name("trainer_process.py")
DOWN = "model.layers.1.mlp.down_proj.weight"

Greedy = Callable[[Sequence[int], int], list[int]]


@pytest.fixture(scope="module")
def trained(tiny_llama: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The tiny Llama with other weights: (the transformers model, its folder of several files)."""
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = LlamaForCausalLM(tiny_llama[1].config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    folder = tmp_path_factory.mktemp("trained")
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model, folder


@pytest.fixture(scope="module")
def new_tokens(trained: tuple[Any, Path]) -> list[int]:
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(10):
            tokens.append(int(trained[0](torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.fixture
def worker(tiny_llama: tuple[str, Any]) -> Iterator[Worker]:
    worker = start(Worker(make_config(tiny_llama[0], device="cpu", enable_sleep_mode=True), 0, None))
    yield worker
    worker.shutdown()


def generate(worker: Worker) -> list[int]:
    first = sampled(run(worker, {0: len(PROMPT)}, new=[admit(0, PROMPT, range(1, 10))]))[0]
    tokens = [first, *decode(worker, [0], 9)[0]]
    worker.execute_model(make_step({}, finished=[0]))
    return tokens


def addresses(worker: Worker) -> dict[str, int]:
    assert worker._loaded is not None
    assert worker._loaded.tensors is not None
    return {name: tensor.data_ptr() for name, tensor in worker._loaded.tensors.items()}


def update(worker: Worker, *sources: dict[str, Any]) -> list[dict[str, float]]:
    """A whole update, with values as they come off the wire."""
    where = addresses(worker)
    engine_call(worker, "start_weight_update")
    told = [engine_call(worker, "update_weights", [source]) for source in sources]
    finished = engine_call(worker, "finish_weight_update", [True])
    assert finished["num_tensors"] == sum(one["num_tensors"] for one in told)
    assert addresses(worker) == where
    return told


def num_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


# ---------------------------------------------------------------------------------------------------------------
# Files.


def test_a_folder_of_several_files(
    worker: Worker, trained: tuple[Any, Path], new_tokens: list[int], tiny_llama: tuple[str, Any]
) -> None:
    old_tokens = generate(worker)
    assert old_tokens != new_tokens
    (told,) = update(worker, {"kind": "files", "path": str(trained[1])})
    assert told.keys() == {"num_tensors", "num_bytes", "seconds"}
    assert told["num_tensors"] == len(trained[0].state_dict())
    assert told["num_bytes"] == num_bytes(trained[0])
    assert generate(worker) == new_tokens
    update(worker, {"kind": "files", "path": tiny_llama[0]})
    assert generate(worker) == old_tokens


def test_files_one_by_one(worker: Worker, trained: tuple[Any, Path], new_tokens: list[int]) -> None:
    files = sorted(trained[1].glob("*.safetensors"), reverse=True)
    update(worker, *({"kind": "files", "path": str(file)} for file in files))
    assert generate(worker) == new_tokens


def test_shared_memory(worker: Worker, trained: tuple[Any, Path], new_tokens: list[int]) -> None:
    state = trained[0].state_dict()
    names = list(state)
    with (
        SharedTensors({name: state[name] for name in names[:7]}) as some,
        SharedTensors({name: state[name].double() for name in names[7:]}) as others,
    ):
        update(worker, {"kind": "files", "path": others.path}, {"kind": "files", "path": some.path})
    assert generate(worker) == new_tokens


@pytest.mark.parametrize("path", ["nowhere", "/proc/self/fd/9999", "empty", "text.safetensors"])
def test_a_path_without_weights_is_named(worker: Worker, tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.safetensors").write_text("these are no tensors at all")
    worker.start_weight_update()
    with pytest.raises(InvalidRequestError, match=path) as error:
        engine_call(worker, "update_weights", [{"kind": "files", "path": str(tmp_path / path)}])
    assert error.value.details["field"] == "path"


@pytest.mark.parametrize(
    "source",
    [{}, {"kind": "pickle", "path": "x"}, {"kind": "files"}, {"kind": "files", "path": 3}, {"kind": "group"}],
)
def test_a_source_of_no_known_kind(worker: Worker, source: dict[str, Any]) -> None:
    worker.start_weight_update()
    with pytest.raises(InvalidRequestError, match="source: ") as error:
        engine_call(worker, "update_weights", [source])
    assert error.value.details["field"] == "source"


# ---------------------------------------------------------------------------------------------------------------
# The transaction.


def test_an_update_is_started_first(worker: Worker, trained: tuple[Any, Path]) -> None:
    for _ in range(2):
        for method, args in (("update_weights", [{"kind": "files", "path": "x"}]), ("finish_weight_update", [True])):
            with pytest.raises(InvalidRequestError, match="call start_weight_update first"):
                engine_call(worker, method, args)
        update(worker, {"kind": "files", "path": str(trained[1])})  # which ends it


def test_to_start_twice_is_to_start_anew(worker: Worker, trained: tuple[Any, Path]) -> None:
    worker.start_weight_update()
    worker.update_weights({"kind": "files", "path": str(trained[1])})
    worker.start_weight_update()
    with pytest.raises(InvalidRequestError, match=r"tensor 'model\.embed_tokens\.weight' has not come \(and 29 more\)"):
        worker.finish_weight_update(True)
    assert worker.finish_weight_update(False)["num_tensors"] == 0


def test_what_is_missing_may_still_come(worker: Worker, trained: tuple[Any, Path], new_tokens: list[int]) -> None:
    state = trained[0].state_dict()
    worker.start_weight_update()
    for names, missing in (([name for name in state if name != DOWN], True), ([DOWN], False)):
        with SharedTensors({name: state[name] for name in names}) as shared:
            worker.update_weights({"kind": "files", "path": shared.path})
        if missing:
            with pytest.raises(InvalidRequestError, match=f"tensor '{DOWN}' has not come; every tensor"):
                worker.finish_weight_update(True)
    worker.finish_weight_update(True)
    assert generate(worker) == new_tokens


def test_packed_weights_cannot_be_replaced(tiny_llama: tuple[str, Any]) -> None:
    worker = start(Worker(make_config(tiny_llama[0], device="cpu"), 0, None))
    with pytest.raises(InvalidRequestError, match="start the engine with enable_sleep_mode=True"):
        engine_call(worker, "start_weight_update")
    worker.shutdown()


def test_two_ranks(
    tiny_llama: tuple[str, Any], trained: tuple[Any, Path], new_tokens: list[int], tmp_path: Path
) -> None:
    config = make_config(tiny_llama[0], device="cpu", enable_sleep_mode=True, tensor_parallel_size=2)
    workers = [Worker(config, rank, str(tmp_path / "rendezvous")) for rank in range(2)]
    met = threading.Barrier(2)

    def serve(worker: Worker) -> tuple[float, list[int]]:
        start(worker)
        told = update(worker, {"kind": "files", "path": str(trained[1])})
        outputs = [execute(worker, make_step({0: 5}, new=[admit(0, PROMPT, range(1, 6))]))]
        outputs += [execute(worker, make_step({0: 1})) for _ in range(9)]
        met.wait(60)
        worker.shutdown()
        return told[0]["num_bytes"], [int(output.token_ids[0]) for output in outputs if output]

    with ThreadPoolExecutor(2) as threads:
        (bytes_0, tokens), (bytes_1, none) = threads.map(serve, workers)
    assert (tokens, none) == (new_tokens, [])
    norms = sum(p.nbytes for name, p in trained[0].named_parameters() if "norm" in name)
    assert bytes_0 + bytes_1 == num_bytes(trained[0]) + norms, "slices of all else, and norms on both"


# ---------------------------------------------------------------------------------------------------------------
# A trainer's broadcasts.


@contextmanager
def trainer(folder: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """(the process, its port)."""
    command = [sys.executable, str(TRAINER), str(folder / "model.safetensors"), *args]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def one_file(trained: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-file")
    trained[0].save_pretrained(folder)
    return folder


def described(model: Any) -> dict[str, Any]:
    state = {name: model.state_dict()[name] for name in sorted(model.state_dict())}  # the order of the trainer's file
    return {"kind": "group", "tensors": WeightGroup.describe(state)}


def test_a_trainer_in_another_process(
    worker: Worker, trained: tuple[Any, Path], one_file: Path, new_tokens: list[int]
) -> None:
    with trainer(one_file, "2") as (process, port):
        call_rpc(worker, "join_weight_group", ["127.0.0.1", port, 2, 1, "gloo", 20.0])
        (told,) = update(worker, described(trained[0]))
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        call_rpc(worker, "leave_weight_group")
        call_rpc(worker, "leave_weight_group")
    assert told["num_bytes"] == num_bytes(trained[0])
    assert generate(worker) == new_tokens


def test_a_trainer_that_dies_is_an_error_and_no_hang(worker: Worker, trained: tuple[Any, Path], one_file: Path) -> None:
    with trainer(one_file, "2", "5") as (_, port):
        worker.join_weight_group("127.0.0.1", port, 2, 1, "gloo", 20.0)
        worker.start_weight_update()
        started = time.monotonic()
        with pytest.raises(
            InvalidRequestError, match=r"tensor 'model\.layers\..*' was not broadcast: .*join a new group"
        ):
            worker.update_weights(described(trained[0]))
        assert time.monotonic() - started < 18
    with pytest.raises(InvalidRequestError, match="no weight group is joined"):
        worker.update_weights(described(trained[0]))


def test_a_trainer_and_two_workers_in_threads(
    tiny_llama: tuple[str, Any], trained: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker is a rank after the other; tensors go in many pieces; a second update goes over the same group."""
    monkeypatch.setattr("ringcore.worker.weights.weight_group._PIECE_BYTES", 1500)
    state = {name: tensor.bfloat16() for name, tensor in trained[0].state_dict().items()}
    source = {"kind": "group", "tensors": WeightGroup.describe(state)}
    workers = [Worker(make_config(tiny_llama[0], device="cpu", enable_sleep_mode=True), 0, None) for _ in range(2)]
    with WeightGroup("127.0.0.1", 0, 3, "gloo", 20) as group, ThreadPoolExecutor(2) as threads:

        def serve(worker: Worker, rank: int) -> dict[str, torch.Tensor]:
            worker.init_device()
            worker.load_model()
            worker.rank = rank  # of an engine of two; both have the whole model here, to be compared
            worker.join_weight_group("127.0.0.1", group.port, 3, 1, "gloo", 20)
            update(worker, source)
            update(worker, source)
            assert worker._loaded is not None
            return dict(worker._loaded.tensors or {})

        served = [threads.submit(serve, worker, rank) for rank, worker in enumerate(workers)]
        group.broadcast(state)
        group.broadcast(state)
        first, second = (one.result(60) for one in served)
    expected = state["model.layers.2.mlp.down_proj.weight"].float()
    assert torch.equal(first["layers.2.down_proj.weight"], expected)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    for worker in workers:
        worker.shutdown()


def test_a_worker_that_refuses_a_tensor_does_not_keep_the_trainer_waiting(worker: Worker) -> None:
    state = {"model.norm.weight": torch.ones(64), DOWN: torch.ones(3, 4)}
    with WeightGroup("127.0.0.1", 0, 2, "gloo", 20) as group, ThreadPoolExecutor(1) as threads:
        joined = threads.submit(worker.join_weight_group, "127.0.0.1", group.port, 2, 1, "gloo", 20)
        group.connect()
        joined.result(20)
        worker.start_weight_update()
        with pytest.raises(InvalidRequestError, match=f"tensor '{DOWN}' has the shape"):
            worker.update_weights({"kind": "group", "tensors": WeightGroup.describe(state)})
        started = time.monotonic()
        with pytest.raises(InvalidRequestError, match="was not broadcast"):
            group.broadcast(dict.fromkeys(map(str, range(100)), torch.ones(1 << 16)))  # more than the system buffers
        assert time.monotonic() - started < 18


def test_who_does_not_come_is_named() -> None:
    absent = r"rank 0 of 3: ranks \[1, 2\] did not join within 0.4 s"
    with WeightGroup("127.0.0.1", 0, 3, "gloo", 0.4) as group, pytest.raises(InvalidRequestError, match=absent):
        group.connect()


def test_a_rank_may_try_again_and_is_not_there_twice() -> None:
    cpu = torch.device("cpu")
    with WeightGroup("127.0.0.1", 0, 2, "gloo", 20) as group:
        early = BroadcastGroup("127.0.0.1", group.port, 3, 1, "gloo", 0.3, cpu)
        with pytest.raises(InvalidRequestError, match=r"ranks \[0, 2\] did not join"):
            early.connect()
        again, twin = (BroadcastGroup("127.0.0.1", group.port, 2, 1, "gloo", 20, cpu) for _ in range(2))
        with ThreadPoolExecutor(1) as threads:
            joined = threads.submit(again.connect)
            group.connect()
            joined.result(20)
        with pytest.raises(InvalidRequestError, match="rank 1 is taken"):
            twin.connect()
        again.close()


def test_nobody_listens() -> None:
    group = BroadcastGroup("127.0.0.1", 1, 2, 1, "gloo", 0.3, torch.device("cpu"))
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"rank 0 did not listen there within 0.3 s \(Connection refused\)"):
        group.connect()
    assert time.monotonic() - started < 60


def test_the_port_is_open_at_its_address_alone() -> None:
    with WeightGroup("127.0.0.1", 0, 2, "gloo", 1) as group:
        listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        mine = [fields[1] for fields in listening if fields[1].endswith(f":{group.port:04X}") and fields[3] == "0A"]
    assert mine == [f"0100007F:{group.port:04X}"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"backend": "mpi"}, "backend='mpi': give one of 'nccl', 'gloo'"),
        ({"backend": "nccl"}, "this rank computes on cpu; give 'gloo'"),
        ({"port": 0}, "port=0"),
        ({"port": 70000}, "port=70000"),
        ({"world_size": 1, "rank": 0}, "world_size=1"),
        ({"rank": 2}, "rank=2: give one of 0 to 1"),
        ({"timeout_s": 0.0}, "timeout_s=0.0"),
        ({"address": ""}, "address=''"),
    ],
)
def test_arguments_of_a_group(worker: Worker, change: dict[str, Any], reason: str) -> None:
    arguments = {"address": "127.0.0.1", "port": 5, "world_size": 2, "rank": 1, "backend": "gloo", "timeout_s": 1.0}
    with pytest.raises(InvalidRequestError, match=reason) as error:
        call_rpc(worker, "join_weight_group", (), arguments | change)
    assert error.value.details["field"] in change


# ---------------------------------------------------------------------------------------------------------------
# Another process's memory of the GPU. What opens it is played, in this process's memory.


class FakeIpc:
    """The storages that another process shares, by handle, and what became of each share."""

    GPU = "GPU-of-this-rank"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storages: dict[bytes, torch.UntypedStorage] = {}
        self.opened: list[bytes] = []
        self.let_go: list[bytes] = []
        cuda = SimpleNamespace(
            get_device_properties=lambda device: SimpleNamespace(uuid=self.GPU),
            current_stream=lambda device: SimpleNamespace(synchronize=lambda: None),
        )
        fake = SimpleNamespace(
            cuda=cuda,
            device=torch.device,
            empty=torch.empty,
            UntypedStorage=SimpleNamespace(_new_shared_cuda=self.open, _release_ipc_counter_cuda=self.release),
        )
        monkeypatch.setattr(weight_sources, "torch", fake)

    def open(self, index: int, handle: bytes, *rest: Any) -> torch.UntypedStorage:
        storage = self.storages[handle]
        assert (index, *rest) == (3, len(storage), 512, handle + b"-counter", 7, b"event", True)
        self.opened.append(handle)
        return storage

    def release(self, ref_counter: bytes, offset: int) -> None:
        assert offset == 7
        self.let_go.append(ref_counter.removesuffix(b"-counter"))

    def share(self, name: str, tensor: torch.Tensor, **change: Any) -> dict[str, Any]:
        handle = name.encode()
        self.storages.setdefault(handle, tensor.untyped_storage())
        shared = {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "offset": tensor.storage_offset(),
            "gpu": self.GPU,
            "pid": 1,
            "handle": handle,
            "storage_bytes": len(tensor.untyped_storage()),
            "storage_offset_bytes": 512,
            "ref_counter": handle + b"-counter",
            "ref_counter_offset": 7,
            "event": b"event",
            "event_sync_required": True,
        }
        return shared | change


@pytest.fixture
def ipc(monkeypatch: pytest.MonkeyPatch) -> FakeIpc:
    return FakeIpc(monkeypatch)


@pytest.fixture
def receiver(worker: Worker) -> Callable[[list[dict[str, Any]]], dict[str, float]]:
    """Has the worker's rank receive tensors of GPU 3."""
    found = WeightReceiver()
    assert worker._loaded is not None
    found.start(worker._loaded)
    gpu = SimpleNamespace(device=torch.device("cuda", 3), synchronize=lambda: None)

    def receive(tensors: list[dict[str, Any]]) -> dict[str, float]:
        return found.receive({"kind": "ipc", "tensors": tensors}, gpu)  # type: ignore[arg-type]

    return receive


def test_memory_of_another_process(
    worker: Worker, trained: tuple[Any, Path], ipc: FakeIpc, receiver: Any, new_tokens: list[int]
) -> None:
    """Each is opened once; one lies transposed in the middle of a larger storage; other ranks' are left alone."""
    state = dict(trained[0].state_dict())
    room = torch.zeros(2, *reversed(state[DOWN].shape))
    room[1] = state[DOWN].t()
    tensors = [ipc.share(name, room[1].t() if name == DOWN else tensor) for name, tensor in state.items()]
    tensors += [ipc.share(name, tensor, gpu="GPU-of-another", handle=b"?") for name, tensor in state.items()]
    told = receiver(tensors)
    assert told["num_tensors"] == len(state)
    assert told["num_bytes"] == num_bytes(trained[0])
    assert sorted(ipc.opened) == sorted(name.encode() for name in state)
    assert ipc.let_go == []
    assert worker._loaded is not None
    with torch.inference_mode():
        worker._loaded.model.refresh()
    assert generate(worker) == new_tokens


def test_memory_that_is_refused_is_let_go(ipc: FakeIpc, receiver: Any) -> None:
    """Its owner keeps it until every share was opened or let go."""
    norm = ipc.share("model.norm.weight", torch.ones(64))
    for wrong, reason in (
        (ipc.share(DOWN, torch.ones(2, 3)), "has the shape"),
        (ipc.share(DOWN, torch.ones(64, 96), dtype="int8"), "is int8; give it in"),
        (ipc.share("model.other", torch.ones(1)), "has no place in the model"),
        (ipc.share(DOWN, torch.ones(64, 96), gpu="GPU-x"), "is on the GPU GPU-x, this rank's is GPU-of-this-rank"),
    ):
        ipc.let_go.clear()
        with pytest.raises(InvalidRequestError, match=reason):
            receiver([norm, wrong])
        assert ipc.opened == []
        assert sorted(ipc.let_go) == sorted(one["handle"] for one in (norm, wrong) if one["gpu"] == ipc.GPU)


def test_memory_of_this_very_process_is_refused(ipc: FakeIpc, receiver: Any) -> None:
    with pytest.raises(InvalidRequestError, match="is shared by this very process, which cannot open its own memory"):
        receiver([ipc.share("model.norm.weight", torch.ones(64), pid=os.getpid())])


def test_a_tensor_that_no_model_needs_is_let_go(ipc: FakeIpc, receiver: Any) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert receiver([ipc.share(name, torch.ones(8))])["num_tensors"] == 0
    assert (ipc.opened, ipc.let_go) == ([], [name.encode()])


def test_memory_of_a_gpu_is_nothing_for_a_cpu(worker: Worker) -> None:
    shared = FakeIpc.share(SimpleNamespace(storages={}, GPU="GPU-x"), "model.norm.weight", torch.ones(64))  # type: ignore[arg-type]
    worker.start_weight_update()
    with pytest.raises(InvalidRequestError, match="is on the GPU GPU-x, this rank computes on a CPU"):
        engine_call(worker, "update_weights", [{"kind": "ipc", "tensors": [shared]}])
