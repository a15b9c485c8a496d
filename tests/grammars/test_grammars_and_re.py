"""Regular expressions by either backend are those of Python's `re`: each accepts what `re.fullmatch` does, no more and
no less, or refuses the expression."""

from __future__ import annotations

import random
import re
import warnings

import pytest
from grammar_texts import Grammar, make_backend
from random_regexes import any_regex, changed, kept_regex, random_text

from ringcore.errors import InvalidRequestError
from ringcore.params.structured_outputs import StructuredOutputsParams

BACKENDS = ("llguidance", "xgrammar")
# By the constructs that libraries were seen to read in other ways.
NAMED = [
    *(".", "a.b", "[^a]", "[^]]", r"[\^]", r"\s", r"\S", r"[^\s]", "(?i:k)", "(?i)é", "[[:alpha:]]", "[a&&b]", "a{,2}"),
    *(
        "a{",
        "{a}",
        "[]a]",
        "(?P<x>a)b",
        r"\Aa\Z",
        "^a|b$",
        "(^a$)",
        "a*?b??",
        "(|a)b",
        "a{0}b",
        "(?s).",
        "(?-i:a)",
        "é{2}",
    ),
    *("[é-í🙂]{2}", r"[\x00-\x1f]", r"\W\D", "(a*)*", "(?:)", '"', "/", "\n", r"\0", "(?#c)a", r"[\b]", r"[^\W\d]"),
]
REFUSED = [
    ("a(?=b)", "lookahead"),
    ("(?!b)a", "lookahead"),
    ("(?<=a)b", "lookbehind"),
    (r"\bfoo\b", "word boundary"),
    (r"(a)\1", "back-reference"),
    ("(?P<x>a)(?P=x)", "back-reference"),
    ("(a)(?(1)b|c)", "conditional"),
    ("(?>a)", "atomic"),
    ("a++", "possessive"),
    ("a$b", "anchor"),
    ("(a|^b)c^", "anchor"),
    ("(?m:^a)", "flag 'm'"),
    ("(?x) a", "flag 'x'"),
    (r"(?u:\w)", "flag 'u'"),
    ("(?i-i:a)", "flags 'i-i'"),
    (r"\141", "octal"),
    (r"\N{DIGIT ONE}", "N"),
    ("a**", "after another"),
    ("(a", r"\( without"),
    ("a)", r"\) without"),
    ("[b-a]", "range"),
    (r"[\ud800]", "surrogate"),
    (r"[^\d\D]", "set without characters"),
    ("(?:" * 70 + "a" + ")" * 70, "deep"),
]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    pytest.importorskip(request.param)
    return make_backend(request.param)


def check(backend, regex: str, rng: random.Random, num_texts: int) -> bool:
    """Whether the backend took the expression; then it means what `re` reads in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            pattern = re.compile(regex, re.ASCII)
        except (re.error, OverflowError):
            pattern = None
    try:
        grammar = Grammar(backend, StructuredOutputsParams(regex=regex))
    except InvalidRequestError:
        return False
    assert pattern is not None, f"{regex!r} is no expression of re"
    # Short: `re` goes back exponentially far in some of these.
    texts = [grammar.write(rng, max_tokens=16) for _ in range(num_texts)]
    written = [text.decode() for text in texts if text is not None]
    for text in written:
        assert pattern.fullmatch(text), f"{regex!r} is not matched by {text!r}"
    for text in [*(changed(text, rng) for text in written), *(random_text(rng) for _ in range(num_texts))]:
        assert grammar.accepts(text, rng) == bool(pattern.fullmatch(text)), f"{regex!r} and {text!r}"
    return True


@pytest.mark.parametrize("regex", NAMED)
def test_what_libraries_read_in_other_ways(backend, regex):
    assert check(backend, regex, random.Random(regex), 30)


def test_random_expressions(backend, is_long):
    for seed in range(2000 if is_long else 60):
        rng = random.Random(seed)
        regex = kept_regex(rng)
        if not check(backend, regex, rng, 6):
            with pytest.raises(InvalidRequestError, match="no text at all"):
                backend.compile(StructuredOutputsParams(regex=regex))


def test_scraps_of_expressions_are_read_as_re_does_or_refused(backend, is_long):
    taken = sum(check(backend, any_regex(rng), rng, 3) for rng in map(random.Random, range(5000 if is_long else 400)))
    assert taken > 40


@pytest.mark.parametrize(("regex", "named"), REFUSED)
def test_what_no_backend_keeps_is_refused_by_name(backend, regex, named):
    with pytest.raises(InvalidRequestError, match=named):
        backend.compile(StructuredOutputsParams(regex=regex))


def test_properties_of_characters():
    pytest.importorskip("llguidance")
    grammar = Grammar(make_backend("llguidance"), StructuredOutputsParams(regex=r"\p{Lu}[^\p{L}\d]"))
    rng = random.Random(0)
    assert [text for text in ("É!", "é!", "ÉÉ", "É1") if grammar.accepts(text, rng)] == ["É!"]
    pytest.importorskip("xgrammar")
    with pytest.raises(InvalidRequestError, match=r"xgrammar cannot enforce .p\{Lu\}"):
        make_backend("xgrammar").compile(StructuredOutputsParams(regex=r"\p{Lu}"))
