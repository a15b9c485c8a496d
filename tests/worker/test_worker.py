from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from step_driver import admit, engine_call, execute, make_config, make_step, plan, start

from ringcore.config import RankLayout
from ringcore.distributed.parallel import SingleRank
from ringcore.errors import CapacityError, ConfigError, InvalidRequestError
from ringcore.protocol.codec import decoder, encoder
from ringcore.protocol.methods import RpcMethod
from ringcore.testing.fake_worker import FakeWorker
from ringcore.testing.hardware import find_hardware
from ringcore.worker import entry
from ringcore.worker import worker as worker_module
from ringcore.worker.entry import create_worker
from ringcore.worker.platforms.cpu import CpuPlatform
from ringcore.worker.rpc import call_rpc, find_rpc, rpc, rpc_methods
from ringcore.worker.worker import Worker

PROMPT = [11, 60, 23, 8, 90]


class Greeter:
    """A worker extension: sees the worker it is mixed into."""

    rank: int

    @rpc
    def greet(self, name: str) -> str:
        return f"{name} from rank {self.rank}"


class Opener:
    @rpc(read_only=True)
    def shutdown(self) -> str:
        return "closed"


NOT_A_CLASS = 3


@pytest.fixture
def keep_threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_start_up_as_an_executor_does_it(
    tiny_llama: tuple[str, Any], reference: Callable[[Sequence[int], int], list[int]], keep_threads: None
) -> None:
    """Every call by name with values as they come off the wire."""
    worker = create_worker(make_config(tiny_llama[0]), 0, None)
    stages = [call_rpc(worker, "health")["stage"]]
    assert engine_call(worker, "init_device").keys() == {"device_s", "connect_s"}
    stages.append(worker.health()["stage"])
    loaded = engine_call(worker, "load_model")
    parameters = sum(p.numel() for p in tiny_llama[1].parameters())
    assert loaded["weights_bytes"] == 4 * parameters
    assert loaded["weights_s"] > 0
    stages.append(worker.health()["stage"])
    specs = engine_call(worker, "get_kv_cache_spec")
    assert list(specs) == [f"layers.{i}.attention" for i in range(3)]
    assert {(s.block_size, s.num_kv_heads, s.head_size, s.dtype) for s in specs.values()} == {(4, 2, 16, "float32")}
    assert engine_call(worker, "determine_available_memory")["available_kv_cache_bytes"] > 0
    engine_call(worker, "initialize_from_config", [msgspec.to_builtins(plan(worker, 20))])
    stages.append(worker.health()["stage"])
    assert stages == ["new", "device", "model", "ready"]
    step = make_step({0: 5}, new=[admit(0, PROMPT, [1, 2])], number=7)
    output = execute(worker, decoder(type(step)).decode(encoder().encode(step)))
    assert output is not None
    assert (output.step, output.token_ids.tolist()) == (7, reference(PROMPT, 1))
    assert encoder().encode(output)
    assert [worker.stats()[name] for name in ("num_steps", "num_tokens")] == [1, 5]
    assert execute(worker, make_step({0: 1}, num_steps=2, number=8)) is not None
    stats = worker.stats()
    assert (stats["num_steps"], stats["num_tokens"]) == (3, 7)
    assert stats["resident_bytes"] > 0
    worker.shutdown()
    worker.shutdown()
    assert worker.health()["stage"] == "new"
    assert worker.memory()["kv_cache_bytes"] == 0


def test_the_device_says_how_many_tokens_a_step_has(tiny_llama: tuple[str, Any]) -> None:
    worker = Worker(make_config(tiny_llama[0], device="auto", max_num_batched_tokens=None), 0, None)
    assert worker.health()["device"] is None
    worker.init_device()
    device = worker.health()["device"]
    assert device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert worker.config.scheduler.token_budget == {"cuda": 8192, "cpu": 512}[device]
    worker.shutdown()


