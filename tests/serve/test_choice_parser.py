"""Special tokens are taken out of a choice's text however it is cut into pieces."""

from __future__ import annotations

import itertools

import pytest

from ringcore.chat import ChatFormat, ChatParser, MessageBuilder
from ringcore.openai_api.parsing import ChoiceParser

LEFT_OUT = frozenset({"<|pad|>", "<|end|>", "[E]"})


def content_of(pieces: list[str], parser: ChatParser | None = None) -> str:
    choice, builder = ChoiceParser(parser, LEFT_OUT, is_parallel=True), MessageBuilder()
    for i, piece in enumerate(pieces):
        builder.add(choice.take(piece, is_last=i == len(pieces) - 1))
    return builder.message.content


@pytest.mark.parametrize("parser", [None, ChatFormat("llama3_json")])
@pytest.mark.parametrize(
    ("text", "left"), [("<|pad|>a[E]b", "ab"), ("a<<|end|><|pa", "a<<|pa"), ("[[E]|>", "[|>"), ("<|e", "<|e")]
)
def test_all_ways_to_cut_a_text_give_the_same(text, left, parser):
    for cuts in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        first, second = cuts
        made = parser and ChatParser(parser, [{"function": {"name": "f"}}])
        assert content_of([text[:first], text[first:second], text[second:]], made) == left


def test_only_what_may_become_a_special_token_is_held_back():
    choice = ChoiceParser(None, LEFT_OUT, is_parallel=True)
    given = [[e.text for e in choice.take(piece, is_last=False)] for piece in ("a <", "b <|p", "x <|pa", "d|>y")]
    assert given == [["a "], ["<b "], ["<|px "], ["y"]]
