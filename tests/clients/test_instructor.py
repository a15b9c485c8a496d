"""instructor in each of its modes for OpenAI's and Anthropic's clients."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from running_service import served
from said import BERN, JSON, City, call, user

pytestmark = [pytest.mark.long_form, pytest.mark.usefixtures("is_left_idle")]

CALLS = ["TOOLS", "TOOLS_STRICT", "FUNCTIONS", "RESPONSES_TOOLS"]
TEXTS = {"JSON": JSON, "JSON_SCHEMA": JSON, "JSON_O1": JSON, "MD_JSON": f"```json\n{JSON}\n```"}
ANTHROPIC = {"ANTHROPIC_TOOLS": call("City"), "ANTHROPIC_REASONING_TOOLS": call("City"), "ANTHROPIC_JSON": JSON}


@pytest.fixture(scope="module")
def instructor():
    return pytest.importorskip("instructor")


def client_of(instructor, url, mode):
    import openai

    return instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode[mode])


@pytest.mark.parametrize("mode", [*CALLS, *TEXTS])
def test_an_answer(instructor, url, mode):
    asked = {"model": "echo", "messages": user(TEXTS.get(mode, call("City"))), "max_retries": 0}
    assert client_of(instructor, url, mode).create(response_model=City, **asked).city == "Bern"


@pytest.mark.parametrize("mode", TEXTS)
def test_an_answer_that_grows(instructor, url, mode):
    asked = {"model": "echo", "messages": user(TEXTS[mode]), "max_retries": 0}
    *_, last = client_of(instructor, url, mode).create_partial(response_model=City, **asked)
    assert last.city == "Bern"


def test_several_answers(instructor, url):
    asked = {"model": "echo", "messages": user(f"{call('City')}\n{call('City')}")}
    parallel = client_of(instructor, url, "PARALLEL_TOOLS").create(response_model=Iterable[City], **asked)
    assert list(parallel) == [BERN, BERN]
    cities = call("IterableCity", f'{{"tasks": [{JSON}, {JSON}]}}')
    asked = {"model": "echo", "messages": user(cities)}
    iterated = client_of(instructor, url, "TOOLS").create_iterable(response_model=City, **asked)
    assert list(iterated) == [BERN, BERN]


@pytest.mark.parametrize("mode", ANTHROPIC)
def test_anthropics_client(instructor, service, mode):
    anthropic = pytest.importorskip("anthropic")
    client = instructor.from_anthropic(
        anthropic.Anthropic(base_url=service.url, api_key="none"), mode=instructor.Mode[mode]
    )
    asked = {"model": "echo", "messages": user(ANTHROPIC[mode]), "max_tokens": 1024, "max_retries": 0}
    assert client.messages.create(response_model=City, **asked).city == "Bern"


@pytest.fixture(scope="module")
def real_url(smollm2):
    options = {"executor": "multiproc", "load_format": "auto", "max_model_len": 1024, "num_blocks_override": None}
    with served(smollm2, options | {"enable_sleep_mode": False}, served_model_names=("smollm2",)) as running:
        yield f"{running.url}/v1"


@pytest.mark.real_model
@pytest.mark.parametrize("mode", [*CALLS, "JSON_SCHEMA"])
def test_a_real_model_is_held_to_the_schema(instructor, real_url, mode):
    """By the grammar alone: it has not learned to call tools."""

    class Answer(City):
        is_large: bool

    asked = {"model": "smollm2", "messages": user("Is Bern a large city?"), "temperature": 0, "max_retries": 0}
    answer = client_of(instructor, real_url, mode).create(response_model=Answer, **asked)
    assert answer.city
    if mode != "FUNCTIONS":
        *_, last = client_of(instructor, real_url, mode).create_partial(response_model=Answer, **asked)
        assert last.city
