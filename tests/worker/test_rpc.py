from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from ringcore.errors import InvalidRequestError
from ringcore.protocol.codec import decoder, encoder, int_array
from ringcore.protocol.host_tensor import HostTensor
from ringcore.protocol.steps import NewBlocks, SchedulerOutput
from ringcore.worker import rpc
from ringcore.worker.rpc import call_rpc, find_rpc, rpc_methods

if TYPE_CHECKING:
    from nowhere import Imaginary


@dataclass
class Point:
    x: int
    y: int = 0


class Box(msgspec.Struct, forbid_unknown_fields=True):
    corner: Point
    size: float | None = None


def logged(method):
    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        return ["logged", method(*args, **kwargs)]

    return wrapper


class Base:
    attribute = "x"

    @rpc
    def plain(self, a, b: int = 1, *, c: str = "c"):
        return [a, b, c]

    @rpc
    def typed(self, box: Box) -> Imaginary:
        return [type(box).__name__, type(box.corner).__name__, box.corner.x]

    @rpc
    def array(self, values: np.ndarray) -> Any:
        return values

    @rpc
    def doubles(self, values: npt.NDArray[np.float64]) -> Any:
        return values

    @rpc
    def tensor(self, value: torch.Tensor | None) -> Any:
        return value

    @rpc
    def tensors(self, named: dict[str, list[torch.Tensor]]) -> Any:
        return named

    @rpc
    def anything(self, value, other: object = None, *rest: Any, **named: Any) -> Any:
        return [value, other, *rest, named]

    @rpc
    def step(self, scheduler_output: SchedulerOutput) -> Any:
        return scheduler_output

    @rpc
    def many(self, *values: int, **named: float) -> Any:
        return [values, named]

    @rpc
    def imaginary(self, value: Imaginary) -> None:
        pass

    @rpc
    def maybe(self, value: list[tuple[int, str]] | None = None) -> Any:
        return value

    @logged
    @rpc
    def wrapped(self, n: int) -> int:
        return n + 1

    @rpc(read_only=True)
    def overridden(self) -> str:
        return "base"

    @logged
    @rpc(read_only=True)
    def look(self, n: int = 0) -> int:
        return n

    @rpc(read_only=False)
    def touch(self) -> None: ...

    @rpc(read_only=True)
    def watched(self) -> None: ...

    def undeclared(self) -> None:
        raise AssertionError("must not be called")


class Extension:
    @rpc
    def extra(self, n: int) -> Any:
        return [n, self.attribute]

    def overridden(self) -> str:
        raise AssertionError("not declared here")

    @rpc
    def watched(self) -> None: ...

    @rpc(read_only=True)
    def state(self) -> None: ...


@pytest.fixture
def worker():
    return type("ExtendedWorker", (Extension, Base), {})()


def test_only_declared_methods_are_known(worker):
    names = ["anything", "array", "doubles", "extra", "imaginary", "look", "many", "maybe", "plain", "state", "step"]
    names += ["tensor", "tensors", "touch", "typed", "watched", "wrapped"]
    assert list(rpc_methods(worker)) == names
    assert list(rpc_methods(Base())) == sorted([*set(names) - {"extra", "state"}, "overridden"])


def test_read_only_methods_are_known_and_called_like_any(worker):
    read_only = [[name for name, m in rpc_methods(w).items() if m.read_only] for w in (worker, Base(), object())]
    assert read_only == [["look", "state"], ["look", "overridden", "watched"], []]
    assert call_rpc(worker, "look", [3]) == ["logged", 3]
    assert call_rpc(Base(), "overridden") == "base"


@pytest.mark.parametrize("name", ["undeclared", "overridden", "attribute", "__init__", "__class__", "", "nothing"])
def test_anything_else_is_refused_with_the_known_names(worker, name):
    with pytest.raises(InvalidRequestError, match="array, doubles, extra") as caught:
        find_rpc(worker, name)
    assert caught.value.details == {"field": "method", "value": name}


def test_a_near_miss_is_named(worker):
    with pytest.raises(InvalidRequestError, match="did you mean 'plain'"):
        call_rpc(worker, "plan")


def test_an_extension_sees_the_worker(worker):
    assert call_rpc(worker, "extra", [3]) == [3, "x"]


def test_defaults_and_keywords(worker):
    assert call_rpc(worker, "plain", [None]) == [None, 1, "c"]
    assert call_rpc(worker, "plain", [1], {"b": 2, "c": "d"}) == [1, 2, "d"]
    assert call_rpc(worker, "many", [1, 2], {"a": 1.5}) == [(1, 2), {"a": 1.5}]
    assert call_rpc(worker, "wrapped", [4]) == ["logged", 5]


