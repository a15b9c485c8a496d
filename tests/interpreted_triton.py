"""Triton's interpreter on the CPU, which runs the kernels where there is no GPU, for less time.

What it computes and checks stays the same (`tests/kernels/test_interpreted_triton.py` compares). Most of its time goes
into describing values anew: the dtype and the shape of each scalar, the members of the language that it replaces in
each call of a function. Here descriptions are kept, and so are constants and small blocks of them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from interpreted_operators import keep_operators
from interpreted_values import keep_values, number_key


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
    _keep_constants(TritonSemantic, interpreter)
    interpreter._get_np_dtype = _kept_dtypes(interpreter._get_np_dtype)
    interpreter._convert_float = _e4m3(interpreter._convert_float)
    interpreter._patch_builtin = _patch_builtin
    interpreter.ReduceOps.generic_reduce = _fold(interpreter.ReduceOps.generic_reduce)
    interpreter._patch_attr = _patch_attr
    interpreter._patch_lang, interpreter._LangPatchScope = _patched_once(interpreter)
    core._unwrap_if_constexpr = _unwrap(core)
    core.dtype.__eq__ = _same_or_equal(core.dtype.__eq__)
    core.block_type.__init__ = _kept_blocks(core)
    core.block_type.to_ir = _as_it_is(core.block_type.to_ir, interpreter.InterpreterBuilder)
    core.block_type.with_element_ty = _kept_element_types(core)
    keep_operators(interpreter, core, keep_values(interpreter, core, TritonSemantic))


def multiply_in_order(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """For `np.matmul`, by which the interpreter multiplies: a row's bits do not depend on its place, as they may in the
    host's BLAS."""
    return np.add.reduce(a.astype(dtype)[:, :, None] * b.astype(dtype)[None], 1)


def _broadcast(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def unless_equal(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:  # `keep_values`: equal ones are one object
            return lhs, rhs
        if not rhs.shape:
            return lhs, spread(self, rhs, lhs.type)
        return (spread(self, lhs, rhs.type), rhs) if not lhs.shape else broadcast(self, lhs, rhs)

    def spread(self: Any, scalar: Any, block: Any) -> Any:
        block = block.with_element_ty(scalar.dtype)
        return self.tensor(self.builder.create_splat(block, scalar.handle), block)

    return unless_equal


MAX_KEPT_BLOCK = 1024  # elements: a larger one takes longer to fill than to describe


def _keep_constants(semantic: Any, interpreter: Any) -> None:
    """Of constants the arrays are kept, which nobody can write; each use has a handle of its own."""
    make, splat = semantic.scalar_constant, interpreter.InterpreterBuilder.create_splat
    scalars: dict[tuple[tuple[type, Any], str], Any] = {}
    blocks: dict[tuple[int, tuple[int, ...]], Any] = {}
    ids: set[int] = set()  # of the scalars' arrays, which live as long as this process

    def kept_scalar(self: Any, value: Any, dtype: Any) -> Any:
        key = number_key(value), dtype.name
        if key not in scalars:
            handle = scalars[key] = make(self, value, dtype).handle
            handle.data.flags.writeable = False
            ids.add(id(handle.data))
        handle = scalars[key]
        return self.tensor(interpreter.TensorHandle(handle.data, handle.dtype), dtype)

    def kept_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        if id(arg.data) not in ids or ret_ty.numel > MAX_KEPT_BLOCK:
            return splat(self, ret_ty, arg)
        key = id(arg.data), ret_ty.sizes
        if key not in blocks:
            blocks[key] = splat(self, ret_ty, arg)
            blocks[key].data.flags.writeable = False
        return interpreter.TensorHandle(blocks[key].data, blocks[key].dtype)

    semantic.scalar_constant, interpreter.InterpreterBuilder.create_splat = kept_scalar, kept_splat


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

    # What only checks that it is given a semantic need not be called.
    call = member.__wrapped__ if getattr(member, "__code__", None) is _code_of_checks() else member

    def with_semantic(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter_semantic
        return call(*args, **kwargs)

    scope.set_attr(obj, name, with_semantic)


@functools.cache
def _code_of_checks() -> CodeType:
    from triton.language import core

    return core.builtin(lambda: None).__code__


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


def _same_or_equal(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or equal(self, other)


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
        self.element_ty, self.sizes = element_ty, sizes
        self.shape, self.numel, name = described(sizes)
        self.name = f"{name}{element_ty}>"

    return kept


def _as_it_is(to_ir: Callable[[Any, Any], Any], builder: type) -> Callable[[Any, Any], Any]:
    """The interpreter's own types of blocks are these."""
    return lambda self, made_by: self if type(made_by) is builder else to_ir(self, made_by)


def _kept_element_types(core: Any) -> Callable[..., Any]:
    known: dict[tuple[str, tuple[int, ...]], Any] = {}

    def kept(self: Any, scalar_ty: Any) -> Any:
        if type(scalar_ty) is not core.dtype:  # a pointer: more than its name tells it from others
            return core.block_type(scalar_ty, list(self.sizes))
        key = scalar_ty.name, self.sizes
        if key not in known:
            known[key] = core.block_type(scalar_ty, list(self.sizes))
        return known[key]

    return kept


use_interpreter()
