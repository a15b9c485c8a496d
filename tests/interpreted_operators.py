"""Arithmetic of `interpreted_triton` between values of one type, or with a number that is known to take it: what it
comes to without asking the semantic what types it has again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from interpreted_values import NUMBERS, number_key

# The operator -> what the interpreter computes by, the semantic's rules for its operands, and whether the tensor is the
# second of them.
_OPERATORS: dict[str, tuple[np.ufunc, tuple[bool, ...], bool]] = {
    "__add__": (np.add, (True, True), False),
    "__radd__": (np.add, (True, True), True),
    "__sub__": (np.subtract, (True, False), False),
    "__mul__": (np.multiply, (), False),
    "__rmul__": (np.multiply, (), True),
    "__and__": (np.bitwise_and, (), False),
}


def keep_operators(interpreter: Any, core: Any, known: dict[tuple[Any, ...], Any]) -> None:
    """known: of `interpreted_values.keep_values`."""
    for name, of_operator in _OPERATORS.items():
        own = getattr(core.tensor, name).__wrapped__
        setattr(core.tensor, name, core.builtin(_operator(own, *of_operator, known, interpreter, core)))


def _operator(
    own: Callable[..., Any],
    compute: np.ufunc,
    rules: tuple[bool, ...],
    is_second: bool,
    known: dict[tuple[Any, ...], Any],
    interpreter: Any,
    core: Any,
) -> Callable[..., Any]:
    tensor, made_by = core.tensor, interpreter.InterpreterBuilder

    def alike(value: Any, other: Any, semantic: Any) -> Any:
        """The other operand as a tensor of the type of the value; None where that is not known."""
        dtype = value.dtype
        if type(other) is core.constexpr:
            other = other.value
        if type(other) is tensor:
            return other if other.dtype is dtype else None
        if type(other) not in NUMBERS:
            return None
        key = (number_key(other), dtype.name) if is_second else (dtype.name, number_key(other))
        return semantic.scalar_constant(other, dtype) if known.get((*key, rules)) is dtype else None

    def operator(self: Any, other: Any, _semantic: Any = None) -> Any:
        dtype, builder = self.dtype, _semantic.builder
        is_number = type(dtype) is core.dtype and (
            dtype.is_int() or (dtype.is_floating() and compute is not np.bitwise_and)
        )
        if is_number and type(builder) is made_by and not builder.options.sanitize_overflow:
            second = alike(self, other, _semantic)
            if second is not None:
                pair = (second, self) if is_second else (self, second)
                lhs, rhs = _semantic.broadcast_impl_value(*pair)
                return tensor(builder.binary_op(lhs.handle, rhs.handle, compute), lhs.type)
        return own(self, other, _semantic=_semantic)

    return operator
