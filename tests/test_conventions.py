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


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_forbidden_call(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = [(_dotted(call.func), call.lineno) for call in calls]
    found = {(name, line) for name, line in names if name in FORBIDDEN_CALLS or name.endswith("recv_pyobj")}
    where = str(path.relative_to(PACKAGE))
    assert {(name, line) for name, line in found if (where, name) not in ALLOWED_CALLS} == set()


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


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
