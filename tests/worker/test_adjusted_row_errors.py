"""What goes wrong with one row's adjustments is that row's error, with its reason; its neighbours go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from adjusted_model import Arithmetic, Progression
from device_runner import rows_on_device
from step_driver import admit, decode, make_config, run, sampled, start

from ringcore.errors import ConfigError, InvalidRequestError
from ringcore.params.sampling_params import SamplingParams
from ringcore.params.structured_outputs import StructuredOutputsParams
from ringcore.protocol.steps import NewRequest
from ringcore.worker.logits.row_adjustments import NO_TOKEN_LEFT, RowAdjustments
from ringcore.worker.worker import Worker

Reference = Callable[[Sequence[int], int], list[int]]

EOS, VOCAB_SIZE = 1, 97
PROMPT, SHORT = [11, 60, 23, 8, 41], [5, 17, 80]


@pytest.fixture(params=["cpu", "gpu"])
def worker(request: pytest.FixtureRequest, tiny_llama: tuple[str, Any]) -> Iterator[Worker]:
    if request.param == "gpu":
        rows_on_device(request.getfixturevalue("monkeypatch"), plans_on_device=True)
    config = make_config(tiny_llama[0], logits_processors=["processors:Pushed", "processors:NoRepeat"])
    worker = start(Worker(config, 0, None))
    adjustments_of(worker).grammars = Arithmetic(EOS, VOCAB_SIZE)  # type: ignore[assignment]
    yield worker
    worker.shutdown()


def adjustments_of(worker: Worker) -> RowAdjustments:
    assert worker._runner is not None
    return worker._runner.adjustments


def asking(bad_words: Sequence[Sequence[int]] = (), row: int = 0, **params: Any) -> NewRequest:
    given = SamplingParams(**{"temperature": 0, "max_tokens": None} | params)
    return admit(row, PROMPT, [1, 2, 3, 4], params=given, bad_words=bad_words, stop_token_ids=[EOS])


def beside(worker: Worker, new: NewRequest, reference: Reference, num_steps: int = 1) -> list[str]:
    """The errors of row 0 in a chunk, its first token and `num_steps` more, beside a plain row that goes on."""
    neighbour = admit(1, SHORT, [5, 6, 7, 8])
    outputs = [run(worker, {0: 2, 1: 3}, new=[new, neighbour])]
    outputs += [run(worker, {0: 3, 1: 1}), run(worker, {0: 1, 1: 1}, num_steps=num_steps)]
    errors = [error for output in outputs for error in output.row_errors]
    assert {error.row for error in errors} <= {0}
    written: list[int] = []
    for output in outputs:
        assert output.rows is not None
        tokens = output.token_ids.reshape(len(output.rows), -1)
        written += tokens[output.rows.tolist().index(1)].tolist()
    assert written == reference(SHORT, 2 + num_steps)
    return [error.message for error in errors]


def test_a_step_of_plain_rows_is_not_adjusted(
    worker: Worker, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(RowAdjustments, "adjust", fail)
    monkeypatch.setattr(RowAdjustments, "count", fail)
    first = sampled(run(worker, {0: 5}, new=[admit(0, PROMPT, [1, 2, 3])]))
    assert [first[0], *decode(worker, [0], 3)[0]] == reference(PROMPT, 4)


@pytest.mark.parametrize(
    ("params", "bad_words"),
    [
        ({"allowed_token_ids": [5, 6]}, [[5], [6]]),
        ({"allowed_token_ids": [EOS], "min_tokens": 3}, []),
        ({"allowed_token_ids": [7], "temperature": 1.0}, [[7], [7, 7]]),
    ],
)
def test_a_row_without_a_token_left(
    worker: Worker, reference: Reference, params: dict[str, Any], bad_words: list[list[int]]
) -> None:
    assert set(beside(worker, asking(bad_words, **params), reference)) == {NO_TOKEN_LEFT}


def test_a_row_comes_to_an_end_amid_several_steps(worker: Worker, reference: Reference) -> None:
    """One word of two tokens bars the only token that is allowed, from the second on."""
    found = beside(worker, asking([[7, 7]], allowed_token_ids=[7]), reference, num_steps=3)
    assert found == [NO_TOKEN_LEFT]


def test_logits_that_are_not_finite_are_no_bars(
    worker: Worker, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker._runner is not None
    compute = worker._runner.paged.model.compute_logits

    def with_nan(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = compute(hidden, out)
        logits[0] = math.nan
        return logits

    run(worker, {0: 5, 1: 3}, new=[asking(allowed_token_ids=[4, 5]), admit(1, SHORT, [5, 6, 7])])
    monkeypatch.setattr(worker._runner.paged.model, "compute_logits", with_nan)
    output = run(worker, {0: 1, 1: 1})
    assert [(error.row, "logits are not finite" in error.message) for error in output.row_errors] == [(0, True)]
    assert sampled(output) == {1: reference(SHORT, 2)[1]}


def test_without_adjustments_logits_that_are_not_finite_mask_no_token(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though token 1, which a sampler finds in their place, is what a row without a token left gets."""
    assert worker._runner is not None
    compute = worker._runner.paged.model.compute_logits

    def with_infinity(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = compute(hidden, out)
        logits[:, 1] = math.inf
        return logits

    monkeypatch.setattr(worker._runner.paged.model, "compute_logits", with_infinity)
    outputs = [run(worker, {0: 3}, new=[admit(0, SHORT, [5, 6])]), run(worker, {0: 1})]
    for output in outputs:
        assert ["logits are not finite" in error.message for error in output.row_errors] == [True]


@pytest.mark.parametrize(("method", "error"), [("admit", "LookupError: told to"), ("apply", "ArithmeticError: told")])
def test_a_processor_that_raises(worker: Worker, reference: Reference, method: str, error: str) -> None:
    found = beside(worker, asking(extra_args={"push": 3, "fail": method}), reference)
    assert found
    for message in found:
        assert f"the logits processor Pushed raised in {method}: {error}" in message


@pytest.mark.parametrize("is_finite", [True, False])
def test_the_first_error_of_a_row_is_told(
    worker: Worker, reference: Reference, monkeypatch: pytest.MonkeyPatch, is_finite: bool
) -> None:
    """What the processor raised, of a row that has no token left besides, or no finite logits."""
    params: dict[str, Any] = {"extra_args": {"push": 3, "fail": "apply"}}
    if is_finite:
        found = beside(worker, asking([[5]], allowed_token_ids=[5], **params), reference, num_steps=2)
    else:
        assert worker._runner is not None
        model: Any = worker._runner.paged.model
        monkeypatch.setattr(
            model, "compute_logits", lambda hidden, out=None: torch.full((len(hidden), VOCAB_SIZE), math.nan)
        )
        outputs = [run(worker, {0: 5}, new=[asking(**params)]), run(worker, {0: 1})]
        found = [error.message for output in outputs for error in output.row_errors]
    assert found
    assert all("raised in apply" in message for message in found)


def test_a_processor_that_raises_when_a_row_leaves_takes_no_more(worker: Worker, reference: Reference) -> None:
    run(worker, {0: 5}, new=[asking(extra_args={"push": 3})])
    pushed: Any = adjustments_of(worker)._processors._processors[0]
    pushed.pushed.clear()  # what `remove` then does not find
    run(worker, {}, finished=[0])
    found = beside(worker, asking(extra_args={"push": 3}), reference)
    assert found
    assert "the logits processor Pushed raised in remove: KeyError" in found[0]


def guided(regex: str) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(regex=regex)}


