"""Reads a tokenizer's files: tokenizer.json, tokenizer_config.json and the chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from ringcore.checkpoint.metadata import Metadata, read_json
from ringcore.checkpoint.model_file import check_model_file, path_exists, read_model_file
from ringcore.errors import ModelLoadError

__all__ = ["TokenizerFiles", "check_tokenizer_folder", "read_tokenizer_folder"]

TOKENIZER_MAX_BYTES = 256 << 20
TOKENIZER_CONFIG_MAX_BYTES = 16 << 20  # it may repeat every added token
TEMPLATE_MAX_BYTES = 1 << 20
# Vocabulary formats of older layouts, each with its files.
_CONVERTIBLE = (("tokenizer.model",), ("vocab.json", "merges.txt"), ("tekken.json",))
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The parsed tokenizer files of a model. `special_tokens` maps names such as "eos_token" to their text."""

    path: str
    backend: Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None


def read_tokenizer_folder(folder: Path) -> TokenizerFiles:
    """The tokenizer in a folder. Raises `ModelLoadError` where a file is missing, too large or broken.

    Only tokenizer.json decides which special tokens are added to a text, as in transformers 5: the fields
    add_bos_token and add_eos_token of tokenizer_config.json are obsolete and ignored.
    """
    config_path = folder / "tokenizer_config.json"
    raw = read_json(config_path, TOKENIZER_CONFIG_MAX_BYTES) if path_exists(config_path) else {}
    config = Metadata(raw, str(config_path))
    special = _special_tokens(config, folder)
    template = _chat_template(config, folder)
    file = folder / "tokenizer.json"
    if not path_exists(file):
        return TokenizerFiles(str(folder), _convert_with_transformers(folder), special, template)
    backend = _load(file)
    # Truncation and padding saved by a training run would alter prompts.
    backend.no_truncation()
    backend.no_padding()
    return TokenizerFiles(str(folder), backend, special, template)


def _load(file: Path) -> Tokenizer:
    data = read_model_file(file, TOKENIZER_MAX_BYTES)
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelLoadError(f"{file}: not a valid tokenizer: {error}", path=str(file)) from error


def _convert_with_transformers(folder: Path) -> Tokenizer:
    """Converts a folder in an older layout with transformers."""
    check_tokenizer_folder(folder)
    from transformers import AutoTokenizer  # the import takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        backend: Tokenizer = tokenizer.backend_tokenizer
    except Exception as error:  # of many types, depending on the layout
        raise ModelLoadError(
            f"{folder}: tokenizer.json is missing, and transformers cannot convert what is there: {error}",
            path=str(folder),
        ) from error
    return backend


def check_tokenizer_folder(folder: Path) -> None:
    """Checks for a tokenizer.json, or a vocabulary that transformers can convert and no file that blocks on open.

    Raises `ModelLoadError`.
    """
    if path_exists(folder / "tokenizer.json"):
        check_model_file(folder / "tokenizer.json")
        return
    if not any(all(path_exists(folder / name) for name in names) for names in _CONVERTIBLE):
        layouts = ", ".join(" with ".join(names) for names in _CONVERTIBLE)
        raise ModelLoadError(
            f"{folder}: tokenizer.json is missing, and so is what could be converted ({layouts}); give the option "
            "tokenizer, a folder that has one",
            path=str(folder),
        )
    vocabularies = {name for names in _CONVERTIBLE for name in names}
    for entry in folder.iterdir():
        if entry.name in vocabularies or not entry.is_dir():
            check_model_file(entry)


def _special_tokens(config: Metadata, folder: Path) -> dict[str, str]:
    """From tokenizer_config.json, else from special_tokens_map.json of older folders."""
    sources = [config]
    older = folder / "special_tokens_map.json"
    if path_exists(older):
        sources.append(Metadata(read_json(older), str(older)))
    special: dict[str, str] = {}
    for name in _SPECIAL:
        for source in sources:
            value = source.get(name)
            if isinstance(value, dict):  # an AddedToken as JSON
                value = value.get("content")
            if value is not None and not isinstance(value, str):
                raise source.error(name, f"is {value!r}, a token is needed")
            if value is not None:
                special[name] = value
                break
    return special


def _chat_template(config: Metadata, folder: Path) -> str | None:
    """chat_template.jinja, else the field of tokenizer_config.json, of several named templates the "default"."""
    file = folder / "chat_template.jinja"
    if path_exists(file):
        try:
            return read_model_file(file, TEMPLATE_MAX_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{file}: not UTF-8: {error}", path=str(file)) from error
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise config.error("chat_template", "is neither a string nor a list of named templates")
    return value
