from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from ringcore.routing.prefixes import prefix_names


def num_common(one: list[str], other: list[str]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def test_what_is_short_has_no_name():
    assert prefix_names(list(range(63))) == []
    assert len(prefix_names(list(range(64)))) == 1
    assert [len(prefix_names(list(range(n)))) for n in (95, 96, 127, 128, 191, 192)] == [1, 2, 2, 3, 3, 4]


@given(st.integers(0, 2000), st.integers(0, 300), st.integers(0, 300))
def test_prompts_have_the_names_of_what_they_share(shared, rest, other_rest):
    common = list(range(shared))
    one = prefix_names(common + [100_000 + i for i in range(rest)])
    other = prefix_names(common + [200_000 + i for i in range(other_rest)])
    assert num_common(one, other) == len(prefix_names(common))
    assert set(one[len(prefix_names(common)) :]).isdisjoint(other)


def test_salts_share_nothing():
    tokens = list(range(500))
    assert set(prefix_names(tokens, "a")).isdisjoint(prefix_names(tokens, "b") + prefix_names(tokens))


def test_a_long_prompt_has_few_names():
    assert len(prefix_names([7] * 200_000)) == 17