def test_builtins_become_what_the_annotation_says(worker):
    assert call_rpc(worker, "typed", [{"corner": {"x": 4}}]) == ["Box", "Point", 4]
    assert call_rpc(worker, "typed", [Box(Point(5))]) == ["Box", "Point", 5]
    assert call_rpc(worker, "maybe", [[[1, "a"]]]) == [(1, "a")]
    assert call_rpc(worker, "maybe", [None]) is None


@pytest.mark.parametrize(
    ("value", "dtype", "items"),
    [
        ([1, 2], "int32", [1, 2]),
        ([], "int32", []),
        (int_array([3]).tobytes(), "int32", [3]),
        (np.float32([0.5]), "float32", [0.5]),
        (np.int64([2**40]), "int64", [2**40]),
        (np.array(True), "bool", True),
        (np.complex64([[1j]]), "complex64", [[1j]]),
        (HostTensor("int64", [1], (2**40).to_bytes(8, "little")), "int64", [2**40]),
        ([0.5], "float64", [0.5]),
        ([[1], [2]], "int32", [[1], [2]]),
    ],
)
def test_arrays(worker, value, dtype, items):
    array = call_rpc(worker, "array", [value])
    assert (str(array.dtype), array.tolist()) == (dtype, items)


def test_an_array_is_passed_as_it_is(worker):
    array = np.zeros((2, 2), np.float16)
    assert call_rpc(worker, "array", [array]) is array
    assert call_rpc(worker, "doubles", [array]) is array
    assert call_rpc(worker, "anything", [array])[0] is array
    assert call_rpc(worker, "doubles", [[0.5]]).tolist() == [0.5]


BF16 = HostTensor("bfloat16", [2], b"\x80\x3f\x00\xc0")  # 1, -2


def is_bf16(value):
    return isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 and value.tolist() == [1, -2]


def test_tensors_arrive_as_torch_tensors_annotated_or_not(worker):
    assert is_bf16(call_rpc(worker, "tensor", [BF16]))
    assert is_bf16(call_rpc(worker, "tensor", [], {"value": BF16}))
    assert is_bf16(call_rpc(worker, "tensors", [{"a": [BF16]}])["a"][0])
    value, other, rest, named = call_rpc(worker, "anything", [BF16, [1, {"a": BF16}], BF16], {"more": [BF16]})
    assert other[0] == 1
    assert all(map(is_bf16, [value, other[1]["a"], rest, named["more"][0]]))
    assert call_rpc(worker, "tensor", [None]) is None


def test_tensors_that_are_tensors_already(worker):
    tensor = torch.ones(2)
    assert call_rpc(worker, "tensor", [tensor]) is tensor
    assert call_rpc(worker, "anything", [tensor])[0] is tensor
    parameter = torch.nn.Parameter(tensor)
    assert call_rpc(worker, "tensor", [parameter]) is parameter


def test_an_array_becomes_a_tensor_where_the_annotation_says_so(worker):
    array = np.arange(3, dtype=np.int64)
    tensor = call_rpc(worker, "tensor", [array])
    assert (tensor.dtype, tensor.tolist()) == (torch.int64, [0, 1, 2])


