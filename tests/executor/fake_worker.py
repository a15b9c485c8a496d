"""A worker without a device: its methods do to a process what a real one's might."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ringcore.checkpoint import ModelFiles, ModelSpec, RopeSpec
from ringcore.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from ringcore.errors import CapacityError, ModelLoadError, RingcoreError
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import ModelRunnerOutput, PendingOutput, SchedulerOutput
from ringcore.worker import rpc

FACTORY = f"{__name__}:create_worker"


def fake_config(num_ranks: int = 1, trouble: str = "", **parallel) -> EngineConfig:
    """A configuration that no file stands behind. `trouble` is what the worker shall run into while it starts;
    `parallel` are options of `ParallelConfig`."""
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        head_dim=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        rope=RopeSpec(theta=1e4),
        tie_word_embeddings=True,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        dtype="float32",
        bos_token_id=0,
        eos_token_ids=[1],
    )
    files = ModelFiles(kind="dummy", path="", config_path=None, weight_files=[], tokenizer_path="")
    return EngineConfig(
        model=ModelConfig(model=trouble, files=files, spec=spec),
        cache=CacheConfig(),
        scheduler=SchedulerConfig(),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks, **parallel),
        device=DeviceConfig(),
    )


def step(number: int, trouble: int = 0) -> SchedulerOutput:
    """A step; its first row is what the worker shall run into, see `FakeWorker.execute_model`."""
    return SchedulerOutput(
        step=number,
        num_steps=1,
        finished_rows=int_array(),
        new_requests=[],
        new_blocks=[],
        rows=int_array([trouble, 7]),
        num_scheduled_tokens=None,
        num_tokens=2,
    )


# Troubles of a step.
RAISES, RAISES_ON_RANK_1, RETURNS_NOTHING, KILLS, HANGS, KILLS_RANK_1_RAISES_ON_0 = 1, 2, 3, 4, 5, 6


@dataclass
class Point:
    x: int
    y: float


class Shape(msgspec.Struct):
    name: str
    points: list[Point]


class UnknownToOthers(RingcoreError):
    """An error of ours that only this module knows."""


class FakeWorker:
    def __init__(self, config: EngineConfig, rank: int, rendezvous: str | None) -> None:
        self.config, self.rank, self.rendezvous = config, rank, rendezvous
        self.counter = 0
        self.array = np.zeros(4096)
        self.private = "not to be called"
        match config.model.model:
            case "fail in init":
                raise ModelLoadError("no such weights", path="weights", tensor="lm_head")
            case "exit in init":
                print("about to leave", flush=True)
                os._exit(3)

    @rpc(scope="engine")
    def init_device(self) -> None:
        self.meeting_file = None
        if self.rendezvous is not None and self.rendezvous.startswith("/"):
            status = os.stat(self.rendezvous)
            self.meeting_file = [status.st_dev, status.st_ino, status.st_mode & 0o777, status.st_nlink]
        if self.config.model.model == "rank 1 fails in init_device":
            if self.rank == 1:
                raise CapacityError("too little memory", needed_bytes=2, available_bytes=1)
            time.sleep(600)

    @rpc(scope="engine")
    def load_model(self) -> dict[str, float]:
        if self.config.model.model == "raise in load":
            raise ZeroDivisionError("in load")
        what, _, gate = self.config.model.model.partition(" in load while there is ")
        if gate and os.path.exists(gate):
            if what == "leave":
                os._exit(3)
            raise ModelLoadError("still there", path=gate)
        return {"weights_bytes": 1.0, "weights_s": 0.25 * (1 + self.rank)}

    @rpc(scope="engine")
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | PendingOutput | None:
        what, _, folder = self.config.model.model.partition(" in ")
        if what == "steps are launched":
            return LaunchedStep(lambda: self._run(scheduler_output), Path(folder), scheduler_output.step, self.rank)
        return self._run(scheduler_output)

    def _run(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        trouble = int(scheduler_output.rows[0])
        if trouble == RAISES or (trouble == RAISES_ON_RANK_1 and self.rank == 1):
            raise ArithmeticError(f"step {scheduler_output.step} on rank {self.rank}")
        if trouble == KILLS or (trouble == KILLS_RANK_1_RAISES_ON_0 and self.rank == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == KILLS_RANK_1_RAISES_ON_0:
            raise ConnectionError("the connection was closed by rank 1")
        if trouble == HANGS:
            _hang_in_here()
        if trouble == RETURNS_NOTHING or self.rank != self.config.parallel.layout.output_rank:
            return None
        return ModelRunnerOutput(scheduler_output.step, scheduler_output.rows, scheduler_output.rows * 10)

    def shutdown(self) -> None:
        if self.config.model.model == "slow shutdown":
            time.sleep(600)

    @rpc
    def echo(self, value: object = None) -> object:
        return value

    @rpc
    def who(self) -> dict:
        return {"rank": self.rank, "pid": os.getpid(), "meeting": self.meeting_file}

    @rpc
    def collection(self) -> tuple[bool, int]:
        """Whether garbage is collected, and how many objects are left out."""
        return gc.isenabled(), gc.get_freeze_count()

    @rpc
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @rpc
    def count(self, by: int = 1) -> int:
        self.counter += by
        return self.counter

    @rpc(scope="engine")
    def tune(self, by: int = 0) -> int:
        """Changes what only the engine may."""
        self.counter += by
        return self.counter

    @rpc(read_only=True, scope="engine")
    def peek_inside(self) -> int:
        return self.counter

    @rpc
    def add(self, x: int, *, y: int = 0) -> int:
        return x + y

    @rpc
    def struct_back(self, shape: Shape) -> Shape:
        assert isinstance(shape.points[0], Point)
        return shape

    @rpc
    def array_kind(self, array: np.ndarray) -> str:
        return f"{array.dtype}{list(array.shape)}"

    @rpc
    def sizes(self, data: bytes) -> int:
        return len(data)

    @rpc
    def zeros(self, num_bytes: int) -> bytes:
        return bytes(num_bytes)

    @rpc
    def nap(self, seconds: float, on_rank: int | None = None) -> int:
        if on_rank in (None, self.rank):
            time.sleep(seconds)
        return self.rank

    @rpc
    def wait_for_file(self, path: str, on_rank: int, fail_on_rank: int | None = None) -> int:
        """Keeps one rank busy until the test says so."""
        if self.rank == fail_on_rank:
            raise KeyError(path)
        while self.rank == on_rank and not os.path.exists(path):
            time.sleep(0.002)
        return self.rank

    @rpc
    def hold_the_gil(self, fifo: str) -> None:
        """In native code, until there is something to read: no other thread of this process runs Python then."""
        fd = os.open(fifo, os.O_RDWR)
        ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1)
        os.close(fd)

    @rpc(read_only=True)
    def peek(self) -> dict:
        return {"rank": self.rank, "counter": self.counter, "thread": threading.current_thread().name}

    @rpc(read_only=True)
    def fail_to_peek(self, kind: str) -> object:
        if kind == "value":
            return object()
        raise KeyError(kind)

    @rpc(read_only=True)
    def large_peek(self, num_bytes: int) -> bytes:
        return bytes(num_bytes)

    @rpc(read_only=True)
    def exit_in_control_thread(self) -> None:
        raise SystemExit(3)

    @rpc
    def announce(self, path: str, on_rank: int) -> int:
        """Shows that it is executed, also where it has nothing to say."""
        if self.rank == on_rank:
            Path(path).touch()
        return self.rank

    @rpc
    def changing_array(self) -> np.ndarray:
        """The same memory each time, with other numbers."""
        self.array += 1
        return self.array

    @rpc
    def odd_values(self) -> dict:
        return {
            "scalar": np.float32(0.5),
            "array": np.arange(4).reshape(2, 2),
            "dtype": np.dtype("int32"),
            "tuple": (1, (2, 3)),
            "set": {5},
            "dataclass": Point(1, 2.0),
            "struct": Shape("s", [Point(3, 4.0)]),
            3: None,
        }

    @rpc
    def unencodable(self, kind: str) -> object:
        match kind:
            case "object":
                return object()
            case "huge int":
                return 2**80
            case "cycle":
                cycle: list = []
                cycle.append(cycle)
                return cycle
            case _:
                return lambda: None

    @rpc
    def unencodable_but_on(self, rank: int) -> object:
        return self.rank if self.rank == rank else object()

    @rpc
    def fail(self, kind: str, on_rank: int | None = None) -> int:
        if on_rank is not None and on_rank != self.rank:
            return self.rank
        match kind:
            case "ours":
                raise CapacityError("too little", needed_bytes=10, available_bytes=3)
            case "unsendable details":
                raise CapacityError("odd", thing=object())
            case "subclass":
                raise UnknownToOthers("only here")
            case "surrogate":
                raise ValueError("lone \ud800 surrogate")
            case "broken text":
                raise _BrokenText
            case "deep":
                return self.fail(kind)
            case _:
                raise KeyError(kind)

    @rpc
    def leave(self, how: str) -> None:
        print(f"leaving by {how}", flush=True)
        match how:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                raise SystemExit(3)
            case "interrupt":
                raise KeyboardInterrupt

    @rpc
    def interrupt_yourself(self) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "still here"


class LaunchedStep:
    """A step on a device that is a folder: "launched <step>.<rank>" is made here, "taken <step>.<rank>" when the
    result is asked for, and it is over when "end <step>" is there."""

    def __init__(self, run: Callable[[], ModelRunnerOutput | None], folder: Path, number: int, rank: int) -> None:
        self._run, self._folder, self._name = run, folder, f"{number}.{rank}"
        self._end = folder / f"end {number}"
        (folder / f"launched {self._name}").touch()

    def done(self) -> bool:
        return self._end.exists()

    def result(self) -> ModelRunnerOutput | None:
        while not self.done():
            time.sleep(0.001)
        (self._folder / f"taken {self._name}").touch(exist_ok=False)
        return self._run()


def _hang_in_here() -> None:
    threading.Event().wait()


class _BrokenText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def create_worker(config: EngineConfig, rank: int, rendezvous: str | None) -> FakeWorker:
    return FakeWorker(config, rank, rendezvous)
