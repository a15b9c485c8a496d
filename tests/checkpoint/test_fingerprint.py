"""The name of a model's contents: equal for equal files, another for any that differ."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringcore.checkpoint.fingerprint import model_fingerprint
from ringcore.checkpoint.model_files import ModelFiles


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    config, weights = tmp_path / "config.json", [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    config.write_text("{}")
    for file in weights:
        file.write_bytes(bytes(10 << 20))
        os.utime(file, ns=(0, 0))
    return ModelFiles("safetensors", str(tmp_path), str(config), [str(file) for file in weights], str(tmp_path))


def changed(file: str, at: int, keep_time: bool = True) -> None:
    contents = bytearray(Path(file).read_bytes())
    contents[at] ^= 1
    Path(file).write_bytes(contents)
    if keep_time:
        os.utime(file, ns=(0, 0))


def test_it_is_of_the_contents(files: ModelFiles, tmp_path: Path) -> None:
    assert model_fingerprint(files, 0) == model_fingerprint(files, 1)  # the seed is of dummy weights
    names = [model_fingerprint(files, 0)]
    for at in (0, 5_042_100, -1):  # of samples
        changed(files.weight_files[1], at)
        names.append(model_fingerprint(files, 0))
    changed(files.weight_files[0], 400_000, keep_time=False)  # of no sample
    names.append(model_fingerprint(files, 0))
    Path(files.config_path or "").write_text('{"rope_theta": 2}')
    names.append(model_fingerprint(files, 0))
    assert len(set(names)) == len(names)
    assert all(len(name) == 32 for name in names)


def test_dummy_weights_are_of_their_seed(files: ModelFiles) -> None:
    dummy = ModelFiles("dummy", files.path, files.config_path, [], files.tokenizer_path)
    assert model_fingerprint(dummy, 0) != model_fingerprint(dummy, 1)
    assert model_fingerprint(dummy, 0) == model_fingerprint(dummy, 0)
