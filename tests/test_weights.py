"""What a trainer gives: tensors in shared memory, as others read them; handles; the sources that an update takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

import ringcore.weights
from ringcore.checkpoint import read_safetensors_header
from ringcore.errors import CapacityError, InvalidRequestError
from ringcore.weights import SharedTensors, WeightGroup, ipc_handles, weight_source

STATE = {
    "a": torch.arange(6.0).view(2, 3),
    "b.weight": torch.arange(5).bfloat16(),
    'odd "name"\u00e9': torch.linspace(0, 1, 7).double(),
    "empty": torch.empty(0, 4),
    "half": torch.ones(3, 1, 2).half(),
}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_the_file_is_one_of_the_format():
    with SharedTensors(STATE) as shared:
        same(load_file(shared.path), STATE)  # by the format's own library
        assert read_safetensors_header(shared.path).keys() == STATE.keys()  # and by ours, which is strict
        with safe_open(shared.path, "pt") as file:
            assert set(file.keys()) == STATE.keys()


@given(st.dictionaries(st.text(max_size=9), st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=6))
def test_any_names_and_shapes(shapes):
    shapes.pop("__metadata__", None)
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    with SharedTensors(state) as shared:
        same(load_file(shared.path), state)


def test_views_are_written_as_they_look():
    whole = torch.arange(12.0).view(3, 4)
    state = {"t": whole.t(), "column": whole[:, 1], "part": whole[1:], "trained": torch.nn.Parameter(whole)}
    with SharedTensors(state) as shared:
        same(load_file(shared.path), {name: tensor.detach() for name, tensor in state.items()})


def test_another_process_reads_it_and_nobody_writes():
    with SharedTensors(STATE) as shared:
        code = f"from safetensors.torch import load_file; print(float(load_file({shared.path!r})['a'].sum()))"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert out.stdout == "15.0\n"
        for change in (lambda: os.pwrite(shared._fd, b"x", 0), lambda: os.ftruncate(shared._fd, 0)):
            with pytest.raises(PermissionError):
                change()
        assert oct(os.stat(shared.path).st_mode & 0o777) == "0o600"


def test_nothing_is_left():
    before = os.listdir("/proc/self/fd")
    with SharedTensors(STATE) as shared:
        path = shared.path
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    shared.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert not Path(path).exists()
    with pytest.raises(InvalidRequestError, match="are closed"):
        assert shared.path


def test_too_little_memory(monkeypatch):
    before = len(os.listdir("/proc/self/fd"))

    def no_space(fd, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(CapacityError, match="no shared memory for weights"):
        SharedTensors(STATE)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "is a int; give a torch tensor"),
        ([1.0], "is a list; give a torch tensor"),
        (torch.ones(3, dtype=torch.complex64), "is complex64; give it in float64, float32, float16, bfloat16"),
        (torch.tensor(1.0), "is a single number"),
    ],
)
def test_what_is_no_weight_is_refused(value, reason):
    before = len(os.listdir("/proc/self/fd"))
    for give in (SharedTensors, WeightGroup.describe, ipc_handles, lambda state: weight_source(state).__enter__()):
        with pytest.raises(InvalidRequestError, match=f"tensor 'x' {reason}"):
            give({"a": torch.ones(2), "x": value} if give is not ipc_handles else {"x": value})
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_source_of_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("model", Path("model"), tmp_path / "model"):
        with weight_source(path) as source:
            assert source == {"kind": "files", "path": str(tmp_path / "model")}


def test_a_source_of_the_hosts_tensors():
    with weight_source(STATE) as source:
        assert source.keys() == {"kind", "path"}
        assert source["kind"] == "files"
        same(load_file(source["path"]), STATE)
    assert not Path(source["path"]).exists()


def test_no_tensors_are_a_source_of_none():
    with weight_source({}) as source:
        assert load_file(source["path"]) == {}


def test_tensors_here_and_there_are_refused():
    state = {"a": torch.ones(2), "b": torch.ones(2, device="meta")}
    with pytest.raises(InvalidRequestError, match="the tensors are on cpu and meta; give all"), weight_source(state):
        raise AssertionError("no source")


class OnGpu(torch.Tensor):
    """A tensor of the host that says it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda", 1)

    def detach(self):
        return self

    def untyped_storage(self):
        shares = (1, b"handle", 4096, 512, b"counter", 3, b"event", True)
        return SimpleNamespace(_share_cuda_=lambda: shares)


def test_a_source_of_a_gpus_tensors(monkeypatch):
    """As builtin values, which a message can carry; memory is collected when it is over."""
    collected = []
    cuda = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"),
        ipc_collect=lambda: collected.append(True),
    )
    monkeypatch.setattr(ringcore.weights, "_torch", lambda: SimpleNamespace(cuda=cuda, Tensor=torch.Tensor))
    tensor = torch.ones(4, 6).bfloat16()[1:, ::2].as_subclass(OnGpu)
    with weight_source({"w": tensor}) as source:
        assert not collected
    assert collected == [True]
    expected = {
        "name": "w",
        "dtype": "bfloat16",
        "shape": [3, 3],
        "stride": [6, 2],
        "offset": 6,
        "gpu": "GPU-1",
        "pid": os.getpid(),
        "handle": b"handle",
        "storage_bytes": 4096,
        "storage_offset_bytes": 512,
        "ref_counter": b"counter",
        "ref_counter_offset": 3,
        "event": b"event",
        "event_sync_required": True,
    }
    assert source == {"kind": "ipc", "tensors": [expected]}


def test_memory_of_the_host_has_no_handle():
    with pytest.raises(InvalidRequestError, match="tensor 'w' has no memory on a GPU: it is on cpu"):
        ipc_handles({"w": torch.ones(2)})


def test_tensors_are_described_in_their_order():
    assert WeightGroup.describe({"b": torch.ones(2, 3).half(), "a": torch.ones(4)}) == [
        {"name": "b", "dtype": "float16", "shape": [2, 3]},
        {"name": "a", "dtype": "float32", "shape": [4]},
    ]


def test_torch_is_not_imported_before_it_is_used():
    code = "import ringcore.weights, sys; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout == "False\n"
