"""A tokenizer for a model that is a config.json alone: as large as the model's own, of made-up merges."""

from __future__ import annotations

import json
from itertools import chain, islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["write_tokenizer"]

_SPACE = "Ġ"  # how byte-level tokenizers write one


def write_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """Byte-level BPE of the size that the model's config.json says: every byte, pairs of letters, words of four. Tokens
    from the lower of its two special ids on are special, and those above the higher one are none.
    """
    specials = sorted((config["bos_token_id"], config["eos_token_id"]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [*product([_SPACE], ascii_lowercase), *product(ascii_lowercase, ascii_lowercase)]
    syllables = [a + b for a, b in pairs]
    merges = list(islice(chain(pairs, product(syllables, syllables)), specials[0] - len(alphabet)))
    vocabulary = dict.fromkeys([*alphabet, *(a + b for a, b in merges)])
    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = [f"<|special_{i}|>" for i in range(len(ids), specials[1] + 1)]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names[config["eos_token_id"] - len(ids)]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
