"""Triton's interpreter on the CPU, which runs the kernels where there is no GPU, for less time.

What it computes and checks stays the same (`tests/kernels/test_interpreted_triton.py` compares). Most of its time goes
into describing values anew: the dtype and the shape of each scalar, the members of the language that it replaces in
each call of a function. Here descriptions are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import torch


def use_interpreter() -> None:
    """Without a GPU, kernels run in the interpreter. It is decided when a kernel is imported, so this comes first."""
    if torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.runtime.interpreter as interpreter
        from triton.language import core
        from triton.language.semantic import TritonSemantic
    except ImportError:
        return
    if interpreter._patch_attr is _patch_attr:
        return
    # Whether a sum overflows is computed at great length, and then only asserted for debugging.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)
    TritonSemantic.broadcast_impl_value = _broadcast(TritonSemantic.broadcast_impl_value)
    interpreter._get_np_dtype = _kept_dtypes(interpreter._get_np_dtype)
    interpreter._convert_float = _e4m3(interpreter._convert_float)
    interpreter._patch_builtin = _patch_builtin
    interpreter.ReduceOps.generic_reduce = _fold(interpreter.ReduceOps.generic_reduce)
    interpreter._patch_attr = _patch_attr
    interpreter._patch_lang, interpreter._LangPatchScope = _patched_once(interpreter)
    core._unwrap_if_constexpr = _unwrap(core)
    core.block_type.__init__ = _kept_blocks(core)
    core.tensor.__init__ = _kept_shapes(core)


def multiply_in_order(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """For `np.matmul`, by which the interpreter multiplies: a row's bits do not depend on its place, as they may in the
    host's BLAS."""
    return np.add.reduce(a.astype(dtype)[:, :, None] * b.astype(dtype)[None], 1)


def _broadcast(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def unless_equal(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:  # `_kept_shapes`: equal ones are one object
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return unless_equal


def _e4m3(convert: Callable[..., Any]) -> Callable[..., Any]:
    """As a GPU rounds to e4m3: to the nearest, ties to even, no number beyond the largest. Triton's interpreter loses
    the carry into the exponent."""
    import triton.language as tl

    def converted(numbers: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if target is tl.float8e4nv:
            wide = numbers if source is tl.float32 else convert(numbers, source, tl.float32, None)
            rows = torch.from_numpy(np.array(wide).view(np.float32)).clamp(-448, 448)
            return rows.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(numbers, source, target, rounding_mode)

    return converted


def _fold(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def fold(self: Any, tensors: tuple[Any, ...]) -> list[Any]:
        """A reduction by a function of a kernel's own: row by row in the same order, but all columns at once."""
        if self.axis is None or self.keep_dims:
            return reduce(self, tensors)
        rows = [np.moveaxis(tensor.handle.data, self.axis, 0) for tensor in tensors]
        dtypes = [tensor.dtype for tensor in tensors]
        results = [self.to_tensor(row[0], dtype) for row, dtype in zip(rows, dtypes, strict=True)]
        for i in range(1, len(rows[0])):
            made = self.combine_fn.fn(*results, *map(self.to_tensor, [row[i] for row in rows], dtypes))
            each = made if isinstance(made, tuple) else (made,)
            results = [self.to_tensor(one.handle.data, dtype) for one, dtype in zip(each, dtypes, strict=True)]
        return results

    return fold


def _kept_dtypes(find: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    known: dict[str, np.dtype] = {}

    def kept(tt_dtype: Any) -> np.dtype:
        """Of a block, that of its elements."""
        scalar = tt_dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = find(scalar)
        return known[scalar.name]

    return kept


def _patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
    from triton.language import core
    from triton.runtime import interpreter

    for name in _builtins(pkg):
        member = getattr(pkg, name)
        if core.is_builtin(member):  # not replaced yet
            interpreter._patch_attr(pkg, name, member, builder, scope)


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    from triton.runtime.interpreter import interpreter_semantic

    def with_semantic(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter_semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, with_semantic)


@functools.cache
def _builtins(pkg: Any) -> list[str]:
    from triton.language import core

    return [name for name, member in inspect.getmembers(pkg) if core.is_builtin(member)]


def _patched_once(interpreter: Any) -> tuple[Callable[[FunctionType], Any], type]:
    """What a kernel's launch has replaced is not replaced again in each function that the kernel calls."""
    import triton.language as tl

    patch, scope = interpreter._patch_lang, interpreter._LangPatchScope
    patched: set[str] = set()  # modules, since the launch

    class Scope(scope):  # type: ignore[misc, valid-type]
        def restore(self) -> None:
            patched.clear()
            super().restore()

    @functools.cache
    def languages(fn: FunctionType) -> set[str]:
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        return {module.__name__ for module in modules if module in (tl, tl.core)}

    def patch_once(fn: FunctionType) -> Any:
        if languages(fn) <= patched:
            return Scope()
        patched.update(languages(fn))
        return patch(fn)

    return patch_once, Scope


def _unwrap(core: Any) -> Callable[[Any], Any]:
    unwrap, constexpr = core._unwrap_if_constexpr, core.constexpr
    sequences = (list, tuple, core.tuple)

    def unwrap_one(o: Any) -> Any:
        if isinstance(o, constexpr):
            return o.value
        return unwrap(o) if isinstance(o, sequences) else o

    return unwrap_one


def _kept_blocks(core: Any) -> Callable[..., None]:
    describe = core.block_type.__init__

    @functools.cache
    def described(shape: tuple[int, ...]) -> tuple[Any, int, str]:
        block = core.block_type.__new__(core.block_type)
        describe(block, core.int32, list(shape))
        return block.shape, block.numel, f"<{block.shape}, "

    def kept(self: Any, element_ty: Any, shape: Any) -> None:
        assert isinstance(shape, list | core.tuple)
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        self.element_ty = element_ty
        self.shape, self.numel, name = described(sizes)
        self.name = f"{name}{element_ty}>"

    return kept


def _kept_shapes(core: Any) -> Callable[..., None]:
    describe = core.tensor.__init__

    @functools.cache
    def described(shape: tuple[int, ...]) -> tuple[Any, Any]:
        value = core.tensor.__new__(core.tensor)
        describe(value, None, core.block_type(core.int32, list(shape)) if shape else core.int32)
        return value.shape, value.numel

    def kept(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = described(tuple(type.shape) if type.is_block() else ())

    return kept


use_interpreter()
