"""Fields of a request's body beyond its schema: those of vLLM, OpenAI and Anthropic that are not served, and others."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ringcore.errors import InvalidRequestError, unknown_option
from ringcore.params.vllm_names import VllmName

__all__ = ["REQUEST_FIELDS", "ExtraFields"]

_MAX_WARNED_NAMES = 256
_MAX_NAME_CHARS = 64
_NOTHING: tuple[Any, ...] = (False, [], {}, "")

_log = logging.getLogger(__name__)

_UNSERVED = {
    "use_beam_search length_penalty early_stopping": VllmName("beam search is not served", (False, 1, 1.0)),
    "best_of": VllmName("it is n here, and the choice is the client's", (1,)),
    "suffix": VllmName("text is written after the prompt alone; leave it out", ("",)),
    "prompt_embeds mm_payload mm_processor_kwargs media_io_kwargs": VllmName(
        "prompts are text or token ids here; leave it out", _NOTHING
    ),
    "return_mm_kwargs": VllmName("prompts are text or token ids here; leave it out", (False,)),
    "audio modalities": VllmName("answers are text here; leave it out", (["text"], [])),
    "web_search_options": VllmName("nothing is searched here; give tools of your own"),
    "mcp_servers container": VllmName("tools are run by the client here; leave it out", _NOTHING),
    "prefill": VllmName("answers that a client has begun are not continued here; leave it out", _NOTHING),
    "functions": VllmName("give them as tools", ([],)),
    "function_call": VllmName("it is tool_choice here", ("none", "auto")),
    "moderation": VllmName("nothing is moderated here; leave it out", _NOTHING),
    "echo": VllmName("a chat answer has the answer alone; prepend the message yourself, or leave it out", (False,)),
    "spaces_between_special_tokens": VllmName("special tokens are shown as the tokenizer decodes them", (True,)),
    "truncation_side": VllmName("truncate_prompt_tokens cuts the beginning; leave it out", ("left",)),
    "guided_decoding_backend": VllmName("the engine option structured_outputs_backend names the library", ("auto",)),
    "guided_whitespace_pattern whitespace_pattern": VllmName("JSON has little white space here; leave it out", ("",)),
    "logits_processors": VllmName("they are an engine option here, and vllm_xargs their arguments", ([],)),
    "logprob_token_ids": VllmName("logprobs reports the likeliest tokens; leave it out", ([],)),
    "return_tokens_as_token_ids": VllmName("return_token_ids returns the ids; leave it out", (False,)),
    "return_token_offsets": VllmName("logprobs of completions has text_offset; leave it out", (False,)),
    "return_prompt_text": VllmName("return_token_ids returns the prompt's ids, and /detokenize their text", (False,)),
    "thinking_token_budget": VllmName("it is not served; bound the answer by max_tokens"),
    "repetition_detection": VllmName("it is not served; repetition_penalty and stop end repetitions"),
    "watermarking": VllmName("it is not served; leave it out", (False,)),
    "stream_interval": VllmName("each step's tokens are streamed here; leave it out", (1,)),
    "kv_transfer_params ec_transfer_params": VllmName("an engine keeps its KV cache; leave it out", ({},)),
    "routed_experts_prompt_start": VllmName("experts are not reported; leave it out", (0,)),
    "detokenize": VllmName("an answer is text; return_token_ids returns the ids too", (True,)),
}
REQUEST_FIELDS: Mapping[str, VllmName] = {name: one for names, one in _UNSERVED.items() for name in names.split()}


class ExtraFields:
    """What becomes of them: those that are not served must ask for nothing; unknown ones are refused if `is_strict`,
    else left out, with one warning for each name, of up to `_MAX_WARNED_NAMES`."""

    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._warned = set[str]()

    def check(self, extra: Mapping[str, Any], known: Iterable[str]) -> None:
        """Raises `InvalidRequestError`, and `UnknownOptionError` for an unknown one. known: the schema's names."""
        for name, value in extra.items():
            unserved = REQUEST_FIELDS.get(name)
            if unserved is None:
                self._take_unknown(name[:_MAX_NAME_CHARS], known)
            elif not unserved.accepts(value):
                raise InvalidRequestError(f"{name}: not served: {unserved.here}", field=name)

    def _take_unknown(self, name: str, known: Iterable[str]) -> None:
        if self._is_strict:
            raise unknown_option(name, known, "request field")
        if name in self._warned or len(self._warned) >= _MAX_WARNED_NAMES:
            return
        self._warned.add(name)
        error = unknown_option(name, known, "request field")
        nearest = error.details["nearest"]
        hint = f"did you mean {nearest!r}? It" if nearest else "it"
        _log.warning("unknown request field %r: %s is left out, in this request and in later ones", name, hint)
