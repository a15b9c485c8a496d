"""Clients of npm, by node's own test runner.

npm install --prefix tests/clients/node
pytest tests/clients/test_node_clients.py --chaos-long
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long_form, pytest.mark.usefixtures("is_left_idle")]

FOLDER = Path(__file__).parent / "node"


@pytest.mark.parametrize("script", ["openai", "anthropic", "ai_sdk"])
def test_the_first_examples(service, script):
    if shutil.which("node") is None:
        pytest.skip("there is no node")
    if not (FOLDER / "node_modules").exists():
        pytest.skip("opt-in: npm install --prefix tests/clients/node")
    command = ["node", "--test", f"{script}.mjs"]
    environment = os.environ | {"SERVICE_URL": service.url}
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