def test_memory_is_told_at_every_stage(tiny_llama: tuple[str, Any]) -> None:
    worker = Worker(make_config(tiny_llama[0]), 0, None)
    assert worker.memory().keys() == {"resident_bytes", "kv_cache_bytes"}
    worker.init_device()
    worker.load_model()
    table = worker.determine_available_memory()
    worker.initialize_from_config(plan(worker, 20))
    now = call_rpc(worker, "memory")
    assert now.keys() == table.keys() | {"resident_bytes", "kv_cache_bytes"}
    fixed = ("total_bytes", "weights_bytes", "activations_bytes")
    assert {name: now[name] for name in fixed} == {name: table[name] for name in fixed}
    assert now["kv_cache_bytes"] == 20 * 3 * 2 * 4 * 2 * 16 * 4
    assert now["resident_bytes"] > now["kv_cache_bytes"]


SCOPES = {
    "read": ["health", "memory", "memory_states", "stack", "start_trace", "stats", "stop_trace"],
    "lifecycle": ["join_weight_group", "leave_weight_group"],
    "engine": [
        *("capture_graph", "commit_memory", "compile_grammar", "determine_available_memory", "execute_model"),
        *("finish_weight_update", "get_kv_cache_spec", "init_device", "initialize_from_config", "load_model"),
        *("prepare_memory", "reset_rows", "roll_back_memory", "shutdown", "start_weight_update", "update_weights"),
        *("expert_loads", "finished_kv_loads", "open_kv_store", "place_experts", "tune_kernels"),
    ],
}


@pytest.mark.parametrize("of_fakes", [False, True])
def test_the_scope_of_each_method(tiny_llama: tuple[str, Any], of_fakes: bool) -> None:
    """Fake workers declare what they have of it alike."""
    config = make_config(tiny_llama[0])
    worker = FakeWorker(config, 0, find_hardware("h200")) if of_fakes else Worker(config, 0, None)
    methods = rpc_methods(worker)
    scopes = {name: scope for scope, names in SCOPES.items() for name in names}
    assert {name: method.scope for name, method in methods.items()} == {name: scopes[name] for name in methods}
    assert of_fakes or methods.keys() == scopes.keys()
    read_only = [name for name, method in methods.items() if method.read_only]
    tracing = {"start_trace", "stop_trace"}  # they record for whoever may read
    assert set(read_only) == ({*SCOPES["read"], "compile_grammar"} & methods.keys()) - tracing
    for name in methods:
        if scopes[name] == "engine":
            with pytest.raises(InvalidRequestError, match="only the engine itself calls it"):
                call_rpc(worker, name)


def test_a_method_tells_how_it_is_called(tiny_llama: tuple[str, Any]) -> None:
    methods = rpc_methods(Worker(make_config(tiny_llama[0]), 0, None))
    assert methods["leave_weight_group"] == RpcMethod(
        "leave_weight_group",
        "workers",
        "lifecycle",
        False,
        "() -> None",
        "Leaves the joined group. Idempotent.",
    )
    assert methods["stats"].signature == "() -> dict[str, float]"
    assert methods["stats"].summary.startswith("Counters since the start, ")
    joined = "(address: str, port: int, world_size: int, rank: int, backend: str, timeout_s: float) -> None"
    assert methods["join_weight_group"].signature == joined


def test_the_stack_names_every_thread(tiny_llama: tuple[str, Any]) -> None:
    worker, gate = Worker(make_config(tiny_llama[0]), 0, None), threading.Event()

    def stand_at_the_gate() -> None:
        gate.wait(60)

    thread = threading.Thread(target=stand_at_the_gate, name="a side thread")
    thread.start()
    text = call_rpc(worker, "stack")
    gate.set()
    thread.join(60)
    assert text.startswith("thread 'MainThread' (most recent call first):")
    assert "test_the_stack_names_every_thread" in text
    side = text.partition("thread 'a side thread' (most recent call first):")[2].partition("thread '")[0]
    assert "stand_at_the_gate" in side


