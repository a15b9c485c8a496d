"""Turns a caller's prompt into an `EngineCoreRequest`, or raises an error that names the invalid field."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import msgspec

from ringcore.checkpoint.chat_template import conversation_json
from ringcore.checkpoint.tokenizer import Tokenizer, check_unicode
from ringcore.config import EngineConfig
from ringcore.errors import unknown_option
from ringcore.front_end.prompt_checks import (
    checked_bool,
    checked_int,
    checked_integers,
    checked_priority,
    checked_string,
)
from ringcore.front_end.tokenization.process import too_long
from ringcore.front_end.tokenization.text_jobs import Encode, EncodeChat, Encoded, TextAnswer
from ringcore.params.field_checks import bad_field
from ringcore.params.logits_processor import check_params, load_logits_processor
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.scheduler.vocabulary import Vocabulary

__all__ = ["InputProcessor", "Preparation", "PreparedRequest", "Prompt"]

Prompt = str | Sequence[int] | Mapping[str, Any]

_CONTENTS = ("prompt", "prompt_token_ids", "messages")
_OF_TEXT = ("add_special_tokens", "truncate_prompt_tokens")
_PROMPT_KEYS = (*_CONTENTS, "request_id", "cache_salt", "priority", *_OF_TEXT)


class _RequestHeader(NamedTuple):
    """The fields of a request that do not depend on its tokens."""

    number: int
    arrival_s: float
    params: SamplingParams
    request_id: str | None
    priority: int
    cache_salt: str | None
    max_prompt_tokens: int | None  # the last ones are kept


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request, with its engine requests and the caller's id and prompt."""

    requests: list[EngineCoreRequest]  # one per completion, by its index
    request_id: str  # the caller's; the engine's ids are unique for the life of the engine
    prompt: str | None
    prompt_token_ids: list[int]
    is_chat: bool = False


class Preparation(NamedTuple):
    """A request that is checked as far as possible without the tokenizer process.

    job: for the tokenizer process, if needed. finish: makes the request from its answer; raises `InvalidRequestError`.
    """

    job: Encode | EncodeChat | None
    finish: Callable[[TextAnswer | None], PreparedRequest]


