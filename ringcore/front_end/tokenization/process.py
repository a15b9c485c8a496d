"""The tokenizer process: runs a model's chat template and tokenizer isolated, with bounded time and memory.

Both come with the model, and a prompt may be adversarial: a template may loop, a normalizer may grow a text, a regular
expression may backtrack. `pool` kills a process whose job exceeds its deadline, and its memory is limited.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from functools import partial
from typing import assert_never

import msgspec

from ringcore.checkpoint.tokenizer import Tokenizer, load_tokenizer
from ringcore.config import EngineConfig
from ringcore.errors import InvalidRequestError, RingcoreError, error_to_wire
from ringcore.front_end.tokenization.bad_words import bad_words_token_ids
from ringcore.front_end.tokenization.text_jobs import (
    Decode,
    Encode,
    EncodeChat,
    Encoded,
    Failed,
    RenderChat,
    Rendered,
    TextAnswer,
    TextJob,
)
from ringcore.protocol.codec import decoder
from ringcore.protocol.job_channel import limit_memory, serve_jobs

__all__ = ["CHANNEL", "ENTRY", "MAX_MEMORY_BYTES", "execute", "main", "too_long"]

ENTRY = "ringcore.front_end.tokenization.process:main"
CHANNEL = "tokenizer"  # the name of the inherited socket
MAX_MEMORY_BYTES = 2 << 30  # above the memory of the ready process; a million tokens take some 400 MiB


def main(payload: bytes, fds: dict[str, int]) -> None:
    config: EngineConfig = decoder(EngineConfig).decode(payload)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump of a crash that a prompt caused

    def start() -> Callable[[bytes], bytes]:
        tokenizer = load_tokenizer(config.model.files)
        limit_memory(MAX_MEMORY_BYTES)
        return partial(_execute, tokenizer, msgspec.msgpack.Decoder(TextJob), msgspec.msgpack.Encoder())

    serve_jobs(socket.socket(fileno=fds[CHANNEL]), start)


def _execute(
    tokenizer: Tokenizer,
    decoder: msgspec.msgpack.Decoder[TextJob],
    encoder: msgspec.msgpack.Encoder,
    body: bytes,
) -> bytes:
    try:
        return encoder.encode(execute(tokenizer, decoder.decode(body)))
    except RingcoreError as error:
        return encoder.encode(Failed(error_to_wire(error)))
    except MemoryError:
        failure = f"the model's tokenizer needs more than {MAX_MEMORY_BYTES >> 20} MiB for it; send less"
    except Exception as error:  # the model's files decide which
        failure = f"the model's tokenizer fails at it: {type(error).__name__}: {error}"
    return encoder.encode(Failed(error_to_wire(InvalidRequestError(f"prompt: {failure}", field="prompt", value=None))))


def execute(tokenizer: Tokenizer, job: TextJob) -> TextAnswer:
    """Raises `InvalidRequestError` for a job that the tokenizer or the template refuses."""
    match job:
        case Encode(text, add_special_tokens):
            token_ids = [] if text is None else tokenizer.encode(text, add_special_tokens)
            return _encoded(tokenizer, token_ids, job)
        case EncodeChat(conversation, _, max_num_tokens):
            text = tokenizer.render_conversation(conversation, job.chat_template)
            if max_num_tokens is not None and (num_tokens := tokenizer.min_num_tokens(text)) > max_num_tokens:
                raise too_long(f"at least {num_tokens}", max_num_tokens + 1)
            return _encoded(tokenizer, tokenizer.encode(text, job.add_special_tokens), job)
        case RenderChat(conversation, num_chars):
            return Rendered(tokenizer.render_conversation(conversation, job.chat_template)[-num_chars:])
        case Decode(token_ids):
            return Rendered(tokenizer.decode(token_ids, skip_special_tokens=False))
    assert_never(job)


def _encoded(tokenizer: Tokenizer, token_ids: list[int], job: Encode | EncodeChat) -> Encoded:
    return Encoded(
        token_ids,
        bad_words_token_ids(job.bad_words, partial(tokenizer.encode, add_special_tokens=False)),
        list(map(tokenizer.token_text, token_ids)) if job.return_token_texts else None,
    )


def too_long(num_tokens: int | str, max_model_len: int) -> InvalidRequestError:
    """The error of a prompt that leaves no room for an output token.

    Clients know it by its code, or by "prompt is too long".
    """
    longest = max_model_len - 1
    return InvalidRequestError(
        f"the prompt is too long: it has {num_tokens} tokens and max_model_len is {max_model_len}; "
        f"shorten it to {longest} tokens or raise max_model_len",
        field="prompt",
        value=num_tokens,
        max_model_len=max_model_len,
        code="context_length_exceeded",
    )
