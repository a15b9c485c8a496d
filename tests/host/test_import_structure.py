"""What transformers reads in the files of its models is kept, and is what it would read."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap

import pytest

from ringcore.host.import_structure import has_import_structure, kept_import_structure

REAL = """
    from pathlib import Path
    from ringcore.host.import_structure import kept_import_structure

    with kept_import_structure():
        import transformers
        import transformers.models
    from transformers.utils import import_utils

    define, models = import_utils.define_import_structure, Path(transformers.__file__).parent / "models"
    for given, prefix in ((models, "models"), (str(models / "__init__.py"), None), (models / "llama", "of.llama")):
        assert define(given, prefix) == define.__wrapped__(given, prefix)
    define(models, "models").clear()
    assert len(define(models)) > 1
    print(transformers.LlamaConfig.__name__, type(import_utils.__loader__).__name__)
"""
# As much of transformers as is replaced: it reads a file of its models.
MADE = {
    "__init__.py": "",
    "utils/__init__.py": "",
    "utils/import_utils.py": """
        from pathlib import Path

        READ = []

        def define_import_structure(module_path, prefix=None):
            READ.append(module_path)
            return {frozenset({"torch", "vision"}): {"a.b": set(Path(module_path, "names").read_text().split())}}
    """,
    "models/names": "One Other",
}


def is_made(name):
    return name == "transformers" or name.startswith("transformers.")


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The folder of a package in the place of transformers."""
    for name, text in MADE.items():
        file = tmp_path / "packages" / "transformers" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    own = {name: sys.modules.pop(name) for name in list(sys.modules) if is_made(name)}
    yield tmp_path / "packages" / "transformers"
    for name in [name for name in sys.modules if is_made(name)]:
        del sys.modules[name]
    sys.modules.update(own)


def use(folder):
    """-> how often it is read, and what is found, by an import that is the first of its process."""
    for name in [name for name in sys.modules if is_made(name)]:
        del sys.modules[name]
    with kept_import_structure():
        module = importlib.import_module("transformers.utils.import_utils")
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    found = [module.define_import_structure(folder / "models", prefix) for prefix in (None, "of")]
    for structure, name in zip(found, ("a.b", "of.a.b"), strict=True):
        assert structure == {frozenset({"torch", "vision"}): {name: structure[frozenset({"torch", "vision"})][name]}}
    return len(module.READ), sorted(found[0][frozenset({"torch", "vision"})]["a.b"])


def test_of_transformers_itself(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(REAL)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.stdout.splitlines() == ["LlamaConfig SourceFileLoader"], done.stderr


def test_it_is_read_once_until_the_folder_changes(made):
    assert use(made) == (1, ["One", "Other"])
    assert use(made) == (0, ["One", "Other"])
    names = made / "models" / "names"
    names.write_text("New")
    os.utime(names, (1 << 31, 1 << 31))
    assert use(made) == (1, ["New"])


@pytest.mark.parametrize("content", ["", "[]", '{"key": 1}', "[1]", "{}"])
def test_what_cannot_be_read_is_read_anew(made, content):
    use(made)
    (kept,) = (made.parents[1] / "ringcore").glob("*/*.json")
    whole = json.loads(kept.read_text())
    kept.write_text(json.dumps(whole | {"structure": [1]}) if content == "[1]" else content)
    assert use(made) == (1, ["One", "Other"])
    assert json.loads(kept.read_text()) == whole


def test_without_a_folder_to_keep_it(made, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(made / "models" / "names"))
    for _ in range(2):
        assert use(made) == (1, ["One", "Other"])


def test_whether_it_is_kept(made, monkeypatch):
    assert not has_import_structure()
    use(made)
    assert has_import_structure()
    (made / "models" / "other").write_text("")
    os.utime(made / "models" / "other", (1 << 31, 1 << 31))
    assert not has_import_structure()
    monkeypatch.setenv("XDG_CACHE_HOME", str(made / "models" / "names"))
    assert has_import_structure(), "it cannot be kept: nothing is to be read ahead"
    monkeypatch.setattr(sys, "path", [])
    assert has_import_structure(), "nothing is installed"


def ask_for_packages(folder):
    file = folder / "utils" / "import_utils.py"
    own = textwrap.dedent(MADE["utils/import_utils.py"])
    file.write_text(f"import importlib.metadata\nPACKAGES = importlib.metadata.packages_distributions()\n{own}")


def test_packages_are_asked_for_once_until_others_are_installed(made, monkeypatch):
    asked = []

    def packages_distributions():
        asked.append(len(asked))
        return {"package": [f"Distribution-{len(asked)}"]}

    monkeypatch.setattr(importlib.metadata, "packages_distributions", packages_distributions)
    ask_for_packages(made)

    def found():
        use(made)
        assert importlib.metadata.packages_distributions is packages_distributions
        return sys.modules["transformers.utils.import_utils"].PACKAGES

    assert found() == found() == {"package": ["Distribution-1"]}
    (made.parent / "one-1.0.dist-info").mkdir()
    assert found() == found() == {"package": ["Distribution-2"]}
    (made.parent / "one-1.0.dist-info").rename(made.parent / "one-1.1.dist-info")
    assert found() == {"package": ["Distribution-3"]}
    (made.parent / "other").mkdir()  # of no distribution
    monkeypatch.setattr(sys, "path", [*sys.path, "/proc/self/task/0/no", "/nowhere"])
    assert found() == {"package": ["Distribution-3"]}


def test_packages_without_a_folder_to_keep_them(made, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(made / "models" / "names"))
    ask_for_packages(made)
    use(made)
    assert importlib.metadata.packages_distributions() == sys.modules["transformers.utils.import_utils"].PACKAGES