class InputProcessor:
    """Validates prompts against one model before they are sent: every error here is an `InvalidRequestError`
    (or an `UnknownOptionError` for a key of a prompt's dict) that names the field, the value and the remedy.

    max_model_len: the ready engine's; None: the model's context length.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, max_model_len: int | None = None) -> None:
        self._tokenizer = tokenizer
        spec = config.model.spec
        self._vocabulary = Vocabulary(spec.vocab_size, spec.eos_token_ids, config.scheduler.max_logprobs)
        self._max_model_len = max_model_len or config.model.context_len
        self._logits_processors = [load_logits_processor(name) for name in config.model.logits_processors]
        self._numbers = count()

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
    ) -> Preparation:
        """A request of one prompt: a str, token ids, or a dict with "prompt", "prompt_token_ids" or "messages" (a
        conversation). Arguments take precedence over the dict's keys. Of a dict also "add_special_tokens", by default
        true for a text alone, and "truncate_prompt_tokens": how many tokens are kept, the last ones; -1: as many as
        leave room for max_tokens.
        """
        fields: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else _fields_of(prompt)
        _check_keys(fields)
        request_id = _first(request_id, fields.get("request_id"))
        priority, cache_salt = _first(priority, fields.get("priority")), _first(cache_salt, fields.get("cache_salt"))
        kept = fields.get("truncate_prompt_tokens")
        text, token_ids, messages = (fields.get(name) for name in _CONTENTS)
        if [text, token_ids, messages].count(None) != 2:
            raise bad_field("prompt", repr(text)[:80], f"give one of {', '.join(_CONTENTS)}, and no other")
        with_special = checked_bool("add_special_tokens", fields.get("add_special_tokens"), messages is None)
        if messages is not None:
            of_text: dict[str, Any] = {"add_special_tokens": with_special, "truncate_prompt_tokens": kept}
            options: dict[str, Any] = {"request_id": request_id, "priority": priority, "cache_salt": cache_salt}
            return self.prepare_chat(messages, params, **of_text, **options)
        head = self._head(params, request_id, priority, cache_salt, kept)
        if text == "":
            raise bad_field("prompt", "", "the prompt is empty; give at least one character")
        if text is not None:
            is_cut = head.max_prompt_tokens is not None
            job = self.encode_job(text, with_special, params.bad_words or (), is_cut=is_cut)
            return Preparation(job, partial(self._finish, head, text, None))
        token_ids = self._checked_token_ids(token_ids, head.max_prompt_tokens)
        words = self._encode_bad_words(params)
        return Preparation(words, partial(self._finish, head, None, token_ids))

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        add_special_tokens: bool = False,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
    ) -> Preparation:
        """A request of one conversation, rendered by a chat template (the model's own, if none is given); options as
        for `prepare`. add_special_tokens: besides those that the template writes."""
        head = self._head(params, request_id, priority, cache_salt, truncate_prompt_tokens)
        conversation = conversation_json(
            messages, add_generation_prompt, tools, chat_template_kwargs, continue_final_message
        )
        job = EncodeChat(
            conversation,
            _encodable(params.bad_words or ()),
            max_num_tokens=self._max_model_len - 1 if head.max_prompt_tokens is None else None,
            add_special_tokens=add_special_tokens,
            chat_template=chat_template,
        )
        return Preparation(job, partial(self._finish, head, None, None))

    def encode_job(
        self,
        text: object,
        add_special_tokens: bool = True,
        bad_words: Sequence[str] = (),
        return_token_texts: bool = False,
        is_cut: bool = False,
    ) -> Encode:
        """Raises `InvalidRequestError` for a value that is not a str, and for a text whose length alone implies too
        many tokens, unless it is cut."""
        if not isinstance(text, str):
            raise bad_field("prompt", type(text).__name__, "give a str, or token ids as prompt_token_ids")
        check_unicode(text)
        num_tokens = 0 if is_cut else self._tokenizer.min_num_tokens(text)
        if num_tokens >= self._max_model_len:
            raise too_long(f"at least {num_tokens}", self._max_model_len)
        return Encode(text, add_special_tokens, _encodable(bad_words), return_token_texts)

    def _encode_bad_words(self, params: SamplingParams) -> Encode | None:
        return Encode(None, bad_words=_encodable(params.bad_words)) if params.bad_words else None

    def _head(
        self,
        params: SamplingParams,
        request_id: str | None,
        priority: int | None,
        cache_salt: str | None,
        truncate_prompt_tokens: int | None,
    ) -> _RequestHeader:
        if not isinstance(params, SamplingParams):
            raise bad_field("sampling_params", repr(params)[:80], "give a SamplingParams")
        return _RequestHeader(
            next(self._numbers),
            time.monotonic(),
            params,
            checked_string("request_id", request_id),
            checked_priority(priority),
            checked_string("cache_salt", cache_salt),
            self._max_prompt_tokens(truncate_prompt_tokens, params),
        )

    def _max_prompt_tokens(self, truncate_prompt_tokens: int | None, params: SamplingParams) -> int | None:
        """How many tokens of the prompt are kept; None: all, of which there may not be too many."""
        if truncate_prompt_tokens is None:
            return None
        longest = self._max_model_len - 1
        num_tokens = checked_int("truncate_prompt_tokens", truncate_prompt_tokens, -1, longest)
        if num_tokens == 0:
            raise bad_field("truncate_prompt_tokens", 0, "give at least 1, -1 for as many as fit, or leave it out")
        if num_tokens == -1:
            return max(1, self._max_model_len - (params.max_tokens or 1))
        return num_tokens

    def _finish(
        self, head: _RequestHeader, text: str | None, token_ids: list[int] | None, answer: TextAnswer | None
    ) -> PreparedRequest:
        """token_ids: None if the answer has them."""
        bad_words: list[list[int]] = []
        is_chat = text is None and token_ids is None
        if answer is not None:
            assert isinstance(answer, Encoded)
            bad_words = answer.bad_words_token_ids
            token_ids = answer.token_ids if token_ids is None else token_ids
        assert token_ids is not None
        if not token_ids:
            raise bad_field("prompt_token_ids", 0, "the prompt is empty; give at least one token")
        if head.max_prompt_tokens is not None and len(token_ids) > head.max_prompt_tokens:
            text, token_ids = None, token_ids[-head.max_prompt_tokens :]
        params = head.params
        tokens = self._vocabulary.tokens("prompt_token_ids", token_ids)
        self._check_length(len(token_ids))
        self._vocabulary.tokens("stop_token_ids", params.stop_token_ids or [])
        self._vocabulary.check(params, bad_words, len(token_ids))
        check_params(self._logits_processors, params)
        request_id = head.request_id or f"request-{head.number}"
        first = EngineCoreRequest(
            request_id=f"{request_id}#{head.number}",
            prompt_token_ids=tokens.tobytes(),
            sampling_params=params,
            arrival_s=head.arrival_s,
            priority=head.priority,
            cache_salt=head.cache_salt,
            bad_words_token_ids=bad_words,
        )
        requests = [first] if params.n == 1 else _one_per_completion(first)
        return PreparedRequest(requests, request_id, text, token_ids, is_chat)

    def _checked_token_ids(self, token_ids: object, max_num_tokens: int | None) -> list[int]:
        if isinstance(token_ids, list | tuple):
            if max_num_tokens is not None:
                token_ids = token_ids[-max_num_tokens:]
            self._check_length(len(token_ids))  # before each is checked
        return checked_integers("prompt_token_ids", token_ids)

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._max_model_len:  # at least one output token has to fit
            raise too_long(num_tokens, self._max_model_len)


def _one_per_completion(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """Only the first completion returns the prompt's log-probabilities, which are the same for all."""
    params = request.sampling_params
    return [
        msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}.{index}",
            sampling_params=replace(
                params,
                n=1,
                seed=None if params.seed is None else params.seed + index,
                prompt_logprobs=None if index else params.prompt_logprobs,
            ),
        )
        for index in range(params.n)
    ]


def _encodable(words: Sequence[str]) -> Sequence[str]:
    for word in words:
        check_unicode(word, "bad_words")
    return words


def _first(given: Any, otherwise: Any) -> Any:
    return otherwise if given is None else given


def _fields_of(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list | tuple):
        return {"prompt_token_ids": prompt}
    raise bad_field("prompt", type(prompt).__name__, "give a str, a list of token ids, or a dict")


def _check_keys(fields: Mapping[str, Any]) -> None:
    for key in fields:
        if key not in _PROMPT_KEYS:
            raise unknown_option(str(key), _PROMPT_KEYS, "key of a prompt")
