"""What the chat page asks beside the API: Markdown as nodes, and the values of the fields that a request leaves out."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, StrictStr

from ringcore.errors import InvalidRequestError
from ringcore.serve.errors import json_response
from ringcore.serve.markdown.renderer import MarkdownRenderer
from ringcore.serve.service import Service

__all__ = ["add_page_calls"]

_MAX_TEXTS, _MAX_CHARS = 64, 400_000  # of one call, as `page/markdown.js` knows
_SHOWN_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")


class TextsToRender(BaseModel):
    model_config = ConfigDict(extra="forbid")

    texts: Annotated[list[StrictStr], Field(max_length=_MAX_TEXTS)]


def add_page_calls(app: FastAPI, service: Service) -> None:
    """Not in the OpenAPI document: they change with the page."""
    renderer = MarkdownRenderer(service.engine.wait_dead)

    @app.post("/page/markdown", include_in_schema=False)
    async def markdown(body: TextsToRender) -> Response:
        """A list of blocks for each text, by `markdown.nodes`."""
        if (num := sum(map(len, body.texts))) > _MAX_CHARS:
            raise InvalidRequestError(
                f"texts: they have {num} characters, and at most {_MAX_CHARS} are rendered at once; send less",
                field="texts",
                value=num,
            )
        return Response(await renderer.render(body.texts), media_type="application/json")

    @app.get("/page/defaults", include_in_schema=False)
    async def defaults() -> Response:
        return json_response(_defaults(service))


def _defaults(service: Service) -> dict[str, Any]:
    """What a chat request without a value has. max_tokens: null where only `max_model_len` bounds an answer."""
    params = service.engine.get_default_sampling_params()
    shown = {name: getattr(params, name) for name in _SHOWN_DEFAULTS}
    max_tokens = service.model.sampling_defaults.get("max_tokens")
    return shown | {"max_tokens": max_tokens, "max_model_len": service.model.max_model_len}
