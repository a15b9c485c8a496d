"""Whatever lies in a model's folder under a name that is read: an error at once, nothing that is waited for."""

import os
import signal
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
from raw_files import model_folder, tiny_gguf, tiny_metadata
from tokenizers_made import byte_level, tokenizer_folder

from ringcore.checkpoint import find_model, gguf_header, read_gguf_header, read_model_spec
from ringcore.checkpoint.model_file import open_model_file, read_model_file
from ringcore.checkpoint.tokenizer import load_tokenizer
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES

DEADLINE_S = 60  # an opening that waits would wait for ever


@pytest.fixture(autouse=True)
def deadline():
    def expired(number, frame):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(DEADLINE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_link_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.parent.with_suffix(".fifo"))
    path.symlink_to(path.parent.with_suffix(".fifo"))


def a_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(before)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_directory(path: Path) -> None:
    path.mkdir()


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


NO_FILES = [a_fifo, a_link_to_a_fifo, a_socket, a_device, a_directory, a_link_to_itself]
NAMES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "weights.safetensors",
    "model.safetensors.index.json",
    "model-1.safetensors",
    "x.gguf",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "merges.txt",
]


def whole_folder(folder: Path, name: str) -> Path:
    """A model that is read, with a place for `name`."""
    model_folder(folder, eos_token_id=None)
    tokenizer_folder(folder, byte_level())
    if name in ("weights.safetensors", "model.safetensors.index.json", "x.gguf", "model-1.safetensors"):
        (folder / "model.safetensors").unlink()
    if name == "model-1.safetensors":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    if name == "x.gguf":
        (folder / "config.json").unlink()
    if name == "merges.txt":
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.json").write_text("{}")
    return folder


def load(folder: Path) -> None:
    read_model_spec(find_model(folder), FAMILIES)
    load_tokenizer(folder)


@pytest.mark.parametrize("make", NO_FILES)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_refused_by_its_name(tmp_path, name, make):
    folder = whole_folder(tmp_path / "m", name)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(
        ModelLoadError, match=rf"{name}: (is a .*regular file is needed|cannot be read: Too many)"
    ) as caught:
        load(folder)
    assert caught.value.details["path"] == str(folder / name)


def test_a_gguf_file_that_is_none(tmp_path):
    os.mkfifo(tmp_path / "x.gguf")
    for read in (find_model, load_tokenizer):
        with pytest.raises(ModelLoadError, match=r"x\.gguf: is a FIFO"):
            read(tmp_path / "x.gguf")
    os.mkfifo(tmp_path / "model")
    with pytest.raises(ModelLoadError, match=r"is no folder and no .gguf file"):
        find_model(tmp_path / "model")


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "m")

    def refuse(path, flags):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # root may read everything
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(ModelLoadError, match=f"{name}: cannot be read: Permission denied"):
            open_model_file(folder / name)


def test_the_size_is_looked_at_before_anything_is_read(tmp_path):
    file = tmp_path / "f"
    with file.open("wb") as sink:
        sink.truncate(1 << 40)
    with pytest.raises(ModelLoadError, match="larger than 100 bytes"):
        read_model_file(file, 100)
    file.write_bytes(b"x" * 100)
    assert read_model_file(file, 100) == b"x" * 100


def test_a_file_that_says_it_is_empty_and_is_not():
    with pytest.raises(ModelLoadError, match="larger than 10 bytes"):
        read_model_file("/proc/self/maps", 10)


def test_a_gguf_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    path = tiny_gguf(tmp_path / "x.gguf", tiny_metadata(), {"token_embd.weight": np.ones((16, 32))})
    scalar = gguf_header._Parser._scalar

    def shrink_first(parser, kind):
        os.truncate(path, 6)
        return scalar(parser, kind)

    monkeypatch.setattr(gguf_header._Parser, "_scalar", shrink_first)
    monkeypatch.setattr(gguf_header, "_READ_BYTES", 4)
    with pytest.raises(ModelLoadError, match=r"truncated: it had .* bytes and ends at 6"):
        read_gguf_header(path)


def test_a_gguf_header_is_bounded(tmp_path):
    """In a file that is all holes a string may be of any length."""
    path = tiny_gguf(tmp_path / "x.gguf", [("key", "str", "")], {})
    data = bytearray(path.read_bytes())
    at = data.index(b"key") + 3 + 4  # the length of the value, behind its type
    data[at : at + 8] = (1 << 39).to_bytes(8, "little")
    path.write_bytes(data)
    os.truncate(path, 1 << 40)
    with pytest.raises(ModelLoadError, match="more than the 134217728 allowed"):
        read_gguf_header(path)


def test_the_entries_of_a_gguf_header_are_bounded(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 20, 0))
    os.truncate(path, 1 << 40)
    with pytest.raises(ModelLoadError, match="it claims 1048576 tensors and 0 keys, 262144 are allowed"):
        read_gguf_header(path)
