"""Extension modules of one name, as Triton's launchers are: each keeps its own function."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest
from triton.runtime import build

from ringcore.kernels.launch.launcher_modules import copy_loaded_modules

_SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *none) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "same_name", NULL, -1, methods};
PyMODINIT_FUNC PyInit_same_name(void) { return PyModule_Create(&module); }
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler")
@pytest.mark.skipif(not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="no headers of Python")
def test_a_module_that_is_loaded_again_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    copy_loaded_modules()
    copy_loaded_modules()  # changes nothing
    assert not hasattr(build._load_module_from_path.__wrapped__, "__wrapped__")  # type: ignore[attr-defined]
    first, second, first_again = (build.compile_module_from_src(_SOURCE % n, "same_name") for n in (1, 2, 1))
    assert [first.launch(), second.launch(), first_again.launch()] == [1, 2, 1]
    # Without a copy the module that was loaded last takes what is loaded again.
    monkeypatch.setattr(build, "_load_module_from_path", build._load_module_from_path.__wrapped__)  # type: ignore[attr-defined]
    third, first_again = (build.compile_module_from_src(_SOURCE % n, "same_name") for n in (3, 1))
    assert third.launch() == 1
