"""Builds a tokenizer from the vocabulary in a GGUF file's metadata."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ringcore.checkpoint.gguf_header import read_gguf_header
from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.tokenizer_files import TokenizerFiles
from ringcore.errors import ModelLoadError

__all__ = ["read_gguf_tokenizer"]

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

# tokenizer.ggml.pre: the pre-tokenizer. GPT-2's split is part of ByteLevel.
_GPT2 = ("default", "gpt-2", "mpt", "olmo", "jais", "phi-2", "gpt2")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")  # GPT-2's, after splitting digits individually
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx")
_QWEN2 = ("qwen2", "deepseek-r1-qwen", "megrez")
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def read_gguf_tokenizer(path: str) -> TokenizerFiles:
    """The tokenizer and the chat template in a GGUF file.

    Raises `ModelLoadError` where the file has none, or one of a kind that is not known: `tokenizer.ggml.model`
    "gpt2" (byte-level BPE, by the splits listed above) and "llama" (SentencePiece BPE) are.
    """
    meta = Metadata(read_gguf_header(path, long_arrays=True).metadata, path)
    kind = meta.text("tokenizer.ggml.model")
    tokens = _strings(meta, "tokenizer.ggml.tokens")
    types = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise meta.error("tokenizer.ggml.token_type", f"has {len(types)} values for {len(tokens)} tokens")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(meta, tokens, types)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(meta, tokens, types), True
    else:
        raise meta.error("tokenizer.ggml.model", f"is {kind!r}; known: gpt2, llama; give the option tokenizer")
    _add_whole_tokens(backend, tokens, types)
    special = _special_tokens(meta, tokens)
    _add_bos_and_eos(meta, backend, special, adds_bos)
    template = meta.get("tokenizer.chat_template")
    return TokenizerFiles(path, backend, special, template if isinstance(template, str) else None)


def _strings(meta: Metadata, key: str) -> list[str]:
    value = meta.required(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise meta.error(key, "is no list of strings")
    return value


def _merges(meta: Metadata) -> list[tuple[str, str]]:
    pairs = [merge.split(" ") for merge in _strings(meta, "tokenizer.ggml.merges")]
    for pair in pairs:
        if len(pair) != 2:
            raise meta.error("tokenizer.ggml.merges", f"holds {' '.join(pair)!r}, two parts are needed")
    return [(left, right) for left, right in pairs]


def _bpe(meta: Metadata, **options: Any) -> models.BPE:
    try:
        return models.BPE(**options)
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelLoadError(f"{meta.path}: the vocabulary is not valid: {error}", path=meta.path) from error


def _byte_level(meta: Metadata, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    pre = meta.text("tokenizer.ggml.pre", "default")
    # Unused ids of the embedding ("[PAD151665]") are left out, as in Hugging Face's files.
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    backend = Tokenizer(_bpe(meta, vocab=vocab, merges=_merges(meta), ignore_merges=pre in _LLAMA3))
    backend.decoder = decoders.ByteLevel()
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _GPT2:
        backend.pre_tokenizer = plain
    elif pre in _DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    elif pre in _LLAMA3 or pre in _QWEN2:
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT if pre in _LLAMA3 else _QWEN2_SPLIT), behavior="isolated")
        unsplit = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, unsplit])
    else:
        known = ", ".join((*_GPT2, *_DIGITS, *_LLAMA3, *_QWEN2))
        raise meta.error("tokenizer.ggml.pre", f"is {pre!r}; known: {known}; give the option tokenizer")
    if pre in _QWEN2:
        backend.normalizer = normalizers.NFC()
    return backend, pre in _LLAMA3


def _sentencepiece(meta: Metadata, tokens: list[str], types: list[int]) -> Tokenizer:
    merges = _merges(meta) if "tokenizer.ggml.merges" in meta else _merges_by_score(meta, tokens, types)
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(_bpe(meta, vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    prefix = meta.flag("tokenizer.ggml.add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if prefix else "never", split=False
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(meta: Metadata, tokens: list[str], types: list[int]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary implies: every split of a token into two tokens, best score first."""
    scores = meta.required("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise meta.error("tokenizer.ggml.scores", f"does not have one score for each of {len(tokens)} tokens")
    ids = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind in (_NORMAL, _USER_DEFINED)}
    found: list[tuple[float, int, int, int, int, str, str]] = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-scores[token_id], -len(left), -len(right), ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_whole_tokens(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Adds control tokens (special) and user-defined tokens (plain), which match before pre-tokenization."""
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, kind in zip(tokens, types, strict=True)
            if kind == wanted and token
        ]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)


def _special_tokens(meta: Metadata, tokens: list[str]) -> dict[str, str]:
    special: dict[str, str] = {}
    for name, key in _SPECIAL_KEYS.items():
        if f"tokenizer.ggml.{key}" in meta:
            token_id = meta.integer(f"tokenizer.ggml.{key}", low=0, high=len(tokens) - 1)
            special[name] = tokens[token_id]
    return special


def _add_bos_and_eos(meta: Metadata, backend: Tokenizer, special: dict[str, str], adds_bos: bool) -> None:
    """Adds the post-processor with the BOS and EOS tokens that the file asks for."""
    bos = special.get("bos_token") if meta.flag("tokenizer.ggml.add_bos_token", adds_bos) else None
    eos = special.get("eos_token") if meta.flag("tokenizer.ggml.add_eos_token", False) else None
    ids = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    if ids:
        parts = [part for part in (bos, "$A", eos) if part is not None]
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=list(ids.items()))
