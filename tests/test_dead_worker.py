"""What a run of the tests tells when one of its processes dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BOUND_S = 200.0


def test_a_run_whose_process_dies_fails_and_names_it(tmp_path):
    """With a file that it had finished before: xdist's own replacement for it would wait for ever."""
    (tmp_path / "test_first.py").write_text("def test_passes():\n    pass\n")
    (tmp_path / "test_second.py").write_text("import os\n\n\ndef test_ends():\n    os._exit(3)\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "xdist.plugin", "-n", "1", "--dist", "loadfile"]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST")}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=BOUND_S)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "worker 'gw0' crashed while running 'test_second.py::test_ends'" in run.stdout
    assert "worker gw0 crashed and worker restarting disabled" in run.stdout
