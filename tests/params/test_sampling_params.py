"""Every field of SamplingParams at its bounds and past them."""

from __future__ import annotations

from dataclasses import fields

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcore import SamplingParams, StructuredOutputsParams
from ringcore.errors import InvalidRequestError, UnknownOptionError


def nested(depth: int) -> dict:
    inner: dict = {}
    for _ in range(depth - 1):
        inner = {"a": inner}
    return inner


GOOD = [
    {"temperature": 0},
    {"temperature": 1e-5},
    {"top_p": 1.0, "top_k": 0, "min_p": 0.0},
    {"top_p": 1e-9, "min_p": 1},
    {"seed": 2**63 - 1},
    {"max_tokens": None, "min_tokens": 7},
    {"max_tokens": 3, "min_tokens": 3},
    {"stop": "x" * 256},
    {"stop": ["a"] * 16},
    {"stop_token_ids": list(range(64))},
    {"logprobs": 20},
    {"logprobs": 0, "prompt_logprobs": 0},
    {"logprobs": -1, "prompt_logprobs": -1},
    {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 2},
    {"repetition_penalty": 1e-5},
    {"logit_bias": {}},
    {"logit_bias": {n: 100 if n % 2 else -100.0 for n in range(1024)}},
    {"allowed_token_ids": [0, 2**31 - 1, 0]},
    {"bad_words": ["x" * 256] * 64},
    {"extra_args": {}},
    {"extra_args": {"a": [None, True, 2**63 - 1, -0.5, "é", [], {"b": {}}]}},
    {"structured_outputs": StructuredOutputsParams(choice=["a", "b"]), "max_tokens": None},
    {"n": 1, "output_kind": "final"},
    {"n": 64, "seed": 2**63 - 64, "output_kind": "delta"},
]

