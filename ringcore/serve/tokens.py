"""POST /tokenize and /detokenize: between texts and the model's token ids."""

from __future__ import annotations

from typing import Any

from ringcore.errors import InvalidRequestError
from ringcore.serve.conversations import request_tools, text_messages
from ringcore.serve.schema import DetokenizeRequest, TokenizeRequest
from ringcore.serve.service import Service

__all__ = ["detokenize", "tokenize"]


def tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    service.model_name(body.model)
    tokenizer = service.engine.get_tokenizer()
    token_ids = _token_ids(service, body)
    texts = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": service.max_model_len,
        "tokens": token_ids,
        "token_strs": texts,
    }


def _token_ids(service: Service, body: TokenizeRequest) -> list[int]:
    tokenizer = service.engine.get_tokenizer()
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt: give either prompt or messages, and not both", field="prompt")
    if body.prompt is not None:
        if body.tools:
            raise InvalidRequestError("tools: shown to a model with messages alone; leave them out", field="tools")
        return tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    assert body.messages is not None
    if body.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens: the chat template writes a conversation's special tokens; leave it out",
            field="add_special_tokens",
        )
    return tokenizer.apply_chat_template(
        text_messages(body.messages),
        body.add_generation_prompt,
        request_tools(body.tools).shown,
        body.chat_template_kwargs,
    )


def detokenize(service: Service, body: DetokenizeRequest) -> dict[str, str]:
    service.model_name(body.model)
    return {"prompt": service.engine.get_tokenizer().decode(body.tokens, skip_special_tokens=False)}
