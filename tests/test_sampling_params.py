"""Every field of SamplingParams at its bounds and past them."""

from __future__ import annotations

import msgspec
import pytest

from ringcore import SamplingParams
from ringcore.errors import InvalidRequestError, UnknownOptionError

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
    {"logprobs": 0},
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
    ("top_k", {"top_k": -1}),
    ("top_k", {"top_k": 2.5}),
    ("top_k", {"top_k": 2**31}),
    ("seed", {"seed": -1}),
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
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": 21}),
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
    with pytest.raises(InvalidRequestError, match=rf"^{field}=.*: (give|a stop string|a surrogate)") as caught:
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
