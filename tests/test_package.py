"""What is built and installed: the wheel's contents, its metadata, the dependencies that are used."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from documented import python_blocks
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Of what is imported under another name.
IMPORTED_AS = {"pyzmq": "zmq", "huggingface-hub": "huggingface_hub"}


def imported() -> set[str]:
    """The packages that some module imports."""
    texts = [path.read_text() for path in (ROOT / "ringcore").rglob("*.py")]
    return {name for text in texts for name in re.findall(r"^\s*(?:import|from) (\w+)", text, re.M)}


def test_each_dependency_is_imported():
    names, used = [Requirement(one).name for one in PROJECT["dependencies"]], imported()
    assert [name for name in names if IMPORTED_AS.get(name, name) not in used] == []


def test_torch_is_bounded_by_what_is_tested():
    (torch,) = [Requirement(one) for one in PROJECT["dependencies"] if Requirement(one).name == "torch"]
    tested = re.search(r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    major, minor = map(int, tested.groups())
    assert torch.specifier.contains(f"{major}.{minor}.9")
    assert not torch.specifier.contains(f"{major}.{minor + 1}.0")


def test_another_system_is_named_at_the_import():
    code = "import sys; sys.platform = 'darwin'; import ringcore"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: ringcore runs on Linux alone, and this is darwin")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with what an installation puts there."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert "ringcore = ringcore.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    files = [path for path in (ROOT / "ringcore").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {name for name in names if not name.startswith(info)} == {str(path.relative_to(ROOT)) for path in files}
    assert "ringcore/py.typed" in names
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier")
    assert metadata.get_payload().startswith("# ringcore")


def test_the_command_and_the_page_of_the_wheel(installed):
    """As they are without the repository."""
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv[0] = 'ringcore'\n"
        "import ringcore; from ringcore.serve import chat_page; from ringcore.cli import main\n"
        "print(ringcore.__file__, len(chat_page.PAGE_PATHS))\n"
        "main()"
    )
    run = [sys.executable, "-c", code, str(installed), "--version"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, cwd=installed, env={})
    assert done.returncode == 0, done.stderr
    imported_from, version = done.stdout.splitlines()
    page = list((installed / "ringcore/serve/page").iterdir())
    assert imported_from == f"{installed / 'ringcore/__init__.py'} {len(page)}"
    assert version.startswith("ringcore 0.")


@pytest.mark.long_form
@pytest.mark.real_model
def test_the_program_of_the_readme_by_the_wheel(installed, smollm2):
    (program,) = python_blocks("README.md")
    code = f"import sys; sys.path.insert(0, {str(installed)!r})\n" + program.replace("path/to/model", smollm2)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=installed)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
