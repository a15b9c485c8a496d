"""Admission control: validates an `EngineCoreRequest` and makes a `Request` of it, or refuses it with the reason."""

from __future__ import annotations

import random
from collections.abc import Callable

from ringcore.errors import CapacityError, InvalidRequestError
from ringcore.kv_cache.manager import KVCacheManager
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.scheduler.request import Request
from ringcore.scheduler.vocabulary import Vocabulary

__all__ = ["Admission", "MaxGain", "at_most"]

# The most tokens that a request may gain in a step, at least 1: with k draft tokens a step it is k + 1.
MaxGain = Callable[[EngineCoreRequest], int]


def at_most(num_tokens: int) -> MaxGain:
    """The `MaxGain` that is the same for every request; 1 without speculative decoding."""
    return lambda request: num_tokens


class Admission:
    """Checks requests against the model's vocabulary and context length, and against the size of the KV cache.

    `seed` seeds the generator of sampling seeds: a request without a seed gets the next one, in the order of arrival.
    """

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        eos_token_ids: list[int],
        vocab_size: int,
        max_logprobs: int,
        seed: int,
        max_gain: MaxGain,
    ) -> None:
        self.change_cache(kv_cache)
        self._eos_token_ids = list(dict.fromkeys(eos_token_ids))
        self._vocabulary = Vocabulary(vocab_size, eos_token_ids, max_logprobs)
        self._max_gain = max_gain
        self._seeds = random.Random(seed)
        self._num_admitted = 0

    def admit(self, request: EngineCoreRequest) -> Request:
        """The request to schedule. Raises `InvalidRequestError` naming field, value and remedy."""
        params = request.sampling_params
        tokens = self._vocabulary.tokens("prompt_token_ids", request.prompt_token_ids)
        self._check_length(len(tokens))
        eos_token_ids = [] if params.ignore_eos else self._eos_token_ids
        stop_token_ids = eos_token_ids
        if params.stop_token_ids:
            own = self._vocabulary.tokens("stop_token_ids", params.stop_token_ids).tolist()
            stop_token_ids = list(dict.fromkeys([*eos_token_ids, *own]))
        self._vocabulary.check(params, request.bad_words_token_ids, len(tokens))
        max_total_tokens = self._max_total_tokens
        if params.max_tokens is not None:
            max_total_tokens = min(max_total_tokens, len(tokens) + params.max_tokens)
        self._num_admitted += 1
        return Request(
            request,
            tokens,
            sequence=self._num_admitted,
            max_total_tokens=max_total_tokens,
            stop_token_ids=stop_token_ids,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            eos_token_ids=eos_token_ids,
            max_gain=self._max_gain(request),
        )

    def change_cache(self, kv_cache: KVCacheManager) -> None:
        """Checks later requests against this cache. The generator of seeds continues."""
        self._kv_cache = kv_cache
        self._max_model_len = kv_cache.config.max_model_len
        # A request that runs alone still ends when the cache is full. Its last token is never computed, so it needs no
        # slot.
        self._max_num_tokens = kv_cache.max_num_tokens
        self._max_total_tokens = min(self._max_model_len, self._max_num_tokens + 1)

    def readmit(self, request: Request) -> None:
        """Adapts a waiting request to the current cache: its length limit becomes what the cache holds.

        Raises `CapacityError` if its known tokens do not fit.
        """
        num_tokens = len(request.tokens)
        if not self._kv_cache.can_ever_fit(num_tokens):
            needed, usable = self._kv_cache.blocks_needed(num_tokens), self._kv_cache.num_usable_blocks
            raise CapacityError(
                f"request {request.request_id!r}: its {num_tokens} tokens need {needed} blocks of the KV cache, which "
                f"has {usable} since the workers were replaced; give the cache more memory",
                request_id=request.request_id,
                needed_blocks=needed,
                usable_blocks=usable,
            )
        request.move_to_cache(self._max_total_tokens)

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens == 0:
            raise InvalidRequestError(
                "prompt_token_ids: the prompt is empty; give at least one token", field="prompt_token_ids", value=0
            )
        if num_tokens >= self._max_model_len:
            raise InvalidRequestError(
                f"prompt_token_ids: the prompt has {num_tokens} tokens and max_model_len is {self._max_model_len}; "
                f"shorten it to {self._max_model_len - 1} tokens or raise max_model_len",
                field="prompt_token_ids",
                value=num_tokens,
                max_model_len=self._max_model_len,
            )
        if num_tokens > self._max_num_tokens:
            needed, usable = self._kv_cache.blocks_needed(num_tokens), self._kv_cache.num_usable_blocks
            raise InvalidRequestError(
                f"prompt_token_ids: the prompt of {num_tokens} tokens needs {needed} blocks of the KV cache, which has "
                f"{usable}; shorten it to {self._max_num_tokens} tokens or give the cache more memory",
                field="prompt_token_ids",
                value=num_tokens,
                needed_blocks=needed,
                usable_blocks=usable,
            )