def test_read_only_methods_run_beside_steps(
    tiny_llama: tuple[str, Any], reference: Callable[[Sequence[int], int], list[int]]
) -> None:
    """They disturb no step, and never see one half-way: five tokens in the first step, then one in each."""
    worker = Worker(make_config(tiny_llama[0]), 0, None)
    start(worker)
    seen: list[tuple[int, int]] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            stats = worker.stats()
            seen.append((stats["num_steps"], stats["num_tokens"]))
            assert worker.memory()["weights_bytes"] > 0
            assert worker.health()["stage"] == "ready"
            assert worker.stack().startswith("thread 'MainThread' (")

    thread = threading.Thread(target=look)
    thread.start()
    written = []
    for number in range(30):
        counts = make_step({0: 1} if number else {0: 5}, new=[] if number else [admit(0, PROMPT, range(1, 12))])
        output = execute(worker, counts)
        assert output is not None
        written.append(int(output.token_ids[0]))
    is_over.set()
    thread.join(60)
    assert written == reference(PROMPT, 30)
    assert seen
    assert all(tokens == (steps + 4 if steps else 0) for steps, tokens in seen)


def test_a_stage_too_early_names_the_one_that_is_missing(tiny_llama: tuple[str, Any]) -> None:
    worker = Worker(make_config(tiny_llama[0]), 0, None)
    for method, args, missing in (
        ("load_model", [], "init_device"),
        ("get_kv_cache_spec", [], "load_model"),
        ("determine_available_memory", [], "load_model"),
        ("execute_model", [make_step({})], "initialize_from_config"),
        ("reset_rows", [], "initialize_from_config"),
    ):
        with pytest.raises(InvalidRequestError, match=f"call {missing} first"):
            getattr(worker, method)(*args)


def test_more_pages_than_memory_is_a_capacity_error(tiny_llama: tuple[str, Any]) -> None:
    worker = Worker(make_config(tiny_llama[0]), 0, None)
    worker.init_device()
    worker.load_model()
    with pytest.raises(
        CapacityError, match=r"missing; lower num_blocks_override to \d+, or kv_cache_bytes to \d+"
    ) as error:
        worker.initialize_from_config(plan(worker, 10**12))
    assert error.value.details["needed_bytes"] == 10**12 * 3 * 2 * 4 * 2 * 16 * 4
    assert 0 < error.value.details["available_bytes"] < error.value.details["needed_bytes"]


def test_a_worker_extension_is_mixed_in(tiny_llama: tuple[str, Any], keep_threads: None) -> None:
    worker = create_worker(make_config(tiny_llama[0], worker_extension="test_worker.Greeter"), 0, None)
    assert isinstance(worker, Worker)
    assert call_rpc(worker, "greet", ["hello"]) == "hello from rank 0"
    methods = rpc_methods(worker)
    assert {"greet", "init_device", "load_model", "execute_model", "stats", "health"} <= methods.keys()
    assert (methods["greet"].scope, methods["greet"].signature) == ("call", "(name: str) -> str")


def test_an_extension_cannot_open_what_is_the_engines(tiny_llama: tuple[str, Any], keep_threads: None) -> None:
    worker = create_worker(make_config(tiny_llama[0], worker_extension="test_worker.Opener"), 0, None)
    assert rpc_methods(worker)["shutdown"].scope == "engine"
    with pytest.raises(InvalidRequestError, match=r"only the engine itself calls it.*; close its owner"):
        call_rpc(worker, "shutdown")
    assert find_rpc(worker, "shutdown", by_engine=True)() == "closed"