def test_the_module_loads_no_torch():
    code = """
import sys
import numpy as np
from ringcore.worker import rpc
from ringcore.worker.rpc import call_rpc
class Worker:
    @rpc
    def sum(self, a: np.ndarray):
        return int(a.sum())
print(call_rpc(Worker(), 'sum', [np.arange(3)]), 'torch' in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout == "3 False\n"


def test_a_step_as_builtins(worker):
    blocks = [NewBlocks(int_array([3]), int_array([8]))]
    sent = SchedulerOutput(1, 1, int_array([2]), [], blocks, int_array([3, 4]), None, 2)
    got = call_rpc(worker, "step", [decoder(Any).decode(encoder().encode(sent))])
    assert isinstance(got, SchedulerOutput)
    assert (got.finished_rows.tolist(), got.rows.tolist(), got.num_tokens) == ([2], [3, 4], 2)
    assert got.num_scheduled_tokens is None
    assert [(new.rows.tolist(), new.block_ids.tolist()) for new in got.new_blocks] == [([3], [8])]


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "text"),
    [
        ("plain", [], {}, r"wrong arguments for plain\(a, b.*missing a required argument: 'a'"),
        ("plain", [1, 2, 3], {}, "too many positional"),
        ("plain", [1], {"a": 2}, "multiple values"),
        ("plain", [1], {"z": 2}, "unexpected keyword"),
        ("plain", [1, "2"], {}, r"plain\(b\)='2': Expected `int`, got `str`"),
        ("plain", [1, True], {}, r"Expected `int`, got `bool`"),
        ("plain", [1], {"c": 3}, "Expected `str`, got `int`"),
        ("typed", [{"corner": {}}], {}, "missing required field `x`"),
        ("typed", [{"corner": {"x": 1}, "colour": 1}], {}, "unknown field `colour`"),
        ("many", [1, "x"], {}, r"many\(values\)='x'"),
        ("many", [], {"a": "x"}, r"many\(named\)='x'"),
        ("array", [["a"]], {}, "expected an array of numbers"),
        ("array", [[2**40]], {}, "does not fit into 32 bits"),
        ("array", [b"123"], {}, "multiple of element size"),
        ("array", [None], {}, "array"),
        ("array", [BF16], {}, "BFloat16"),
        ("tensor", [[1.0]], {}, r"tensor\(value\)=\[1.0\]: expected Tensor, got list"),
        ("tensor", ["x"], {}, "expected Tensor, got str"),
        ("tensors", [{"a": [None]}], {}, "expected Tensor, got NoneType"),
        ("plain", [1, BF16], {}, "Expected `int`, got `Tensor`"),
        ("imaginary", [1], {}, "Imaginary"),
    ],
)
def test_arguments_that_do_not_fit(worker, method, args, kwargs, text):
    with pytest.raises(InvalidRequestError, match=text):
        call_rpc(worker, method, args, kwargs)


def test_a_long_wrong_argument_is_shown_in_part(worker):
    with pytest.raises(InvalidRequestError) as caught:
        call_rpc(worker, "plain", [1, "x" * 10_000])
    assert len(str(caught.value)) < 300


class Engines:
    @rpc(scope="engine")
    def prepare(self, n: int = 1) -> int:
        return n

    @rpc(read_only=True, scope="engine")
    def look_in(self) -> str:
        return "seen"

    @rpc(scope="lifecycle")
    def stop(self, mode: Literal["a", "b"] = "a", *, at: dict[str, int] | None = None) -> None:
        """Stops.

        And more.
        """

    @rpc(read_only=True)
    def seen(self): ...

    @rpc
    def change(self) -> None: ...


class Wider(Engines):
    @rpc
    def prepare(self, n: int = 2) -> int:
        return 10 * super().prepare(n)


def test_what_each_method_tells():
    told = {name: (m.scope, m.read_only, m.signature, m.summary) for name, m in rpc_methods(Engines()).items()}
    assert told == {
        "change": ("call", False, "() -> None", ""),
        "look_in": ("engine", True, "() -> str", ""),
        "prepare": ("engine", False, "(n: int = 1) -> int", ""),
        "seen": ("read", True, "()", ""),
        "stop": (
            "lifecycle",
            False,
            "(mode: Literal['a', 'b'] = 'a', *, at: dict[str, int] | None = None) -> None",
            "Stops.",
        ),
    }


@pytest.mark.parametrize("kind", [Engines, Wider])
@pytest.mark.parametrize("name", ["prepare", "look_in"])
def test_what_is_the_engines_only_the_engine_calls(kind, name):
    """Also where a subclass declares it for all."""
    with pytest.raises(InvalidRequestError, match=f"^method='{name}': only the engine itself calls it") as caught:
        call_rpc(kind(), name)
    assert caught.value.details == {"field": "method", "value": name}
    assert call_rpc(kind(), "look_in", by_engine=True) == "seen"
    assert call_rpc(kind(), "prepare", [3], by_engine=True) == (3 if kind is Engines else 30)
    with pytest.raises(InvalidRequestError, match=r"known: change, seen, stop$"):
        call_rpc(kind(), "nothing")


def test_a_scope_that_is_none():
    with pytest.raises(TypeError, match=r"@rpc\(scope='admin'\): give one of read, call, lifecycle, engine"):
        rpc(scope="admin")


def without_a_self() -> None: ...


@pytest.mark.parametrize("thing", [property(lambda self: 1), "text", staticmethod(print), without_a_self])
@pytest.mark.parametrize("declare", [rpc, rpc(read_only=True), rpc()])
def test_only_functions_can_be_declared(thing, declare):
    with pytest.raises(TypeError, match="@rpc declares a public method"):
        declare(thing)


def test_private_names_cannot_be_declared():
    def _hidden(self) -> None: ...

    with pytest.raises(TypeError, match="public"):
        rpc(_hidden)
