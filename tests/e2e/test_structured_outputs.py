"""Answers by a schema and by an expression, on real weights."""

from __future__ import annotations

import json
import re

import pytest

from ringcore import LLM, SamplingParams
from ringcore.errors import InvalidRequestError
from ringcore.params.structured_outputs import StructuredOutputsParams

pytest.importorskip("llguidance")
pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]

OPTIONS = {"dtype": "float32", "max_model_len": 512, "block_size": 16}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Italy", "Spain"]},
        "population": {"type": "integer", "minimum": 1000, "maximum": 9_999_999},
        "districts": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["city", "country", "population", "districts"],
    "additionalProperties": False,
}
REGEX = r"[A-Z][a-z]{2,9}, (yes|no)\. \d{4}-\d{2}"
PROMPTS = ["A city in Europe as JSON:", "Paris, Rome or Madrid?", "When was it? "]


@pytest.fixture(scope="module")
def llm(smollm2):
    with LLM(smollm2, kv_cache_bytes=1 << 28, **OPTIONS) as one:
        yield one


def params(**options) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 400} | options))


def by_schema(**options) -> SamplingParams:
    return params(structured_outputs=StructuredOutputsParams(json=SCHEMA), **options)


def by_regex(**options) -> SamplingParams:
    return params(structured_outputs=StructuredOutputsParams(regex=REGEX), **options)


def check_value(text: str) -> None:
    value = json.loads(text)
    assert list(value) == SCHEMA["required"]
    assert len(value["city"]) <= 20
    assert value["country"] in SCHEMA["properties"]["country"]["enum"]
    assert 1000 <= value["population"] <= 9_999_999
    assert len(value["districts"]) <= 3
    assert all(len(name) <= 12 for name in value["districts"])


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, marks=pytest.mark.long_form),  # among others it is in `test_neighbours_...`
        pytest.param({"temperature": 1.0, "seed": 5}, marks=pytest.mark.long_form),
        {"temperature": 1.5, "top_p": 0.9, "seed": 6},
    ],
)
def test_answers_by_a_schema(llm, sampling):
    for output in llm.generate(PROMPTS, by_schema(**sampling), use_tqdm=False):
        (answer,) = output.outputs
        assert answer.finish_reason == "stop"
        check_value(answer.text)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, marks=pytest.mark.long_form),
        pytest.param({"temperature": 1.0, "seed": 5}, marks=pytest.mark.long_form),
        {"temperature": 2.0, "min_p": 0.05, "seed": 6},
    ],
)
def test_answers_by_an_expression(llm, sampling):
    for output in llm.generate(PROMPTS, by_regex(**sampling), use_tqdm=False):
        (answer,) = output.outputs
        assert answer.finish_reason == "stop"
        assert re.fullmatch(REGEX, answer.text), answer.text


def test_neighbours_without_a_grammar_answer_as_if_alone(llm):
    plain = params(max_tokens=12)
    alone = llm.generate(PROMPTS[0], plain, use_tqdm=False)[0].outputs[0].token_ids
    mixed = llm.generate([PROMPTS[0], *PROMPTS], [plain, by_schema(), by_regex(), plain], use_tqdm=False)
    assert mixed[0].outputs[0].token_ids == alone
    check_value(mixed[1].outputs[0].text)
    assert re.fullmatch(REGEX, mixed[2].outputs[0].text)


def test_a_choice_and_several_completions(llm):
    spec = StructuredOutputsParams(choice=["positive", "negative", "neutral"])
    (output,) = llm.generate(
        "I like it. This is", params(structured_outputs=spec, n=4, temperature=1.0, seed=1), use_tqdm=False
    )
    assert {answer.text for answer in output.outputs} <= {"positive", "negative", "neutral"}


def test_a_wrong_grammar_is_the_error_of_its_prompt(llm):
    wrong = params(structured_outputs=StructuredOutputsParams(regex="(a"))
    first, second = llm.generate(PROMPTS[:2], [wrong, by_regex()], use_tqdm=False, on_error="return")
    assert isinstance(first.error, InvalidRequestError)
    assert re.fullmatch(REGEX, second.outputs[0].text)


@pytest.mark.long_form
def test_the_same_answers_after_a_preemption(llm, smollm2):
    """In a cache that holds half of them, somebody loses its pages in the middle of its grammar."""
    wanted = [by_schema(seed=seed, temperature=1.0) for seed in (3, 4, 5)]
    undisturbed = llm.generate(PROMPTS, wanted, use_tqdm=False)
    sizes = [-(-(len(o.prompt_token_ids) + len(o.outputs[0].token_ids)) // 16) for o in undisturbed]
    num_blocks = 1 + max(*sizes, sum(sizes) // 2)
    options = OPTIONS | {"max_model_len": 16 * (num_blocks - 1)}
    with LLM(smollm2, num_blocks_override=num_blocks, enable_prefix_caching=False, **options) as small:
        disturbed = small.generate(PROMPTS, wanted, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in disturbed) > 0
    assert [o.outputs[0].token_ids for o in disturbed] == [o.outputs[0].token_ids for o in undisturbed]