@pytest.mark.parametrize(
    ("extension", "reason"),
    [
        ("Greeter", "has no module"),
        ("no_such_module_here.Greeter", "ModuleNotFoundError"),
        ("test_worker.Missing", "has no class Missing"),
        ("test_worker.NOT_A_CLASS", "has no class NOT_A_CLASS"),
        ("builtins.bool", "cannot be mixed"),
    ],
)
def test_a_wrong_extension_is_a_config_error(
    tiny_llama: tuple[str, Any], keep_threads: None, extension: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        create_worker(make_config(tiny_llama[0], worker_extension=extension), 0, None)
    assert error.value.details == {"option": "worker_extension", "value": extension}


def test_threads_are_shared_among_the_ranks(
    tiny_llama: tuple[str, Any], keep_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    config = make_config(tiny_llama[0], tensor_parallel_size=2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    create_worker(config, 0, None)
    assert torch.get_num_threads() == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    create_worker(config, 0, None)
    assert torch.get_num_threads() == 3


def test_device_memory_and_cores_are_those_of_the_ranks_host(
    tiny_llama: tuple[str, Any], keep_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last two of three ranks are on another host than the first."""
    config = make_config(tiny_llama[0], device="cpu", tensor_parallel_size=2, enable_sleep_mode=True)
    layout = RankLayout(hosts=("a", "b", "b"))
    config = replace(config, parallel=replace(config.parallel, ranks=layout))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    indices: list[int] = []
    shares: list[int] = []

    def choose(device: str, rank: int, *options: Any) -> CpuPlatform:
        indices.append(rank)
        return CpuPlatform(enable_sleep_mode=True)

    monkeypatch.setattr(worker_module, "choose_platform", choose)
    monkeypatch.setattr(CpuPlatform, "shared_memory_bytes", lambda self, num_ranks: shares.append(num_ranks) or 1 << 30)
    for rank, num_ranks in enumerate((1, 2, 2)):
        worker = create_worker(config, rank, None)
        assert torch.get_num_threads() == 6 // num_ranks
        monkeypatch.setattr(worker_module, "connect", lambda *_: (SingleRank(), None))
        start(worker)
        worker.determine_available_memory()
        assert worker._host_store is not None
        assert (shares[-1], worker._host_store._budget.num_ranks) == (num_ranks, num_ranks)
        worker.shutdown()
    assert indices == [0, 0, 1]


def test_the_gpu_context_is_that_of_the_ranks_own_device(
    tiny_llama: tuple[str, Any], keep_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tiny_llama[0], device="auto", tensor_parallel_size=2)
    config = replace(config, parallel=replace(config.parallel, ranks=RankLayout(hosts=("a", "b", "b"))))
    indices: list[int] = []
    monkeypatch.setattr(entry, "begin_gpu_context", indices.append)
    for rank in range(3):
        create_worker(config, rank, None)
    assert indices == [0, 0, 1]


def test_two_ranks_without_a_rendezvous_are_refused(tiny_llama: tuple[str, Any]) -> None:
    worker = Worker(make_config(tiny_llama[0], tensor_parallel_size=2), 0, None)
    with pytest.raises(InvalidRequestError, match="rendezvous=None: 2 ranks need a file"):
        worker.init_device()


def test_two_ranks_write_what_one_does(
    tiny_llama: tuple[str, Any], reference: Callable[[Sequence[int], int], list[int]], tmp_path: Path
) -> None:
    config = make_config(tiny_llama[0], tensor_parallel_size=2)
    workers = [Worker(config, rank, str(tmp_path / "rendezvous")) for rank in range(2)]
    written: dict[int, list[int]] = {0: [], 1: []}

    def serve(worker: Worker) -> None:
        start(worker)
        outputs = [execute(worker, make_step({0: 5}, new=[admit(0, PROMPT, range(1, 6))]))]
        outputs += [execute(worker, make_step({0: 1})) for _ in range(9)]
        written[worker.rank] = [int(output.token_ids[0]) for output in outputs if output]

    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert written == {0: reference(PROMPT, 10), 1: []}
    rows = [worker._runner.rows for worker in workers if worker._runner]
    assert rows[0].token_ids[0].tolist() == rows[1].token_ids[0].tolist(), "both ranks drew the same"
    for worker in workers:
        worker.shutdown()
