"""Files of at most 300 lines, functions of at most 40 without their docstring. What is larger is named here, with the reason.

A Triton kernel is one function by nature: what it calls is compiled into it, and its arguments take a line each.
"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ringcore"
FILE_LINES, FUNCTION_LINES = 300, 40

# The most lines that a file may have, and why it is one file.
FILES: dict[str, tuple[int, str]] = {}
FUNCTIONS: dict[str, tuple[int, str]] = {}


def test_files():
    found = {path: len((PACKAGE / path).read_text().splitlines()) for path in _paths()}
    assert _over(found, FILE_LINES, FILES) == {}
    assert _needless(found, FILE_LINES, FILES) == []


def test_functions():
    found = {}
    for path in _paths():
        for function in ast.walk(ast.parse((PACKAGE / path).read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(function):
                found[f"{path}:{function.name}"] = _num_lines(function)
    assert _over(found, FUNCTION_LINES, FUNCTIONS) == {}
    assert _needless(found, FUNCTION_LINES, FUNCTIONS) == []


def _over(found: dict[str, int], limit: int, exceptions: dict[str, tuple[int, str]]) -> dict[str, int]:
    return {name: lines for name, lines in found.items() if lines > exceptions.get(name, (limit, ""))[0]}


def _needless(found: dict[str, int], limit: int, exceptions: dict[str, tuple[int, str]]) -> list[str]:
    """Exceptions of what is gone, or is no longer too large."""
    return [name for name in exceptions if found.get(name, 0) <= limit]


def _paths() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines
