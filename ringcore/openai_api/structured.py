"""Structured outputs in the forms that clients use: OpenAI's `response_format`, vLLM's `structured_outputs`, and its
older `guided_*` fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from ringcore.errors import InvalidRequestError
from ringcore.params.structured_outputs import StructuredOutputsParams

__all__ = ["Choices", "ResponseFormat", "StructuredOutputs", "TextForm", "name_field"]

Choices = Annotated[list[StrictStr], Field(fail_fast=True)]


class TextFormat(BaseModel):
    """Any text."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_object"]


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)

    name: StrictStr
    description: StrictStr | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: StrictBool | None = None  # no effect: the schema is always enforced


class JsonSchemaFormat(BaseModel):
    """JSON that conforms to a schema."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(BaseModel):
    """`StructuredOutputsParams`: exactly one of these."""

    model_config = ConfigDict(extra="forbid")

    json_: Annotated[StrictStr | dict[str, Any] | None, Field(alias="json")] = None
    json_object: StrictBool | None = None
    regex: StrictStr | None = None
    choice: Choices | None = None
    grammar: StrictStr | None = None


@dataclass(frozen=True, slots=True)
class TextForm:
    """The structured output of a request, and the request's field that requires it."""

    field: str
    params: StructuredOutputsParams

    @property
    def is_of_text(self) -> bool:
        """Whether it is of an answer's text, as OpenAI's fields, and calls are free of it; vLLM's are of any answer."""
        return not self.field.startswith(("structured_outputs", "guided_"))

    @classmethod
    def of(
        cls,
        response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
        structured_outputs: StructuredOutputs | None,
        guided: dict[str, Any],
    ) -> TextForm | None:
        """None if the text is unconstrained. guided: by the name of the field. Raises `InvalidRequestError` for two
        forms, and for an invalid one."""
        asked: dict[str, dict[str, Any]] = {}
        match response_format:
            case JsonObjectFormat():
                asked["response_format"] = {"json_object": True}
            case JsonSchemaFormat():
                asked["response_format"] = {"json": response_format.json_schema.schema_}
        if structured_outputs is not None:
            asked["structured_outputs"] = structured_outputs.model_dump(by_alias=True, exclude_none=True)
        asked |= {name: {name.removeprefix("guided_"): value} for name, value in guided.items() if value is not None}
        if not asked:
            return None
        field, *others = asked
        if others:
            raise InvalidRequestError(f"{others[0]}: {field} asks for a form already; leave one out", field=others[0])
        return cls.named(field, **asked[field])

    @classmethod
    def named(cls, field: str, **form: Any) -> TextForm:
        """form: of `StructuredOutputsParams`. Raises `InvalidRequestError` for an invalid one."""
        try:
            return cls(field, StructuredOutputsParams(**form))
        except InvalidRequestError as error:
            raise name_field(error, field) from error


def name_field(error: InvalidRequestError, field: str | None) -> InvalidRequestError:
    """Renames the field of a structured output's error to the client's field; returns other errors unchanged."""
    name = error.details.get("field")
    if field is None or field == "structured_outputs" or not str(name).startswith("structured_outputs"):
        return error
    return InvalidRequestError(f"{field}: {error.message}", **{**error.details, "field": field})