BAD = [
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": float("inf")}),
    ("temperature", {"temperature": 1e-6}),
    ("temperature", {"temperature": True}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.0001}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": 1.1}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 2.5}),
    ("top_k", {"top_k": 2**31}),
    ("seed", {"seed": -(2**63) - 1}),
    ("seed", {"seed": 2**63}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": True}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 4, "max_tokens": 3}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": "x" * 257}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop", {"stop": [1]}),
    ("stop", {"stop": "\ud800"}),
    ("stop_token_ids", {"stop_token_ids": list(range(65))}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("logprobs", {"logprobs": -2}),
    ("logprobs", {"logprobs": 2**31}),
    ("logprobs", {"logprobs": True}),
    ("prompt_logprobs", {"prompt_logprobs": -2}),
    ("prompt_logprobs", {"prompt_logprobs": 1.0}),
    ("stop", {"stop": 5}),
    ("stop_token_ids", {"stop_token_ids": 5}),
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("presence_penalty", {"presence_penalty": "1"}),
    ("frequency_penalty", {"frequency_penalty": -2.1}),
    ("frequency_penalty", {"frequency_penalty": float("nan")}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": 1e-30}),
    ("repetition_penalty", {"repetition_penalty": 1e6}),
    ("repetition_penalty", {"repetition_penalty": None}),
    ("logit_bias", {"logit_bias": [1]}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 0)}),
    ("logit_bias", {"logit_bias": {"5": 1.0}}),
    ("logit_bias", {"logit_bias": {-1: 1.0}}),
    ("logit_bias", {"logit_bias": {True: 1.0}}),
    ("logit_bias", {"logit_bias": {5: 100.5}}),
    ("logit_bias", {"logit_bias": {5: float("-inf")}}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("allowed_token_ids", {"allowed_token_ids": [-1]}),
    ("allowed_token_ids", {"allowed_token_ids": [1.0]}),
    ("allowed_token_ids", {"allowed_token_ids": 5}),
    ("bad_words", {"bad_words": []}),
    ("bad_words", {"bad_words": "word"}),
    ("bad_words", {"bad_words": [""]}),
    ("bad_words", {"bad_words": ["x" * 257]}),
    ("bad_words", {"bad_words": ["x"] * 65}),
    ("bad_words", {"bad_words": ["\udfff"]}),
    ("extra_args", {"extra_args": [1]}),
    ("extra_args", {"extra_args": {1: 2}}),
    ("extra_args", {"extra_args": {"a": object()}}),
    ("extra_args", {"extra_args": {"a": 2**63}}),
    ("extra_args", {"extra_args": {"a": (1, 2)}}),
    ("extra_args", {"extra_args": {"a": "x" * 70_000}}),
    ("extra_args", {"extra_args": {"a": [0] * 70_000}}),
    ("extra_args", {"extra_args": {"a": "\ud800"}}),
    ("extra_args", {"extra_args": nested(17)}),
    ("structured_outputs", {"structured_outputs": {"regex": "a"}}),
    ("min_tokens", {"structured_outputs": StructuredOutputsParams(regex="a"), "min_tokens": 1}),
    ("ignore_eos", {"structured_outputs": StructuredOutputsParams(regex="a"), "ignore_eos": True}),
    ("ignore_eos", {"ignore_eos": 1}),
    ("detokenize", {"detokenize": 0}),
    ("detokenize", {"detokenize": False, "stop": "."}),
    ("n", {"n": 0}),
    ("n", {"n": 65}),
    ("n", {"n": True}),
    ("seed", {"n": 2, "seed": 2**63 - 1}),
    ("output_kind", {"output_kind": "all"}),
    ("output_kind", {"output_kind": None}),
]


@pytest.mark.parametrize("options", GOOD, ids=str)
def test_good_values_survive_the_wire(options):
    params = SamplingParams(**options)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(("field", "options"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_value_is_named_with_its_remedy(field, options):
    with pytest.raises(InvalidRequestError, match=rf"^{field}=.*: (give|a |the keys|it holds|lists)") as caught:
        SamplingParams(**options)
    assert caught.value.details["field"] == field
    msgspec.msgpack.encode(caught.value.details)  # so that it can be told to another process


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UnknownOptionError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1)
    with pytest.raises(TypeError, match=r"valid names: .*ignore_eos"):
        SamplingParams(zzzz=1)


def test_what_comes_over_the_wire_is_checked_too():
    wire = msgspec.msgpack.encode({"top_p": 0.0})
    with pytest.raises(msgspec.ValidationError, match=r"top_p=0\.0"):
        msgspec.msgpack.decode(wire, type=SamplingParams)


def test_data_that_is_shared_a_million_times_or_holds_itself_is_refused_at_once():
    wide: list = []
    for _ in range(12):
        wide = [wide] * 8
    loop: dict = {}
    loop["a"] = [loop]
    for data in ({"a": wide}, loop):
        with pytest.raises(InvalidRequestError, match=r"extra_args=.*(make it smaller|make it flatter)"):
            SamplingParams(extra_args=data)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-(2**63), 2**63, 2**31])
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.binary(max_size=3)
    | st.builds(object),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.integers() | st.text(st.characters(), max_size=3) | st.none(), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(name=st.sampled_from([field.name for field in fields(SamplingParams)]), value=JUNK)
def test_any_junk_is_taken_or_named(name, value):
    try:
        params = SamplingParams(**{name: value})
    except InvalidRequestError as error:
        refusal = error
    else:
        msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
        return
    assert refusal.details["field"] == name
    msgspec.msgpack.encode([refusal.message, refusal.details])


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("value", [10**5000, Rude()], ids=["huge", "rude"])
def test_what_has_no_text_is_named_all_the_same(value):
    for name in (field.name for field in fields(SamplingParams)):
        for junk in (value, [value], {"a": value}, {5: value}):
            with pytest.raises(InvalidRequestError) as caught:
                SamplingParams(**{name: junk})
            assert caught.value.details["field"] == name


def test_values_of_vllm():
    params = SamplingParams(top_k=-1, seed=-1, repetition_penalty=3.0, detokenize=False)
    assert (params.top_k, params.seed) == (0, None)
    assert SamplingParams(seed=-(2**63)).seed == 0
    assert SamplingParams(seed=-2, n=2).seed == 2**63 - 2
    assert params.clone() == params
    assert params.clone() is not params
