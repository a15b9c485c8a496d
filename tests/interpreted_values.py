"""What `interpreted_triton` replaces of the values that Triton's interpreter computes with: how their types are found,
and how they are described. Most of what a kernel does is such values of a few types, again and again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

NUMBERS = (int, float, bool)


def keep_values(interpreter: Any, core: Any, semantic: Any) -> dict[tuple[Any, ...], Any]:
    """-> by kinds of operands and rules for them, the type that a number among them takes, as it becomes known."""
    known: dict[tuple[Any, ...], Any] = {}  # None where there is no number
    semantic.binary_op_type_checking_impl = _operands(semantic.binary_op_type_checking_impl, core.tensor, known)
    interpreter.TensorHandle.__init__ = _handle(core.pointer_type)
    interpreter.InterpreterBuilder.binary_op = _binary_op(interpreter, core.pointer_type)
    core.tensor.__init__ = _tensor(core)
    return known


def _operands(check: Callable[..., Any], tensor: type, known: dict[tuple[Any, ...], Any]) -> Callable[..., Any]:
    """Two operands of types, or of a type and with a number, that once stayed as they are, or took the number with
    another type, do so again."""

    def operands(self: Any, lhs: Any, rhs: Any, *rules: bool, **more_rules: bool) -> tuple[Any, Any]:
        of_left, of_right = _kind(lhs, tensor), _kind(rhs, tensor)
        key = of_left, of_right, rules
        if more_rules or None in key or (type(lhs) is not tensor and type(rhs) is not tensor):
            return check(self, lhs, rhs, *rules, **more_rules)
        if key not in known:
            made = check(self, lhs, rhs, *rules)
            pairs = list(zip((lhs, rhs), made, strict=True))
            if all(new.dtype == old.dtype for old, new in pairs if type(old) is tensor):
                known[key] = next((new.dtype for old, new in pairs if type(old) is not tensor), None)
            return made
        dtype = known[key]
        if dtype is not None:
            if type(lhs) is tensor:
                rhs = self.scalar_constant(rhs, dtype)
            else:
                lhs = self.scalar_constant(lhs, dtype)
        return self.broadcast_impl_value(lhs, rhs)

    return operands


def _kind(operand: Any, tensor: type) -> Any:
    """What a conversion depends on; None where that is not known."""
    if type(operand) is tensor:
        return operand.dtype.name  # type: ignore[attr-defined]
    return number_key(operand) if type(operand) in NUMBERS else None


def number_key(number: Any) -> tuple[type, Any]:
    """Tells 1 from 1.0 and True, and 0.0 from -0.0."""
    return type(number), number or str(number)


def _is_wider(data: np.ndarray, dtype: Any, pointer: type) -> bool:
    return data.itemsize > 1 and type(dtype) is not pointer and data.itemsize * 8 > dtype.primitive_bitwidth


def _handle(pointer: type) -> Callable[..., None]:
    def describe(self: Any, data: np.ndarray, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > 1 and _is_wider(data, dtype, pointer):
            self.__post_init__()  # raises

    return describe


def _binary_op(interpreter: Any, pointer: type) -> Callable[..., Any]:
    def compute(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
        if _is_wider(output, dtype, pointer):
            output = output.astype(interpreter._get_np_dtype(dtype))
        return interpreter.TensorHandle(output, dtype)

    return compute


def _tensor(core: Any) -> Callable[..., None]:
    """A type keeps what its tensors have of it; equal shapes are one object."""
    describe = core.tensor.__init__

    @functools.cache
    def described(shape: tuple[int, ...]) -> tuple[Any, Any]:
        value = core.tensor.__new__(core.tensor)
        describe(value, None, core.block_type(core.int32, list(shape)) if shape else core.int32)
        return value.shape, value.numel

    def kept(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type = handle, type
        try:
            self.shape, self.numel, self.dtype = type.of_tensors
        except AttributeError:
            type.of_tensors = *described(type.sizes if type.is_block() else ()), type.scalar
            self.shape, self.numel, self.dtype = type.of_tensors

    return kept
