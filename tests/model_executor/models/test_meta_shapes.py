"""Results on meta that are not torch's own have its shapes, dtypes and strides; what they do not know is torch's."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringcore.model_executor.models.transformers.meta_shapes import MetaShapes

BINARY = (torch.add, torch.sub, torch.mul, torch.div, torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne)
UNARY = (torch.neg, torch.rsqrt, torch.sigmoid, torch.tanh, torch.cos, torch.sin, torch.exp, torch.reciprocal)
EVERY_SHAPE = (torch.add, torch.gt)  # with every other; those of other functions are found by the same code
SHAPES = ((2, 3, 5, 8), (1, 1, 5, 8), (5, 8), (8,), (), (2, 3, 1, 1), (4, 8), (0, 8))


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Contiguous, permuted, with gaps, and expanded."""
    found = [torch.empty(shape, dtype=dtype, device="meta")]
    if len(shape) > 1:
        found.append(torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device="meta").transpose(-1, -2))
        found.append(torch.empty(*shape[:-1], 2 * shape[-1], dtype=dtype, device="meta")[..., : shape[-1]])
        found.append(torch.empty(*shape[:-1], 1, dtype=dtype, device="meta").expand(shape))
    if len(shape) == 4:
        found.append(torch.empty([shape[at] for at in (0, 2, 1, 3)], dtype=dtype, device="meta").transpose(1, 2))
        found.append(torch.empty(shape, dtype=dtype, device="meta").to(memory_format=torch.channels_last))
    return found


def facts(call: Callable[[], Any]) -> tuple[Any, ...]:
    try:
        out = call()
    except (RuntimeError, ValueError, IndexError, TypeError):
        return ("refused",)
    strides = [stride for size, stride in zip(out.shape, out.stride(), strict=True) if size > 1]
    return tuple(out.shape), out.dtype, out.device, strides if out.numel() else []


def check(call: Callable[[], Any]) -> None:
    expected = facts(call)
    with MetaShapes():
        found = facts(call)
    assert found == expected


@pytest.mark.parametrize("function", BINARY, ids=lambda one: one.__name__)
def test_of_two(function: Callable[..., torch.Tensor]) -> None:
    for dtype, other in ((torch.float32, torch.float32), (torch.int64, torch.int64), (torch.bfloat16, torch.float32)):
        shapes = SHAPES if function in EVERY_SHAPE else SHAPES[1:5]
        for shape, second in itertools.product(SHAPES if function in EVERY_SHAPE else SHAPES[:1], shapes):
            for a, b in itertools.product(layouts(shape, dtype), layouts(second, other)):
                check(lambda a=a, b=b: function(a, b))
    for a, number in itertools.product(layouts((2, 3, 5, 8), torch.bfloat16), (2, 0.5, True)):
        check(lambda a=a, number=number: function(a, number))
    for dtype in (torch.int64, torch.bool):
        check(lambda dtype=dtype: function(torch.empty(3, 4, dtype=dtype, device="meta"), 2.5))
    check(lambda: function(torch.empty(3, 4, device="meta"), torch.tensor(2)))


@pytest.mark.parametrize("function", UNARY, ids=lambda one: one.__name__)
def test_of_one(function: Callable[..., torch.Tensor]) -> None:
    for dtype, shape in itertools.product((torch.float32, torch.bfloat16, torch.int64), SHAPES):
        for x in layouts(shape, dtype):
            check(lambda x=x: function(x))


