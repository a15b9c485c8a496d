"""What the model is told to say, and the schemas that it fits."""

from __future__ import annotations

from pydantic import BaseModel


class City(BaseModel):
    city: str


JSON = '{"city": "Bern"}'
BERN = City(city="Bern")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": SCHEMA}}
CHOICES = ["auto", "required", {"type": "function", "function": {"name": "weather"}}]
IMAGE = "data:image/png;base64,iVBORw0KGgo="
REASONED = "<think>hm</think>yes"


def call(name: str = "weather", arguments: str = JSON) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALL = call()
REASONED_CALL = f"<think>hm</think>Look.{CALL}"


def weather(city: str) -> str:
    """the weather"""
    return f"rain in {city}"


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]
