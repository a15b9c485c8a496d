"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from ringcore.checkpoint.chat_template import conversation_json
from ringcore.errors import InvalidRequestError
from ringcore.front_end.tokenization.text_jobs import Decode, EncodeChat, Encoded, Rendered, TextJob
from ringcore.openai_api.conversations import request_tools
from ringcore.openai_api.schema import DetokenizeRequest, TokenizeRequest
from ringcore.serve.service import Service

__all__ = ["detokenize", "tokenize"]


async def tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    service.model.check_fields(body)
    service.model.name(body.model)
    answer = await service.engine.run_text_job(_job(service, body))
    assert isinstance(answer, Encoded)
    return {
        "count": len(answer.token_ids),
        "max_model_len": service.model.max_model_len,
        "tokens": answer.token_ids,
        "token_strs": answer.token_texts,
    }


def _job(service: Service, body: TokenizeRequest) -> TextJob:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt: give either prompt or messages, and not both", field="prompt")
    wants_texts = bool(body.return_token_strs)
    if body.prompt is not None:
        if body.tools:
            raise InvalidRequestError("tools: only of use with messages; leave them out", field="tools")
        return service.engine.encode_job(
            body.prompt, body.add_special_tokens is not False, return_token_texts=wants_texts
        )
    assert body.messages is not None
    messages = service.model.template_messages(body.messages)
    if body.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens: the chat template writes a conversation's special tokens; leave it out",
            field="add_special_tokens",
        )
    conversation = conversation_json(
        messages,
        body.add_generation_prompt,
        request_tools(body.tools).shown,
        body.chat_template_kwargs,
        body.continue_final_message,
    )
    return EncodeChat(conversation, max_num_tokens=service.model.max_model_len, return_token_texts=wants_texts)


async def detokenize(service: Service, body: DetokenizeRequest) -> dict[str, str]:
    service.model.check_fields(body)
    service.model.name(body.model)
    if len(body.tokens) > service.model.max_model_len:
        raise InvalidRequestError(
            f"tokens: there are {len(body.tokens)}, and max_model_len is {service.model.max_model_len}; send fewer",
            field="tokens",
            value=len(body.tokens),
        )
    answer = await service.engine.run_text_job(Decode(body.tokens))
    assert isinstance(answer, Rendered)
    return {"prompt": answer.text}
