"""Layers of multi-token prediction of models of transformers on a GPU: drafts are those of plain torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "worker"))

from head_rows import drafted
from step_driver import make_config
from tiny_mtp import MTP_MODELS, MtpReference

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("model_type", MTP_MODELS)
def test_drafts(model_type, is_eager, tmp_path, monkeypatch):
    reference = MtpReference(model_type)
    folder = reference.save(tmp_path)
    reference.cut()
    options = {"device": "cuda", "block_size": 16, "enforce_eager": is_eager}
    config = make_config(folder, speculative={"method": "mtp", "num_drafts": 4}, **options)
    _, found = drafted(config, monkeypatch)
    assert [drafts for _, drafts in found] == [reference.drafts(tokens, 4) for tokens, _ in found]
