"""The documents: short where they promise it, every path and link real, every Python block a program."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("docs/**/*.md")])
MAX_LINES = {"ARCHITECTURE.md": 80, "README.md": 200}
ABOUT = {"ARCHITECTURE.md": ["engine_core", "worker"], "service.md": ["serve", "openai_api"]}

_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`|`([\w-]+\.(?:py|md|toml))`")
_TABLE = re.compile(r"^\| file of `([\w/]+/)` \|", re.M)
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("name", MAX_LINES)
def test_the_length(name):
    assert len((ROOT / name).read_text().splitlines()) <= MAX_LINES[name]


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_every_link_leads_somewhere(document):
    links = [link for link in _LINK.findall(document.read_text()) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize(
    "document", [ROOT / "ARCHITECTURE.md", ROOT / "docs" / "glossary.md", *ROOT.glob("docs/design/*.md")], ids=ids
)
def test_every_path_exists(document):
    """A path is relative to the project, to the package, or to the package that a table or the page is about."""
    text = document.read_text()
    folders = [ROOT, ROOT / "ringcore", *(ROOT / "ringcore" / folder for folder in _TABLE.findall(text))]
    folders += [ROOT / "ringcore" / folder for folder in ABOUT.get(document.name, ())]
    paths = [(whole or alone) for whole, alone in _PATH.findall(text)]
    missing = [
        path
        for path in paths
        if "<" not in path and not any((folder / path).exists() for folder in folders) and not _beside(path, text)
    ]
    assert missing == []


def _beside(path: str, text: str) -> bool:
    """Whether `x.py` stands in one row or sentence with `folder/y.py`, whose folder it is in."""
    if "/" in path:
        return False
    folders = {Path(whole).parent for whole, _ in _PATH.findall(text) if whole and whole.endswith(".py")}
    return any((ROOT / "ringcore" / folder / path).exists() for folder in folders)


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_python_blocks_are_programs(document):
    for block in _BLOCK.findall(document.read_text()):
        ast.parse(block)


def test_every_design_page_is_linked_from_its_room():
    architecture = (ROOT / "ARCHITECTURE.md").read_text()
    pages = [str(page.relative_to(ROOT)) for page in ROOT.glob("docs/design/*.md")]
    assert pages
    assert [page for page in pages if f"({page})" not in architecture] == []


def test_every_package_is_a_room():
    architecture = (ROOT / "ARCHITECTURE.md").read_text()
    inside = (ROOT / "ringcore").iterdir()
    rooms = [one.name for one in inside if one.name[0] not in "_." and (one.is_dir() or one.suffix == ".py")]
    assert rooms
    assert [room for room in rooms if f"`{room}{'' if room.endswith('.py') else '/'}`" not in architecture] == []
