"""What is particular to a family stands in its record and its model class, and nowhere else."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from ringcore.checkpoint import Families, Family
from ringcore.families import FAMILIES
from ringcore.families.llama import LLAMA
from ringcore.families.qwen2 import QWEN2

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ringcore"
SOURCES = sorted(PACKAGE.rglob("*.py"))
RECORDS = sorted(path.stem for path in (PACKAGE / "families").glob("*.py") if path.stem != "__init__")
MODELS = "model_executor/models"

# The same words in other namespaces, and files that are written as users have them.
OTHER_MEANINGS = {
    ("checkpoint/gguf_tokenizer.py", "llama"): "a kind of tokenizer, in tokenizer.ggml.model",
    ("checkpoint/gguf_tokenizer.py", "qwen2"): "a way to split text, in tokenizer.ggml.pre",
    ("chat/formats.py", "qwen3"): "a format of reasoning",
    ("cli/serve.py", "qwen3"): "the same, in a flag's help",
    ("testing/models.py", "llama"): "the model_type of a config.json that is written",
    ("testing/models.py", "LlamaForCausalLM"): "the architecture of a config.json that is written",
}


def record(name: str) -> Family:
    return vars(importlib.import_module(f"ringcore.families.{name}"))[name.upper()]


def names_of(family: Family) -> list[str]:
    return [*family.architectures, *([family.gguf.name] if family.gguf is not None else [])]


def strings(path: Path) -> list[str]:
    """Every string of a module but its docstrings and `__all__`, parts of f-strings included."""
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if is_all or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            skipped.update(map(id, ast.walk(node)))
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in skipped]
    return [node.value for node in constants if isinstance(node.value, str)]


def test_no_other_module_has_a_name_of_a_family():
    names = {name for one in RECORDS for name in names_of(record(one))}
    assert len(names) >= 9
    word = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, sorted(names)))})(?![\w-])")
    found = set()
    for path in SOURCES:
        if path.parent != PACKAGE / "families" and word.search(path.read_text()):
            where = str(path.relative_to(PACKAGE))
            found |= {(where, name) for text in strings(path) for name in word.findall(text)}
    assert found == set(OTHER_MEANINGS)


def test_a_record_is_imported_by_the_table_and_its_model_class_alone():
    for path in [path for path in SOURCES if "families" in path.read_text()]:
        where = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ringcore.families."):
                name = node.module.removeprefix("ringcore.families.")
                assert where in ("families/__init__.py", f"{MODELS}/{name}.py")


@pytest.mark.parametrize("name", RECORDS)
def test_the_files_of_a_family_are_those_of_the_seam(name):
    """Its record, its model class, and a line in the table."""
    architecture = (ROOT / "ARCHITECTURE.md").read_text()
    row = re.search(r"^\| a model family \|([^|]*)\|", architecture, re.M)
    assert row is not None
    touched = re.findall(r"`([^`]+)`", row[1])
    assert touched == ["families/<x>.py", f"{MODELS}/<x>.py", "families/__init__.py"]
    assert all((PACKAGE / path.replace("<x>", name)).is_file() for path in touched)
    module, _, model = record(name).model.partition(":")
    assert module == f"ringcore.{MODELS}.{name}".replace("/", ".")
    assert f"\nclass {model}(" in (PACKAGE / MODELS / f"{name}.py").read_text()
    for one in record(name).architectures:
        assert FAMILIES[one] is record(name)


def test_one_question_whether_an_architecture_has_a_family():
    families = Families(LLAMA, QWEN2)
    assert families.native(["Other", "Qwen2ForCausalLM", "LlamaForCausalLM"]) == ("Qwen2ForCausalLM", QWEN2)
    assert families.native(["Other"]) is None
    assert families.architectures == ["LlamaForCausalLM", "Qwen2ForCausalLM"]