def test_others() -> None:
    for dtype, shape in itertools.product((torch.float32, torch.bfloat16, torch.int64), SHAPES):
        for x in layouts(shape, dtype):
            check(lambda x=x: torch.nn.functional.silu(x))
            for approximate in ("none", "tanh"):
                check(lambda x=x, how=approximate: torch.nn.functional.gelu(x, approximate=how))
            check(lambda x=x: torch.empty_like(x))
            check(lambda x=x: torch.zeros_like(x, dtype=torch.float16))
            check(lambda x=x: torch.pow(x, 2))
            for bounds in ((0, 1), (0.5, None), (None, 2)):
                check(lambda x=x, bounds=bounds: torch.clamp(x, *bounds))
            check(lambda x=x: 1 - x)
            check(lambda x=x: 0.5 - x)
            check(lambda x=x: torch.pow(10000, x))
            for dims, keepdim in (((-1,), True), ((-1,), False), ((0, -1), False), ((), True)):
                check(lambda x=x, dims=dims, keepdim=keepdim: x.mean(dims, keepdim=keepdim))
            check(lambda x=x: x.mean(-1, dtype=torch.float32))
            check(lambda x=x: ~x)
            check(lambda x=x: ~(x > 1) * (x < 1))
            check(lambda x=x: (x > 1) | (x < 1).T)
            check(lambda x=x: (x > 1) * 2)
    for a, b in itertools.product(layouts((2, 3, 5, 8), torch.bfloat16), layouts((2, 3, 5, 8), torch.bfloat16)):
        for dim in (-1, 0, 1):
            check(lambda a=a, b=b, dim=dim: torch.cat((a, b), dim))
            check(lambda a=a, b=b, dim=dim: torch.stack((a, b), dim))
            check(lambda a=a, b=b, dim=dim: torch.stack((a[0], b[0]), dim))
            check(lambda a=a, b=b, dim=dim: torch.stack((a[..., None], b[..., None]), dim))
            check(lambda a=a, b=b, dim=dim: torch.cat((a[0], b[0]), dim))
        for at in range(3):
            for weight in (b[0, 0, 0], b[0, 0, 0].float(), None):
                check(lambda a=a, w=weight, at=at: torch.native_layer_norm(a, [8], w, w, 1e-5)[at])
            check(lambda a=a, at=at: torch.native_layer_norm(a, [5, 8], None, a[0, 0].contiguous(), 1e-5)[at])
            check(lambda a=a, at=at: torch.native_layer_norm(a, [5], None, None, 1e-5)[at])
        check(lambda a=a, b=b: torch.where(a > 1, a, b))
        check(lambda a=a, b=b: torch.where(a > 1, a, b.float()))
        check(lambda a=a, b=b: torch.where(a[:, :1] > 1, a, b[..., :1]))
        check(lambda a=a, b=b: a[0] @ b[0].transpose(1, 2))
        check(lambda a=a, b=b: torch.bmm(a[0], b[0].mT))
        check(lambda a=a, b=b: torch.bmm(a[0], b[0]))
    check(lambda: torch.cat((torch.empty(2, 3, device="meta"), torch.empty(0, device="meta"))))
    check(lambda: torch.cat((torch.empty(2, 3, device="meta"), torch.empty(2, 4, device="meta"))))
    for limits in ((7,), (2, 7), (0, 8, 3), (0, 0.5, 0.25), (5, 1), (5, 1, -2)):
        for dtype in (None, torch.float32, torch.int64):
            check(lambda limits=limits, dtype=dtype: torch.arange(*limits, dtype=dtype, device="meta"))
    weight, ids = torch.empty(9, 4, device="meta"), torch.empty(2, 3, dtype=torch.int64, device="meta")
    check(lambda: torch.nn.functional.embedding(ids, weight))
    check(lambda: weight @ weight.t())
    check(lambda: weight @ weight)
    check(lambda: weight.half() @ weight.t())
    check(lambda: torch.addmm(weight[0, 0].expand(9), weight, weight.t()))
    check(lambda: torch.addmm(weight[:, 0], weight, weight.t()))
    check(lambda: torch.addmm(weight[:, 0].half(), weight, weight.t()))
    check(lambda: torch.addmm(weight[0], weight, weight.t()))
    check(lambda: torch.addmm(weight[:, 0], weight, weight.t(), alpha=2))
    check(lambda: weight.normal_())


def test_numbers_of_the_host_are_torchs() -> None:
    with MetaShapes():
        assert (torch.arange(3) + torch.ones(3)).tolist() == [1, 2, 3]
        assert torch.cat((torch.ones(1), torch.zeros(1))).tolist() == [1, 0]
        assert torch.zeros(2).uniform_(1, 2).min() >= 1


def test_a_model_is_built_without_sympy(checkpoint) -> None:
    """Which is a quarter of the time: one operation that is torch's own would import it."""
    _, folder = checkpoint("Llama")
    script = f"""
        import sys, torch
        from ringcore.checkpoint import find_model
        from ringcore.checkpoint.spec_reader import read_model_spec
        from ringcore.distributed.parallel import SingleRank
        from ringcore.families import FAMILIES
        from ringcore.model_executor import models

        models.is_own_process = lambda: True
        spec = read_model_spec(find_model({str(folder)!r}), FAMILIES, "transformers")
        models.build_model(spec, SingleRank(), torch.bfloat16, 64)
        print("sympy" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"
