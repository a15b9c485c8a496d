"""Small tokenizers trained on the spot: byte-level BPE as GPT-2 has it, and SentencePiece BPE as Llama 2 has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café — 東京 🙂🙂 ok",
    "print(x); 1234 + 5678",
    "a  b   c\n\nd",
]
SPECIAL = ["<|end|>", "<s>", "<|user|>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Ids 0 to 2 are <unk>, <s> and </s>; then the 256 bytes; then pieces, the best merge first."""
    letters = sorted({c for text in WORDS[:1] for c in text if c != " "} | {"▁"})
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "x"), ("▁", "f"), ("▁f", "ox"), ("▁", "▁"), ("f", "o")]
    pieces = [*letters, *("".join(merge) for merge in merges)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def tokenizer_folder(
    folder: Path, tokenizer: Tokenizer | None = None, template: str | None = None, **config: Any
) -> Path:
    folder.mkdir(exist_ok=True)
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def _keys(pairs: list[tuple[str, str, Any]]) -> list[tuple[str, str, Any]]:
    return [(f"tokenizer.ggml.{key}", kind, item) for key, kind, item in pairs]


def byte_level_keys(pre: str = "gpt-2", **changed: Any) -> list[tuple[str, str, Any]]:
    """The vocabulary of `byte_level()` and one unused id, as llama.cpp's converter writes them."""
    made = byte_level()
    ids = made.get_vocab()
    vocab = sorted(ids, key=lambda token: ids[token])
    types = [3 if token in SPECIAL else 4 if token == "<tool>" else 1 for token in vocab]
    state = json.loads(made.to_str())
    pairs = {
        "model": ("str", "gpt2"),
        "pre": ("str", pre),
        "tokens": ("[str]", [*vocab, "[PAD999]"]),
        "token_type": ("[i32]", [*types, 5]),
        "merges": ("[str]", [" ".join(merge) for merge in state["model"]["merges"]]),
        "eos_token_id": ("u32", made.token_to_id("<|end|>")),
        "bos_token_id": ("u32", made.token_to_id("<s>")),
    } | changed
    return _keys([(key, *item) for key, item in pairs.items() if item is not None])


def sentencepiece_keys(merges: bool = True, **changed: Any) -> list[tuple[str, str, Any]]:
    """The vocabulary of `sentencepiece()`; without `merges`, only the scores tell them."""
    model = json.loads(sentencepiece().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    joined = ["".join(merge) for merge in model["merges"]]
    pairs = {
        "model": ("str", "llama"),
        "tokens": ("[str]", tokens),
        "token_type": ("[i32]", [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]),
        "scores": ("[f32]", [-float(joined.index(t)) if t in joined else -1e4 for t in tokens]),
        "merges": ("[str]", [" ".join(merge) for merge in model["merges"]]) if merges else None,
        "unknown_token_id": ("u32", 0),
        "bos_token_id": ("u32", 1),
        "eos_token_id": ("u32", 2),
    } | changed
    return _keys([(key, *item) for key, item in pairs.items() if item is not None])
