"""What is asked: synthetic prompts of given lengths, or the lines of a file."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Protocol

import msgspec

from ringcore.checkpoint.tokenizer import Tokenizer
from ringcore.errors import InvalidRequestError
from ringcore.testing.jsonl import bad_line, read_jsonl

__all__ = ["BenchRequest", "Lengths", "PromptShape", "make_prompts", "read_dataset"]

_NUM_WORDS = 512  # different tokens of a synthetic prompt
_MAX_TRIES = 64  # to find a text of exactly so many tokens
# For services whose tokenizer is not known: words that most tokenizers have as one token each.
_PLAIN_WORDS = (
    "the", "of", "and", "to", "in", "is", "was", "for", "on", "as", "with", "he", "be", "at", "by", "his", "this",
    "not", "are", "but", "from", "or", "have", "an", "they", "which", "one", "you", "all", "her", "she", "there", "we",
    "would", "their", "him", "been", "has", "when", "who", "will", "no", "more", "if", "out", "so", "up", "said",
    "its", "about", "than", "into", "them", "can", "only", "other", "time", "new", "some", "could", "these", "two",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: a text, token ids, or the messages of a conversation, and how many tokens are to follow."""

    prompt: str | list[int] | list[dict[str, Any]]
    max_tokens: int
    num_prompt_tokens: int | None = None  # None: the answer says

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], dict)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, from `low` to `high`, all equally likely."""

    low: int
    high: int

    @classmethod
    def of(cls, option: str, text: str) -> Lengths:
        """ "512", or "128-1024". Raises `InvalidRequestError`."""
        low, dash, high = text.partition("-")
        parts = [low, high if dash else low]
        if not all(part.isdecimal() for part in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
            raise InvalidRequestError(
                f"{option}={text!r}: give a number of tokens, or two as in 128-1024", field=option, value=text
            )
        return cls(int(parts[0]), int(parts[1]))

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class PromptShape:
    """prefix_tokens: of each prompt's beginning, which it shares with others; one of `num_prefixes` texts."""

    prompt_tokens: Lengths
    output_tokens: Lengths
    prefix_tokens: int = 0
    num_prefixes: int = 1


def make_prompts(
    num: int, shape: PromptShape, tokenizer: Tokenizer | None, *, as_text: bool, is_chat: bool, seed: int
) -> list[BenchRequest]:
    """Random prompts, the same ones for the same arguments; without a shared prefix none begins like another.

    With a tokenizer each has exactly the tokens that it is to have: as ids, or as a text (`as_text`, and for a chat,
    whose template adds more) that is encoded to so many. Without one each token is a common word.
    Raises `InvalidRequestError`.
    """
    if not 0 <= shape.prefix_tokens < shape.prompt_tokens.low:
        raise InvalidRequestError(
            f"prefix_tokens={shape.prefix_tokens}: give fewer than prompt_tokens, {shape.prompt_tokens.low}",
            field="prefix_tokens",
            value=shape.prefix_tokens,
        )
    source = random.Random(seed)
    words: _Words = _PlainWords() if tokenizer is None else _TokenWords(tokenizer, source)
    prefixes = [words.draw(shape.prefix_tokens, source) for _ in range(max(shape.num_prefixes, 1))]
    requests = []
    for _ in range(num):
        num_tokens, max_tokens = shape.prompt_tokens.draw(source), shape.output_tokens.draw(source)
        prefix = source.choice(prefixes)
        prompt = words.prompt(prefix, num_tokens - len(prefix), source, as_text=as_text or is_chat)
        known = None if tokenizer is None or is_chat else num_tokens
        requests.append(BenchRequest(_as_chat(prompt) if is_chat else prompt, max_tokens, known))
    return requests


def _as_chat(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


class _Words(Protocol):
    """Makes prompts of parts. A part is what the maker alone can read."""

    def draw(self, num: int, source: random.Random) -> list[Any]:
        """A part of so many random tokens."""
        ...

    def prompt(self, prefix: list[Any], num: int, source: random.Random, *, as_text: bool) -> str | list[int]:
        """This part, and `num` random tokens after it."""
        ...


class _PlainWords:
    def draw(self, num: int, source: random.Random) -> list[Any]:
        return source.choices(_PLAIN_WORDS, k=num)

    def prompt(self, prefix: list[Any], num: int, source: random.Random, *, as_text: bool) -> str | list[int]:
        return " ".join([*prefix, *self.draw(num, source)])


class _TokenWords:
    """Tokens that are one plain word or letter each, and stay that when they are encoded again."""

    def __init__(self, tokenizer: Tokenizer, source: random.Random) -> None:
        self._tokenizer = tokenizer
        ids = source.sample(range(tokenizer.vocab_size), tokenizer.vocab_size)
        self._ids = list(islice((id_ for id_ in ids if self._is_word(id_)), _NUM_WORDS))
        if not self._ids:
            raise InvalidRequestError("prompts: this tokenizer has no plain word; give a dataset", field="dataset")

    def _is_word(self, token_id: int) -> bool:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text.strip().isalpha() and text.isascii() and self._encode(text) == [token_id]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def draw(self, num: int, source: random.Random) -> list[Any]:
        return source.choices(self._ids, k=num)

    def prompt(self, prefix: list[Any], num: int, source: random.Random, *, as_text: bool) -> str | list[int]:
        if not as_text:
            return prefix + self.draw(num, source)
        ids, wanted = prefix + self.draw(num, source), len(prefix) + num
        for _ in range(_MAX_TRIES):  # two tokens side by side may be one, once they are encoded again
            text = self._tokenizer.decode(ids)
            ids = self._encode(text)
            if len(ids) == wanted:
                return text
            ids = ids[:wanted] + self.draw(wanted - len(ids[:wanted]), source)
        raise InvalidRequestError(
            f"prompts: found no text of exactly {wanted} tokens; give a dataset", field="prompt_tokens"
        )


class _Line(msgspec.Struct, frozen=True):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


def read_dataset(
    file: str | os.PathLike[str], num: int | None, output_tokens: Lengths, tokenizer: Tokenizer | None, seed: int
) -> list[BenchRequest]:
    """The first `num` lines, over and over if there are fewer; all of them with None. A line is a JSON object with a
    "prompt" (text or token ids) or "messages", and perhaps "max_tokens". Raises `InvalidRequestError` naming the line.
    """
    source, requests = random.Random(seed), []
    for number, line in read_jsonl(file, _Line, "dataset"):
        if (line.prompt is None) == (line.messages is None):
            raise bad_line(f"dataset {os.fspath(file)!r}", number, "prompt", "give it, or messages")
        max_tokens = output_tokens.draw(source) if line.max_tokens is None else line.max_tokens
        asked = line.messages if line.prompt is None else line.prompt
        assert asked is not None, "one of both is there"
        requests.append(BenchRequest(asked, max_tokens, _num_tokens(line.prompt, tokenizer)))
    if not requests:
        raise InvalidRequestError(f"dataset {os.fspath(file)!r}: it has no requests", field="dataset", value=str(file))
    return requests if num is None else list(islice(cycle(requests), num))


def _num_tokens(prompt: str | list[int] | None, tokenizer: Tokenizer | None) -> int | None:
    if isinstance(prompt, list):
        return len(prompt)
    return None if prompt is None or tokenizer is None else len(tokenizer.encode(prompt))