def test_a_grammar_that_does_not_compile(worker: Worker, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Arithmetic, spec: StructuredOutputsParams) -> Progression:
        raise InvalidRequestError("no such rule", field="structured_outputs", value=None)

    monkeypatch.setattr(Arithmetic, "matcher", refuse)
    assert set(beside(worker, asking(**guided("5 1 9")), reference)) == {"no such rule"}


def test_a_matcher_that_refuses_what_its_mask_allowed(
    worker: Worker, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progression, "accept", lambda self, token_ids: token_ids[0] != 6 and accept(self, token_ids))
    found = beside(worker, asking(**guided("5 1 9")), reference, num_steps=3)
    assert len(found) == 1
    assert "does not accept token 6, sampled at position 1 of the completion" in found[0]


accept = Progression.accept


def test_a_matcher_at_its_limit(worker: Worker, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = property(lambda self: "it takes too long" if self.next > 6 else None)
    monkeypatch.setattr(Progression, "failure", limit)
    found = beside(worker, asking(**guided("5 1 9")), reference, num_steps=3)
    assert found == ["structured_outputs: it takes too long"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("processors:Missing", "has no subclass Missing"),
        ("processors:NOT_A_PROCESSOR", "has no subclass"),
        ("no_such_module:Class", "importing no_such_module raised ModuleNotFoundError"),
        ("processors", "give 'module:Class'"),
        (":Class", "give 'module:Class'"),
        ("__main__:Class", "move the class"),
        (3, "give a class"),
    ],
)
def test_a_wrong_name_is_a_config_error(tiny_llama: tuple[str, Any], name: Any, told: str) -> None:
    with pytest.raises(ConfigError, match="logits_processors") as error:
        make_config(tiny_llama[0], logits_processors=[name])
    assert told in error.value.message


def test_a_class_becomes_its_name_where_workers_can_import_it(tiny_llama: tuple[str, Any]) -> None:
    from processors import Pushed

    class Local(Pushed):
        pass

    assert make_config(tiny_llama[0], logits_processors=[Pushed]).model.logits_processors == ["processors:Pushed"]
    with pytest.raises(ConfigError, match="top level of a module"):
        make_config(tiny_llama[0], logits_processors=[Local])
    with pytest.raises(ConfigError, match="give a list"):
        make_config(tiny_llama[0], logits_processors="processors:Pushed")


def test_a_processor_that_cannot_be_made_stops_the_start(tiny_llama: tuple[str, Any]) -> None:
    worker = Worker(make_config(tiny_llama[0], logits_processors=["processors:RaisesWhenMade"]), 0, None)
    with pytest.raises(ConfigError, match="making it raised OSError: no such table"):
        start(worker)
    worker.shutdown()


def test_the_front_end_asks_the_processors(tiny_llama: tuple[str, Any]) -> None:
    from ringcore.front_end.input_processor import InputProcessor

    config = make_config(tiny_llama[0], logits_processors=["processors:Pushed"])
    inputs = InputProcessor(config, None)  # type: ignore[arg-type] - token ids need no tokenizer
    inputs.prepare([3, 4], SamplingParams(extra_args={"push": 4})).finish(None)
    with pytest.raises(InvalidRequestError, match="Pushed refuses the request: push has to be a token id") as error:
        inputs.prepare([3, 4], SamplingParams(extra_args={"push": "four"})).finish(None)
    assert error.value.details["field"] == "extra_args"
