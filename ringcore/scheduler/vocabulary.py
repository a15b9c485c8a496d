"""Validates the token ids of requests against the model's vocabulary: no other id reaches a worker."""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringcore.errors import InvalidRequestError
from ringcore.params.field_checks import bad_field
from ringcore.params.sampling_params import MAX_BAD_WORDS, SamplingParams

__all__ = ["MAX_PROMPT_LOGPROBS", "Vocabulary"]

MAX_PROMPT_LOGPROBS = 4 << 20  # of one prompt, over all its positions: 48 MiB of its message
_INT32, _UINT32 = np.dtype(np.int32), np.dtype(np.uint32)  # numpy looks a type up in each call
_MAX_BAD_WORD_TOKENS = 2048  # 256 characters have fewer
_MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS  # with and without a leading space


class Vocabulary:
    """A model's token ids, 0 to `size` - 1, and the most logprobs that a request may ask for at one position.

    max_logprobs: -1 is the whole vocabulary.
    """

    def __init__(self, size: int, eos_token_ids: Sequence[int], max_logprobs: int) -> None:
        self.size = size
        self._eos_token_ids = list(eos_token_ids)
        self._max_logprobs = size if max_logprobs == -1 else max_logprobs

    def tokens(self, field: str, token_ids: Sequence[int] | bytes) -> np.ndarray:
        """The ids, each of them in the vocabulary: [n] int32, read-only. Raises `InvalidRequestError`.

        bytes: int32 each, which are not copied.
        """
        try:
            data = token_ids if isinstance(token_ids, bytes) else struct.pack(f"{len(token_ids)}i", *token_ids)
            tokens = np.frombuffer(data, _INT32)
        except (TypeError, ValueError, struct.error):  # not integers, or wider than 32 bits; a part of one
            raise self._not_in_vocabulary(field, token_ids) from None
        if len(tokens):
            unsigned = tokens.view(_UINT32)  # a negative id is a large one there
            if unsigned[unsigned.argmax()] >= self.size:  # in half of the time of max()
                raise self._not_in_vocabulary(field, tokens.tolist())
        return tokens

    def check(
        self, params: SamplingParams, bad_words_token_ids: Sequence[Sequence[int]], num_prompt_tokens: int
    ) -> None:
        """Raises `InvalidRequestError` for what this model cannot do, or if every token is masked."""
        if params.logprobs is not None:
            self._check_num_logprobs("logprobs", params.logprobs)
        if params.prompt_logprobs is not None:
            self._check_prompt_logprobs(params.prompt_logprobs, num_prompt_tokens)
        if params.logit_bias:
            self.tokens("logit_bias", list(params.logit_bias))
        if params.bad_words or bad_words_token_ids != []:
            self._check_bad_words(params, bad_words_token_ids)
        if params.allowed_token_ids is not None:
            self.tokens("allowed_token_ids", params.allowed_token_ids)
        if params.allowed_token_ids is not None or bad_words_token_ids:
            self._check_some_unmasked(params, bad_words_token_ids)

    def num_logprobs(self, asked: int) -> int:
        """The number of top logprobs that a field asks for: -1 is the whole vocabulary."""
        return self.size if asked == -1 else asked

    def _check_num_logprobs(self, field: str, asked: int) -> None:
        count = self.num_logprobs(asked)
        if count > self._max_logprobs:
            raise InvalidRequestError(
                f"{field}={asked}: asks for {count} tokens, and max_logprobs is {self._max_logprobs}; "
                "give fewer, or raise the engine's option max_logprobs (-1 is no bound)",
                field=field,
                value=asked,
                max_logprobs=self._max_logprobs,
            )
        if count > self.size:
            raise bad_field(field, asked, f"the vocabulary has {self.size} tokens; give at most so many, or -1 for all")

    def _check_prompt_logprobs(self, asked: int, num_prompt_tokens: int) -> None:
        self._check_num_logprobs("prompt_logprobs", asked)
        num_entries = (num_prompt_tokens - 1) * (1 + self.num_logprobs(asked))
        if num_entries > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"prompt_logprobs={asked}: for a prompt of {num_prompt_tokens} tokens these are {num_entries} numbers, "
                f"and at most {MAX_PROMPT_LOGPROBS} are reported; "
                f"give at most {MAX_PROMPT_LOGPROBS // (num_prompt_tokens - 1) - 1}, or a shorter prompt",
                field="prompt_logprobs",
                value=asked,
                num_prompt_tokens=num_prompt_tokens,
            )

    def _check_bad_words(self, params: SamplingParams, sequences: Sequence[Sequence[int]]) -> None:
        field = "bad_words_token_ids"
        if sequences == []:
            raise bad_field("bad_words", params.bad_words, f"give their token ids too, as {field}")
        if not isinstance(sequences, list | tuple) or len(sequences) > _MAX_BAD_SEQUENCES:
            raise bad_field(field, sequences, f"give a list of at most {_MAX_BAD_SEQUENCES} lists of token ids")
        for sequence in sequences:
            if not isinstance(sequence, list | tuple) or not 1 <= len(sequence) <= _MAX_BAD_WORD_TOKENS:
                raise bad_field(field, sequence, f"give lists of 1 to {_MAX_BAD_WORD_TOKENS} token ids")
            self.tokens(field, sequence)
            if bool in map(type, sequence):
                raise bad_field(field, sequence, "give integers; a bool is no token id")

    def _check_some_unmasked(self, params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> None:
        """For the first token of a completion, and so for every later one that no longer bad word masks."""
        masked = {sequence[0] for sequence in bad_words if len(sequence) == 1}
        if params.min_tokens:
            masked.update(params.stop_token_ids or [], [] if params.ignore_eos else self._eos_token_ids)
        allowed = params.allowed_token_ids
        if allowed is None:
            if len(masked) < self.size:
                return
            raise bad_field("bad_words", len(bad_words), "no token of the vocabulary is left to sample; give fewer")
        if not masked.issuperset(allowed):
            return
        raise bad_field(
            "allowed_token_ids",
            allowed,
            "bad_words, or the stop tokens until min_tokens, mask all of them; allow others, or mask fewer",
        )

    def _not_in_vocabulary(self, field: str, token_ids: Sequence[Any]) -> InvalidRequestError:
        if not isinstance(token_ids, list | tuple):
            return bad_field(field, token_ids, "give a list of token ids")
        position, bad = next((i, t) for i, t in enumerate(token_ids) if not self._has(t))
        return InvalidRequestError(
            f"{field}: token id {bad!r} at position {position} is not in the vocabulary; "
            f"give integers from 0 to {self.size - 1}",
            field=field,
            value=bad if isinstance(bad, int) and abs(bad) < 2**63 else repr(bad)[:80],
            position=position,
            vocab_size=self.size,
        )

    def _has(self, token_id: Any) -> bool:
        try:
            return 0 <= operator.index(token_id) < self.size
        except TypeError:
            return False
