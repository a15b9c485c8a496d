"""What the code as a whole promises: no pickle, no wall clock, no heavy import, names that are complete."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ringcore"
SOURCES = sorted(PACKAGE.rglob("*.py"))

FORBIDDEN_CALLS = {
    "pickle.loads",
    "pickle.load",
    "cloudpickle.loads",
    "torch.load",
    "yaml.load",
    "marshal.loads",
    "os.system",
    "os.popen",
    "time.time",  # the wall clock jumps; deadlines are monotonic
    "eval",
    "exec",
    "socket.recv_pyobj",
}
ALLOWED_CALLS = {("executor/callables.py", "cloudpickle.loads")}  # what a parent sends down to its own worker


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _constexpr_texts(arguments: ast.arguments) -> list[str]:
    """The names of parameters of a kernel that are `constexpr` and have a text as their default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    return [
        parameter.arg
        for parameter, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True)
        if parameter.annotation is not None
        and _dotted(parameter.annotation).endswith("constexpr")
        and isinstance(default, ast.Constant)
        and isinstance(default.value, str)
    ]


class Module:
    """docstring: "" without one. calls: the names of what is called, and their lines."""

    def __init__(self, path: Path) -> None:
        tree = ast.parse(path.read_text())
        self.docstring = ast.get_docstring(tree) or ""
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self.text_defaults = [one for function in functions for one in _constexpr_texts(function.args)]
        self.calls = [(_dotted(node.func), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    """By path in the package."""
    return {str(path.relative_to(PACKAGE)): Module(path) for path in SOURCES}


def test_no_forbidden_call(modules):
    calls = [(where, *call) for where, module in modules.items() for call in module.calls]
    found = [one for one in calls if one[1] in FORBIDDEN_CALLS or one[1].endswith("recv_pyobj")]
    assert [one for one in found if one[:2] not in ALLOWED_CALLS] == []


def test_no_kernel_has_a_text_for_a_default(modules):
    """Triton 3.6 takes the default for an argument of the call and fails; 3.7, which tests compile with, does not."""
    found = [(where, *module.text_defaults) for where, module in modules.items() if module.text_defaults]
    assert found == []


def test_every_module_says_what_it_is(modules):
    assert [where for where, module in modules.items() if not module.docstring] == []


def test_no_two_test_files_have_one_name():
    """A file's directory is no package: pytest imports it by its name alone."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_public_names_are_there():
    module = importlib.import_module("ringcore")
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        module.nonsense  # noqa: B018


CONTROL = (
    "import ringcore, ringcore.front_end.llm, ringcore.engine_core.process, ringcore.executor.multiproc, ringcore.cli"
)


@pytest.mark.parametrize("code", ["import ringcore", CONTROL])
def test_the_control_column_imports_no_torch(code):
    check = f"{code}; import sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def test_no_environment_variable_is_read_in_a_mechanism():
    allowed = {"executor/child_boot.py", "executor/worker_proc.py", "executor/worker_host.py", "worker/entry.py"}
    allowed |= {"host/cache_folder.py"}  # where a user's caches are
    allowed |= {"front_end/parking/key.py"}  # what processes inherit
    readers = {
        str(path.relative_to(PACKAGE)) for path in SOURCES if re.search(r"os\.environ|os\.getenv", path.read_text())
    }
    assert readers <= allowed
