"""Text is the same however its tokens are cut, and ends at the first stop string."""

from __future__ import annotations

import pytest
from fake_engine import make_model_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcore import SamplingParams
from ringcore.checkpoint.tokenizer import load_tokenizer
from ringcore.front_end.detokenizer import Detokenizer, StopStringMatcher


def cut_at_first_stop(text: str, stops: list[str], *, include: bool = False, not_before: int = 0):
    """The rule, with the whole text at hand: the stop string whose last character comes first, the longest of those.

    `not_before`: matches that end within this many characters do not count.
    """
    for end in range(not_before + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def feed_all(matcher: StopStringMatcher, pieces: list[str], num_barred: int = 0):
    shown = ""
    for i, piece in enumerate(pieces):
        released, stop = matcher.feed(piece, may_stop=i >= num_barred)
        shown += released
        if stop is not None:
            return shown, stop
    return shown + matcher.release(), None


# A small alphabet, so that stop strings overlap themselves and each other.
texts = st.text(alphabet="ab.", max_size=5)
stop_lists = st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), min_size=1, max_size=3)


@given(pieces=st.lists(texts, max_size=8), stops=stop_lists, include=st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_cut_of_a_text_stops_at_the_same_place(pieces, stops, include):
    got = feed_all(StopStringMatcher(stops, include_in_output=include), pieces)
    assert got == cut_at_first_stop("".join(pieces), stops, include=include)


@given(pieces=st.lists(texts, max_size=8), stops=stop_lists, num_barred=st.integers(0, 8))
@settings(max_examples=300, deadline=None)
def test_no_stop_string_ends_in_a_barred_piece(pieces, stops, num_barred):
    got = feed_all(StopStringMatcher(stops), pieces, num_barred)
    not_before = len("".join(pieces[:num_barred]))
    assert got == cut_at_first_stop("".join(pieces), stops, not_before=not_before)


def test_what_may_become_a_stop_string_is_held_back():
    matcher = StopStringMatcher(["stop", "op!"])
    assert matcher.feed("a sto") == ("a ", None)
    assert matcher.feed("ry") == ("story", None)
    assert matcher.feed("st") == ("", None)
    assert matcher.feed("op") == ("", "stop")


def test_a_stop_string_in_the_first_characters():
    assert StopStringMatcher(["\n"]).feed("\nhello") == ("", "\n")
    assert StopStringMatcher(["\n"], include_in_output=True).feed("\nhello") == ("\n", "\n")


def test_without_stop_strings_nothing_is_held():
    assert StopStringMatcher([]).feed("anything") == ("anything", None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_model_folder(tmp_path_factory.mktemp("bytes")))


def detokenize(tokenizer, token_ids: list[int], params: SamplingParams):
    """(text, stop string, number of tokens used), the tokens given one by one."""
    detokenizer = Detokenizer(tokenizer.stream(params.skip_special_tokens, []), params)
    for i, token_id in enumerate(token_ids):
        stop = detokenizer.append(token_id)
        if stop is not None:
            return detokenizer.text, stop, i + 1
    stop = detokenizer.finish()
    return detokenizer.text, stop, len(token_ids)


@given(
    text=st.text(alphabet="aé€😀\n", max_size=12),
    stops=st.lists(st.sampled_from(["é", "a€", "😀", "\n\n"]), max_size=2),
)
@settings(max_examples=150, deadline=None)
def test_one_byte_a_token_is_the_text_cut_at_its_first_stop_string(tokenizer, text, stops):
    token_ids = tokenizer.encode(text)
    assert len(token_ids) == len(text.encode())
    got, stop, num_tokens = detokenize(tokenizer, token_ids, SamplingParams(stop=stops, max_tokens=None))
    assert (got, stop) == cut_at_first_stop(text, stops)
    if stop is not None:  # the token that completed the stop string is the last one used
        assert tokenizer.decode(token_ids[:num_tokens]) == got + stop


@given(token_ids=st.lists(st.integers(0, 256), max_size=16))
@settings(max_examples=150, deadline=None)
def test_tokens_that_are_no_text_decode_as_at_once(tokenizer, token_ids):
    got, _, _ = detokenize(tokenizer, token_ids, SamplingParams())
    assert got == tokenizer.decode(token_ids)


def test_text_never_ends_in_half_a_character(tokenizer):
    detokenizer = Detokenizer(tokenizer.stream(True, []), SamplingParams())
    seen = []
    for token_id in tokenizer.encode("a😀b"):
        detokenizer.append(token_id)
        seen.append(detokenizer.text)
    assert seen == ["a", "a", "a", "a", "a😀", "a😀b"]


def test_an_unfinished_character_comes_out_at_the_end(tokenizer):
    token_ids = tokenizer.encode("a😀")[:3]
    assert detokenize(tokenizer, token_ids, SamplingParams())[0] == tokenizer.decode(token_ids)


def test_min_tokens_bars_stop_strings(tokenizer):
    token_ids = tokenizer.encode("a.b.c")
    assert detokenize(tokenizer, token_ids, SamplingParams(stop=".")) == ("a", ".", 2)
    assert detokenize(tokenizer, token_ids, SamplingParams(stop=".", min_tokens=2)) == ("a", ".", 2)
    assert detokenize(tokenizer, token_ids, SamplingParams(stop=".", min_tokens=3)) == ("a.b", ".", 4)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SamplingParams(), "ab"),
        (SamplingParams(skip_special_tokens=False), "ab"),
        (SamplingParams(include_stop_str_in_output=True), "ab"),  # skipped as a special token
        (SamplingParams(include_stop_str_in_output=True, skip_special_tokens=False), "ab<|end|>"),
    ],
)
def test_the_text_of_the_end_of_text_token(tokenizer, params, text):
    detokenizer = Detokenizer(tokenizer.stream(params.skip_special_tokens, []), params)
    *first, end = tokenizer.encode("ab<|end|>")
    for token_id in first:
        detokenizer.append(token_id)
    detokenizer.append(end, is_stop_token=True)
    detokenizer.finish()
    assert detokenizer.text == text


def test_a_special_token_in_the_middle_shows_only_if_asked(tokenizer):
    token_ids = tokenizer.encode("a<|end|>b")
    assert detokenize(tokenizer, token_ids, SamplingParams())[0] == "ab"
    assert detokenize(tokenizer, token_ids, SamplingParams(skip_special_tokens=False))[0] == "a<|end|>b"
