from __future__ import annotations

import functools
import importlib
import sys
import threading

import numpy as np
import pytest

from ringcore.errors import InvalidRequestError
from ringcore.executor.callables import call_packed, callable_name, pack_callable
from ringcore.protocol.host_tensor import HostTensor


class Worker:
    rank = 3


class Scaled:
    def __init__(self, by):
        self.by = by

    def __call__(self, worker, value):
        return worker.rank * self.by + value


def add_rank(worker, value, *, twice=False):
    return (worker.rank + value) * (2 if twice else 1)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (add_rank, "add_rank"),
        (lambda worker, value: worker.rank + value, "test_callables.<lambda>"),
        (functools.partial(add_rank, twice=False), "partial"),
        (Scaled(1), "Scaled"),
    ],
)
def test_callables_of_all_kinds(function, name):
    assert call_packed(Worker(), pack_callable(function), [4], {}) == 7
    assert callable_name(function).endswith(name.split(".")[-1])


def test_a_closure_travels_whole():
    weights = np.arange(3)
    blob = pack_callable(lambda worker: (weights * worker.rank).tolist())
    weights[:] = 0
    assert call_packed(Worker(), blob, [], {}) == [0, 3, 6]


def test_keyword_arguments():
    assert call_packed(Worker(), pack_callable(add_rank), (1,), {"twice": True}) == 8


def test_tensors_arrive_as_torch_tensors():
    torch = pytest.importorskip("torch")
    tensor = HostTensor("bfloat16", [2], b"\x80\x3f\x00\xc0")

    def kinds(worker, a, *, b):
        return [type(a[0]).__name__, str(a[0].dtype), b.tolist()]

    assert call_packed(Worker(), pack_callable(kinds), [[tensor]], {"b": tensor}) == [
        "Tensor",
        "torch.bfloat16",
        [1, -2],
    ]
    assert isinstance(tensor.torch(), torch.Tensor)


@pytest.mark.parametrize("function", [None, 7, ["stats"]])
def test_what_is_no_callable(function):
    with pytest.raises(InvalidRequestError, match="give the name of a worker method, or a function") as caught:
        pack_callable(function)
    assert caught.value.details["field"] == "method"


def test_what_belongs_to_this_process_cannot_be_sent():
    lock = threading.Lock()

    def locked(worker):
        return lock.locked()

    with pytest.raises(InvalidRequestError, match=r"locked cannot be sent to a worker: .*lock"):
        pack_callable(locked)


def test_whatever_an_object_raises_while_it_is_packed():
    class Stubborn:
        def __call__(self, worker): ...

        def __reduce__(self):
            raise RuntimeError("not me")

    with pytest.raises(InvalidRequestError, match="Stubborn cannot be sent to a worker: not me"):
        pack_callable(Stubborn())


def test_a_function_of_a_module_that_the_worker_does_not_have(tmp_path, monkeypatch):
    (tmp_path / "here_alone.py").write_text("def function(worker):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    blob = pack_callable(importlib.import_module("here_alone").function)
    assert call_packed(Worker(), blob, [], {}) == 1
    monkeypatch.undo()
    del sys.modules["here_alone"]
    with pytest.raises(ModuleNotFoundError, match="here_alone"):
        call_packed(Worker(), blob, [], {})


def test_what_a_function_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        call_packed(Worker(), pack_callable(lambda worker: 1 // 0), [], {})
