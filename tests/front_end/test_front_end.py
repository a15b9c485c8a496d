"""What a front end knows to be wrong before it starts an engine."""

import sys

import pytest
from raw_files import model_folder

from ringcore import LLM, AsyncEngine
from ringcore.errors import ModelLoadError
from ringcore.executor.child_process import ChildProcess

MISSING = r"tokenizer\.json is missing, and so is what could be converted .*; give the option tokenizer"


@pytest.fixture
def no_process(monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("a process is started")

    monkeypatch.setattr(ChildProcess, "start", start)
    monkeypatch.setitem(sys.modules, "transformers", None)  # takes seconds to import


@pytest.mark.parametrize("engine", [LLM, AsyncEngine])
@pytest.mark.parametrize("beside", ["tokenizer_config.json", "vocab.json", None])
def test_a_missing_tokenizer_is_told_at_construction(tmp_path, no_process, engine, beside):
    folder = model_folder(tmp_path / "m")
    if beside is not None:
        (folder / beside).write_text("{}")
    with pytest.raises(ModelLoadError, match=MISSING):
        engine(str(folder), load_format="dummy")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ModelLoadError, match=rf"elsewhere: {MISSING}"):
        engine(str(folder), load_format="dummy", tokenizer=tmp_path / "elsewhere")
    with pytest.raises(ModelLoadError, match=r"give a folder with a tokenizer\.json"):
        engine(str(folder), load_format="dummy", tokenizer=tmp_path / "nothing")
