"""A parameter that is declared as a row column, and nowhere else, on its way from the wire to the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from step_driver import admit, cache_of, make_step

from ringcore.kernels.logits.sampling import DeviceSamplingInputs, sample_tokens
from ringcore.kernels.steps.step import prepare_decode
from ringcore.kernels.steps.step_state import DecodeInputs
from ringcore.kv_cache.spec import FullAttentionSpec
from ringcore.model_executor.sampler import sample
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import decoder, encoder
from ringcore.protocol.row_parameters import EVERY_PARAMETER, ROW_PARAMETERS, RowParameter, RowParameters
from ringcore.protocol.steps import NewRequest, SchedulerOutput
from ringcore.worker.rows.device_rows import DeviceRows
from ringcore.worker.rows.request_rows import RequestRows
from ringcore.worker.start_up.profile_run import sampling_inputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CACHE = cache_of(FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float32"), max_model_len=20)
VOCAB_SIZE = 61
# With one of them a record has 10 words, of which one of 32 bits leaves the last unused.
ADDED = [
    RowParameter("added", "float32", lambda request: request.sampling_params.frequency_penalty / 4),
    RowParameter("added", "int32", lambda request: -request.num_prompt_tokens),
    RowParameter("added", "int64", lambda request: -request.num_prompt_tokens << 33),
    RowParameter("added", "float64", lambda request: request.sampling_params.frequency_penalty / 3),
]


class Rows:
    """Both copies of the persistent batch, driven by messages as a worker reads them from the wire."""

    def __init__(self, table: RowParameters) -> None:
        self.table = table
        self.host = RequestRows(4, CACHE, num_eos_tokens=1, parameters=table)
        self.device = DeviceRows(self.host, DEVICE)

    def apply(self, new: list[NewRequest], finished: list[int] | None = None) -> None:
        message = encoder().encode(make_step({}, new=new, finished=finished or []))
        step = decoder(SchedulerOutput).decode(message)
        self.host.apply(step)
        self.device.admit(step.new_requests, self.host)

    def decode_inputs(self, *rows: int) -> DeviceSamplingInputs:
        """Of a decode step of `rows`, with one row of padding."""
        self.device.set_batch(np.array(rows))
        self.device.write()
        inputs = DecodeInputs.allocate(self.device.layout, self.device.state, 4)
        inputs.sampling.parameters.fill_(-7)
        prepare_decode(self.device.state, self.device.layout, inputs, len(rows) + 1)
        return inputs.sampling

    def eager_inputs(self, *rows: int) -> DeviceSamplingInputs:
        return DeviceSamplingInputs.from_host(self.host.sampling_inputs(np.array(rows)), DEVICE)

    def records(self, words: torch.Tensor) -> np.ndarray:
        """[n] of words [n, num_words] on the device."""
        return words.cpu().numpy().view(self.table.dtype)[:, 0]


@pytest.fixture(params=ADDED, ids=lambda column: column.dtype)
def added(request: pytest.FixtureRequest) -> RowParameter:
    column: RowParameter = request.param
    return column


@pytest.fixture
def rows(added: RowParameter) -> Rows:
    return Rows(RowParameters([*ROW_PARAMETERS.columns, added]))


def new(row: int, *tokens: int, num_prompt: int, penalty: float) -> NewRequest:
    params = SamplingParams(temperature=0.7, top_k=20, min_p=0.01, seed=row + (5 << 40), frequency_penalty=penalty)
    return admit(row, tokens, [3 * row + 1, 3 * row + 2], params=params, num_prompt_tokens=num_prompt)


def test_it_is_in_the_rows_the_decode_inputs_and_the_eager_inputs(rows: Rows, added: RowParameter) -> None:
    requests = [new(2, 5, 6, num_prompt=2, penalty=1.25), new(0, 7, 8, 9, num_prompt=3, penalty=-0.5)]
    rows.apply(requests)
    expected = np.array([added.value(request) for request in requests], dtype=added.dtype)
    assert len(set(expected)) == 2, "rows differ"
    assert rows.host.parameters["added"][[2, 0]].tolist() == expected.tolist()
    decoding, eager = rows.decode_inputs(2, 0), rows.eager_inputs(2, 0)
    for found in (decoding, eager):
        assert rows.records(found.parameters)["added"][:2].tolist() == expected.tolist()
    assert rows.records(decoding.parameters[2:3])[0] == np.zeros((), rows.table.dtype), "padding"
    assert (decoding.parameters[3] == -7).all(), "nothing is written after the step's rows"


def test_the_declared_ones_are_where_the_kernels_read_them(rows: Rows) -> None:
    """The same tokens as without the added column, whose record is another."""
    requests = [new(2, 5, 6, num_prompt=2, penalty=1.25), new(0, 7, 8, 9, num_prompt=3, penalty=-0.5)]
    narrow = Rows(ROW_PARAMETERS)
    narrow.apply(requests), rows.apply(requests)
    assert narrow.table.dtype != rows.table.dtype
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    expected = sample(logits, narrow.host.sampling_inputs(np.array([2, 0]))).token_ids
    assert sample(logits, rows.host.sampling_inputs(np.array([2, 0]))).token_ids.tolist() == expected.tolist()
    assert expected.tolist() != logits.argmax(-1).tolist(), "drawn"
    for inputs in (rows.decode_inputs(2, 0), rows.eager_inputs(2, 0), narrow.decode_inputs(2, 0)):
        # The rows have computed nothing yet, so a decode step would place their tokens elsewhere.
        inputs.position.copy_(torch.tensor([2, 3, 0, 0][: len(inputs.position)]))
        assert sample_tokens(logits.to(DEVICE), inputs)[0].tolist() == expected.tolist()


def test_a_resumed_request_has_it_again(rows: Rows, added: RowParameter) -> None:
    """Preempted, it comes back as new, with its generated tokens, in a row of somebody else's past."""
    first, other = new(1, 5, 6, num_prompt=2, penalty=1.25), new(3, 7, 8, 9, num_prompt=3, penalty=-0.5)
    rows.apply([first, other])
    rows.decode_inputs(1, 3)
    resumed = new(3, 5, 6, 17, 18, num_prompt=2, penalty=1.25)
    rows.apply([resumed], finished=[1, 3])
    value = np.array(added.value(first), dtype=added.dtype)
    assert rows.host.parameters["added"][3] == value
    for found in (rows.decode_inputs(3), rows.eager_inputs(3)):
        assert rows.records(found.parameters)["added"][0] == value


def test_the_profile_run_has_it(rows: Rows, added: RowParameter) -> None:
    inputs = sampling_inputs(3, rows.table)
    request = admit(0, [0], [], params=EVERY_PARAMETER)
    assert inputs.parameters["added"].tolist() == [np.array(added.value(request), dtype=added.dtype).item()] * 3
    assert inputs.parameters["top_k"].tolist() == [EVERY_PARAMETER.top_k] * 3
    assert DeviceSamplingInputs.from_host(inputs, DEVICE).record == rows.table.dtype


def test_dummy_runs_set_every_parameter() -> None:
    """A column that is added is given a value in `EVERY_PARAMETER` that is not its default."""
    default, busy = (
        ROW_PARAMETERS.record(admit(0, [0], [], params=params)) for params in (SamplingParams(), EVERY_PARAMETER)
    )
    names = ROW_PARAMETERS.dtype.names or ()
    same = [name for name, one, other in zip(names, default, busy, strict=True) if one == other]
    assert same == ["seed"], "which is the request's"
