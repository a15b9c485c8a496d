"""The conversation of a body: for an answer to it, and to count its tokens."""

from __future__ import annotations

from ringcore.openai_api.chat_generation import ChatGeneration, Conversation
from ringcore.openai_api.errors import fields_named
from ringcore.openai_api.responses.answers import InputTokens
from ringcore.openai_api.responses.items import ItemMessages
from ringcore.openai_api.responses.schema import InputTokensRequest
from ringcore.openai_api.responses.store import ResponseStore
from ringcore.openai_api.served_model import ServedModel
from ringcore.params.sampling_params import SamplingParams

__all__ = ["CLIENT_NAMES", "conversation", "count_input_tokens", "read_items"]

# The client's names of the fields that errors of the common path have.
CLIENT_NAMES = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}


def read_items(body: InputTokensRequest, store: ResponseStore) -> ItemMessages:
    """Those of the previous response's conversation, and those of the input. Raises `InvalidRequestError`, and
    `ApiError` for what is not stored."""
    messages = ItemMessages(store.get_item)
    previous = body.previous_response_id
    if previous is not None:
        messages.add("previous_response_id", store.get(previous, "previous_response_id").conversation_items())
    messages.add("input", body.items())
    return messages


def conversation(body: InputTokensRequest, messages: ItemMessages, params: SamplingParams) -> Conversation:
    return Conversation(
        messages.instructed(body.instructions),
        body.request_tools(),
        params,
        form=body.text_form(),
        template_kwargs=body.template_kwargs(),
        is_parallel=body.parallel_tool_calls is not False,
    )


async def count_input_tokens(model: ServedModel, body: InputTokensRequest, store: ResponseStore) -> InputTokens:
    """Of the prompt that a response to it would have. Raises `InvalidRequestError` and `ApiError`."""
    model.check_fields(body)
    model.name(body.model)
    asked = conversation(body, read_items(body, store), SamplingParams())
    with fields_named(CLIENT_NAMES):
        num_tokens = await ChatGeneration(model, asked).count_tokens()
    return InputTokens(object="response.input_tokens", input_tokens=num_tokens)
