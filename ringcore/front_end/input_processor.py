"""Turns a caller's prompt into an `EngineCoreRequest`, or raises an error that names the invalid field."""

from __future__ import annotations

import operator
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
from ringcore.errors import InvalidRequestError, unknown_option
from ringcore.front_end.tokenization.process import too_long
from ringcore.front_end.tokenization.text_jobs import Encode, EncodeChat, Encoded, TextAnswer
from ringcore.params.logits_processor import check_params, load_logits_processor
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.scheduler.vocabulary import Vocabulary

__all__ = ["InputProcessor", "Preparation", "PreparedRequest", "Prompt", "as_prompt_list"]

Prompt = str | Sequence[int] | Mapping[str, Any]

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "request_id", "cache_salt", "priority")
_MAX_ID_BYTES = 256
_MAX_PRIORITY = 2**31 - 1


class _RequestHeader(NamedTuple):
    """The fields of a request that do not depend on its tokens."""

    number: int
    arrival_s: float
    params: SamplingParams
    request_id: str | None
    priority: int
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request, with its engine requests and the caller's id and prompt."""

    requests: list[EngineCoreRequest]  # one per completion, by its index
    request_id: str  # the caller's; the engine's ids are unique for the life of the engine
    prompt: str | None
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
        """A request of one prompt: a str, token ids, or a dict with "prompt" or "prompt_token_ids". Arguments take
        precedence over the dict's keys.
        """
        fields: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else _fields_of(prompt)
        _check_keys(fields)
        head = self._head(
            params,
            _first(request_id, fields.get("request_id")),
            _first(priority, fields.get("priority")),
            _first(cache_salt, fields.get("cache_salt")),
        )
        text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
        if (text is None) == (token_ids is None):
            raise _bad("prompt", repr(text)[:80], "give either prompt or prompt_token_ids, and not both")
        if text == "":
            raise _bad("prompt", "", "the prompt is empty; give at least one character")
        if text is not None:
            job = self.encode_job(text, bad_words=params.bad_words or ())
            return Preparation(job, partial(self._finish, head, text, None))
        token_ids = self._checked_token_ids(token_ids)
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
        request_id: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
    ) -> Preparation:
        """A request of one conversation, rendered by the model's own chat template; options as for `prepare`."""
        head = self._head(params, request_id, priority, cache_salt)
        conversation = conversation_json(messages, add_generation_prompt, tools, chat_template_kwargs)
        words = _encodable(params.bad_words or ())
        job = EncodeChat(conversation, words, max_num_tokens=self._max_model_len - 1)
        return Preparation(job, partial(self._finish, head, None, None))

    def encode_job(
        self,
        text: object,
        add_special_tokens: bool = True,
        bad_words: Sequence[str] = (),
        return_token_texts: bool = False,
    ) -> Encode:
        """Raises `InvalidRequestError` for a value that is not a str, and for a text whose length alone implies too
        many tokens."""
        if not isinstance(text, str):
            raise _bad("prompt", type(text).__name__, "give a str, or token ids as prompt_token_ids")
        check_unicode(text)
        num_tokens = self._tokenizer.min_num_tokens(text)
        if num_tokens >= self._max_model_len:
            raise too_long(f"at least {num_tokens}", self._max_model_len)
        return Encode(text, add_special_tokens, _encodable(bad_words), return_token_texts)

    def _encode_bad_words(self, params: SamplingParams) -> Encode | None:
        return Encode(None, bad_words=_encodable(params.bad_words)) if params.bad_words else None

    def _head(
        self, params: SamplingParams, request_id: str | None, priority: int | None, cache_salt: str | None
    ) -> _RequestHeader:
        if not isinstance(params, SamplingParams):
            raise _bad("sampling_params", repr(params)[:80], "give a SamplingParams")
        return _RequestHeader(
            next(self._numbers),
            time.monotonic(),
            params,
            _checked_string("request_id", request_id),
            _priority(priority),
            _checked_string("cache_salt", cache_salt),
        )

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
            raise _bad("prompt_token_ids", 0, "the prompt is empty; give at least one token")
        params = head.params
        self._vocabulary.tokens("prompt_token_ids", token_ids)
        self._check_length(len(token_ids))
        self._vocabulary.tokens("stop_token_ids", params.stop_token_ids or [])
        self._vocabulary.check(params, bad_words, len(token_ids))
        check_params(self._logits_processors, params)
        request_id = head.request_id or f"request-{head.number}"
        first = EngineCoreRequest(
            request_id=f"{request_id}#{head.number}",
            prompt_token_ids=token_ids,
            sampling_params=params,
            arrival_s=head.arrival_s,
            priority=head.priority,
            cache_salt=head.cache_salt,
            bad_words_token_ids=bad_words,
        )
        requests = [first] if params.n == 1 else _one_per_completion(first)
        return PreparedRequest(requests, request_id, text, is_chat)

    def _checked_token_ids(self, token_ids: object) -> list[int]:
        if isinstance(token_ids, list | tuple):
            self._check_length(len(token_ids))  # before each is checked
        return _integers("prompt_token_ids", token_ids)

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._max_model_len:  # at least one output token has to fit
            raise too_long(num_tokens, self._max_model_len)


def as_prompt_list(prompts: Any) -> list[Any]:
    """The prompts of a call: a list of ints is one prompt of token ids, any other list is one of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise _bad("prompts", type(prompts).__name__, "give a str, a list of token ids, a dict, or a list of these")
    if prompts and all(_is_integer(item) for item in prompts):
        return [prompts]
    return list(prompts)


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
    raise _bad("prompt", type(prompt).__name__, "give a str, a list of token ids, or a dict")


def _check_keys(fields: Mapping[str, Any]) -> None:
    for key in fields:
        if key not in _PROMPT_KEYS:
            raise unknown_option(str(key), _PROMPT_KEYS, "key of a prompt")


def _integers(field: str, values: Any) -> list[int]:
    """The values as plain ints; accepts numpy integers, rejects floats and bools."""
    if not isinstance(values, list | tuple):
        raise _bad(field, type(values).__name__, "give a list of token ids")
    if set(map(type, values)) == {int}:  # the fast path, as for values from JSON
        return list(values)
    for position, value in enumerate(values):
        if not _is_integer(value):
            raise InvalidRequestError(
                f"{field}: {value!r} at position {position} is a {type(value).__name__}; give integers",
                field=field,
                value=repr(value)[:80],
                position=position,
            )
    return [operator.index(value) for value in values]


def _is_integer(value: Any) -> bool:
    if type(value) is int:
        return True
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _checked_string(field: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise _bad(field, repr(value)[:80], "give a str that is not empty")
    try:
        length = len(value.encode())
    except UnicodeEncodeError:
        raise _bad(field, repr(value)[:80], "it holds half of a surrogate pair; remove it") from None
    if length > _MAX_ID_BYTES:
        raise _bad(field, repr(value)[:80], f"it has {length} bytes; give at most {_MAX_ID_BYTES}")
    return value


def _priority(value: Any) -> int:
    """None means the default, 0."""
    if value is None:
        return 0
    if not _is_integer(value) or abs(operator.index(value)) > _MAX_PRIORITY:
        raise _bad("priority", repr(value)[:80], f"give an integer from {-_MAX_PRIORITY} to {_MAX_PRIORITY}")
    return operator.index(value)


def _bad(field: str, value: object, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}={value!r}: {remedy}", field=field, value=value)
