"""The two ends of a step, against the same rules written out row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ringcore.kernels.steps.finish_drafts import finish_drafts
from ringcore.kernels.steps.step import RaggedRows, fill_last_tokens, finish_rows, prepare_decode, write_words
from ringcore.kernels.steps.step_state import (
    ARRIVALS,
    BAD_HIDDEN,
    BAD_LOGITS,
    LAST_TOKEN,
    NOT_GAINED,
    NOT_GAINED_BAD,
    NUM_CACHED,
    NUM_COMPUTED,
    NUM_PROMPT,
    NUM_STOPS,
    PARAMETERS,
    RING_HEAD,
    STEP_COUNT,
    STOPPED,
    DecodeInputs,
    StateLayout,
)
from ringcore.protocol.row_parameters import ROW_PARAMETERS

LAYOUT = StateLayout(
    max_rows=7, max_stops=3, block_sizes=(16, 4), table_widths=(10, 37), parameters=ROW_PARAMETERS.dtype, max_drafted=12
)
MASKED = 1  # in place of a token: all of them are masked
FREE = (0, 3)  # rows without a request


def record(state: torch.Tensor, row: int) -> np.ndarray:
    """[record_words] int32, a view of the host's copy."""
    at = LAYOUT.records_at + row * LAYOUT.record_words
    return state.numpy()[at : at + LAYOUT.record_words]


def table(state: torch.Tensor, group: int, row: int) -> np.ndarray:
    at = LAYOUT.table_at(group) + row * LAYOUT.table_stride(group)
    return state.numpy()[at : at + LAYOUT.table_widths[group]]


@pytest.fixture
def state() -> torch.Tensor:
    """On the CPU: rows with a random past, of which row 5 has stopped and row 6 has its last token cached."""
    rng = np.random.default_rng(3)
    state = LAYOUT.allocate(torch.device("cpu"))
    for row in range(LAYOUT.max_rows):
        if row in FREE:
            continue
        words = record(state, row)
        words[:] = rng.integers(1, 90, len(words))
        words[NUM_COMPUTED.value] = rng.integers(20, 140)
        words[NUM_CACHED.value] = words[NUM_COMPUTED.value] - 5
        words[NUM_PROMPT.value] = words[NUM_COMPUTED.value] - rng.integers(0, 9)
        words[NUM_STOPS.value] = row % 4
        words[STOPPED.value] = row == 5
        parameters = words[PARAMETERS.value : LAYOUT.stops_at].view(ROW_PARAMETERS.dtype)
        for name in ("temperature", "top_p", "min_p"):
            parameters[name] = rng.random()
        parameters["seed"] = -5 - row * (1 << 40)
        parameters["min_tokens"] = (0, 100)[row % 2]
        for group in range(2):
            table(state, group, row)[:] = rng.integers(1, 1000, LAYOUT.table_widths[group])
    record(state, 6)[NUM_CACHED.value] = record(state, 6)[NUM_COMPUTED.value] + 1
    return state


def test_the_parts_of_the_state_do_not_overlap() -> None:
    edges = [
        LAYOUT.batch_at,
        LAYOUT.drafts_at,
        LAYOUT.records_at,
        LAYOUT.table_at(0),
        LAYOUT.table_at(1),
        LAYOUT.num_words,
    ]
    sizes = [12, 12, 7 * LAYOUT.record_words, 7 * 10, 7 * 37]
    assert all(start + size <= end for start, size, end in zip(edges, sizes, edges[1:], strict=False))
    assert LAYOUT.record_words >= LAYOUT.stops_at + LAYOUT.max_stops
    assert all(edge % 4 == 0 for edge in edges)


@pytest.mark.parametrize("count", [0, 1, 1023, 2500])
def test_write_words(device: torch.device, count: int) -> None:
    rng = np.random.default_rng(count)
    state = torch.from_numpy(rng.integers(0, 9, 4000).astype(np.int32)).to(device)
    places, words = rng.permutation(4000)[:2600].astype(np.int32), rng.integers(-99, 0, 2600).astype(np.int32)
    expected = state.cpu().numpy().copy()
    expected[places[:count]] = words[:count]
    pinned = [torch.from_numpy(array) for array in (places, words)]
    if device.type == "cuda":
        pinned = [tensor.pin_memory() for tensor in pinned]
    write_words(state, *pinned, count)
    assert np.array_equal(state.cpu().numpy(), expected)


def test_prepare_decode(device: torch.device, state: torch.Tensor) -> None:
    batch = [4, 1, 5, 6, 2, -1]
    state[LAYOUT.batch_at : LAYOUT.batch_at + 6] = torch.tensor(batch, dtype=torch.int32)
    on_device = state.clone().to(device)
    inputs = DecodeInputs.allocate(LAYOUT, on_device, 7)
    for tensor in (inputs.input_ids, inputs.positions, inputs.seq_lens, *inputs.slots, *inputs.block_tables):
        tensor.fill_(-7)
    prepare_decode(on_device, LAYOUT, inputs, 6)
    sampling = inputs.sampling
    gathered = sampling.parameters.cpu().numpy().view(ROW_PARAMETERS.dtype)[:, 0]
    for i, row in enumerate(batch):
        if row in (-1, 5):  # padding, or a stopped row
            assert (inputs.input_ids[i], inputs.positions[i], inputs.seq_lens[i]) == (0, 0, 0)
            assert gathered[i] == np.zeros((), ROW_PARAMETERS.dtype), "greedy"
            assert sampling.masked_start[i] == sampling.masked_end[i]
            assert all(slots[i] == 0 for slots in inputs.slots)
            assert all((blocks[i] == -7).all() for blocks in inputs.block_tables)
            continue
        words = record(state, row)
        here = int(words[NUM_COMPUTED.value])
        assert (inputs.input_ids[i], inputs.positions[i]) == (words[LAST_TOKEN.value], here)
        assert inputs.seq_lens[i] == sampling.position[i] == here + 1
        parameters = words[PARAMETERS.value : LAYOUT.stops_at].view(ROW_PARAMETERS.dtype)[0]
        assert gathered[i] == parameters
        assert gathered["seed"][i] == -5 - row * (1 << 40)
        masked = sampling.masked_token_ids[sampling.masked_start[i] : sampling.masked_end[i]].tolist()
        is_early = here + 1 - words[NUM_PROMPT.value] < parameters["min_tokens"]
        stops = words[LAYOUT.stops_at : LAYOUT.stops_at + words[NUM_STOPS.value]].tolist()
        assert masked == (stops if is_early else [])
        for group, size in enumerate(LAYOUT.block_sizes):
            blocks, num_blocks = table(state, group, row), -(-(here + 1) // size)
            block = 0 if row == 6 else blocks[here // size]
            assert inputs.slots[group][i] == block * size + here % size
            assert inputs.block_tables[group][i, :num_blocks].tolist() == blocks[:num_blocks].tolist()
            assert (inputs.block_tables[group][i, num_blocks:] == -7).all()
    assert inputs.input_ids[6] == -7, "nothing is written after the step's rows"
    assert torch.equal(on_device.cpu(), state)


def test_fill_last_tokens(device: torch.device, state: torch.Tensor) -> None:
    ids = torch.tensor([0, 0, 17], device=device)
    rows = torch.tensor([4, 1, 1], dtype=torch.int32, device=device)
    fill_last_tokens(state.to(device), LAYOUT, ids, rows, 2)
    assert ids.tolist() == [*(int(record(state, row)[LAST_TOKEN.value]) for row in (4, 1)), 17]


def ring_of(device: torch.device) -> torch.Tensor:
    return torch.zeros(4, RING_HEAD + 7, dtype=torch.int32, pin_memory=device.type == "cuda")


def test_finish_rows_of_single_tokens(device: torch.device, state: torch.Tensor) -> None:
    record(state, 1)[NUM_STOPS.value] = 3
    stop = int(record(state, 1)[LAYOUT.stops_at + 2])
    rows = torch.tensor([4, 1, 5, 2, -1], dtype=torch.int32, device=device)
    token_ids = torch.tensor([88, stop, 3, 91, 50], device=device)
    ok = torch.tensor([True, True, False, False, True], device=device)
    ring, on_device = ring_of(device), state.clone().to(device)
    on_device[STEP_COUNT.value] = 5
    finish_rows(on_device, LAYOUT, rows, token_ids, ok, ring, 5)
    found = on_device.cpu()
    stopped_at = int(record(state, 5)[LAST_TOKEN.value])
    assert ring[1, RING_HEAD : RING_HEAD + 4].tolist() == [88, stop, stopped_at, 91 | BAD_LOGITS]
    assert [int(slot[0]) for slot in ring] == [0, 6, 0, 0]
    assert (found[STEP_COUNT.value], found[ARRIVALS.value]) == (6, 0)
    for row, token in ((4, 88), (1, stop), (2, 91)):
        before, after = record(state, row), record(found, row)
        assert after[NUM_COMPUTED.value] == before[NUM_COMPUTED.value] + 1
        assert (after[LAST_TOKEN.value], after[STOPPED.value]) == (token, token == stop)
    assert np.array_equal(record(found, 5), record(state, 5)), "it had stopped"


def test_finish_rows_that_are_ragged(device: torch.device, state: torch.Tensor) -> None:
    counts, samples = [300, 1, 7, 2], [-1, 1, 0, -1]
    finite = torch.ones(310, dtype=torch.bool)
    finite[299] = finite[308] = False  # of the first row and of the last
    ragged = RaggedRows(
        starts=torch.tensor([0, 300, 301, 308], dtype=torch.int32, device=device),
        counts=torch.tensor(counts, dtype=torch.int32, device=device),
        samples=torch.tensor(samples, dtype=torch.int32, device=device),
        finite=finite.to(device),
    )
    rows = torch.tensor([4, 1, 2, 6], dtype=torch.int32, device=device)
    token_ids, ok = torch.tensor([77, 78], device=device), torch.tensor([True, False], device=device)
    ring, on_device = ring_of(device), state.clone().to(device)
    finish_rows(on_device, LAYOUT, rows, token_ids, ok, ring, 4, ragged)
    found = on_device.cpu()
    words = ring[0, RING_HEAD : RING_HEAD + 4].tolist()
    assert words == [BAD_HIDDEN, 78 | BAD_LOGITS, 77, BAD_HIDDEN]
    for row, count, sample in zip((4, 1, 2, 6), counts, samples, strict=True):
        before, after = record(state, row), record(found, row)
        assert after[NUM_COMPUTED.value] == before[NUM_COMPUTED.value] + count
        assert after[LAST_TOKEN.value] == (before[LAST_TOKEN.value] if sample < 0 else 77 + sample)


# Of a step with drafts: rows 4 with three, 1 with none, 5 (stopped) with one, 2 with two, then padding.
DRAFTED = {4: [31, 32, 33], 1: [], 5: [8], 2: [40, 41]}
PLACES = [(row, offset) for row, drafts in DRAFTED.items() for offset in range(1 + len(drafts))]


def with_drafts(state: torch.Tensor) -> torch.Tensor:
    for place, (row, offset) in enumerate(PLACES):
        state[LAYOUT.batch_at + place] = row | offset << 16
        if offset:
            state[LAYOUT.drafts_at + place] = DRAFTED[row][offset - 1]
    return state


def test_a_draft_is_a_sequence_one_token_longer(device: torch.device, state: torch.Tensor) -> None:
    on_device = with_drafts(state.clone()).to(device)
    inputs = DecodeInputs.allocate(LAYOUT, on_device, 12)
    prepare_decode(on_device, LAYOUT, inputs, len(PLACES) + 1)
    assert inputs.seq_lens[len(PLACES)] == 0
    for place, (row, offset) in enumerate(PLACES):
        words = record(state, row)
        here = int(words[NUM_COMPUTED.value]) + offset
        if row == 5:
            assert (inputs.seq_lens[place], inputs.slots[0][place]) == (0, 0), "it had stopped"
            continue
        token = DRAFTED[row][offset - 1] if offset else words[LAST_TOKEN.value]
        assert (inputs.input_ids[place], inputs.positions[place]) == (token, here)
        assert inputs.seq_lens[place] == inputs.sampling.position[place] == here + 1
        for group, size in enumerate(LAYOUT.block_sizes):
            blocks = table(state, group, row)
            assert inputs.slots[group][place] == blocks[here // size] * size + here % size
            num_blocks = -(-(here + 1) // size)
            assert inputs.block_tables[group][place, :num_blocks].tolist() == blocks[:num_blocks].tolist()


@pytest.mark.parametrize("seed", range(12))
def test_finish_drafts(device: torch.device, state: torch.Tensor, seed: int) -> None:
    """Against a loop over each row's tokens; row 4 may sample its stop token amid its drafts."""
    rng = np.random.default_rng(seed)
    record(state, 4)[NUM_STOPS.value] = 2
    record(state, 4)[LAYOUT.stops_at + 1] = 32
    drafts = [DRAFTED[row][offset] if offset < len(DRAFTED[row]) else 77 for row, offset in PLACES]
    sampled = np.where(rng.random(len(PLACES)) < 0.7, drafts, 60)
    ok = rng.random(len(PLACES)) < 0.85
    sampled[~ok & (rng.random(len(PLACES)) < 0.5)] = MASKED
    due, words, ended = np.zeros(len(PLACES), dtype=np.int32), {}, {}
    for row in DRAFTED:
        first, going, gained = PLACES.index((row, 0)), row != 5, []
        for place in range(first, first + 1 + len(DRAFTED[row])):
            token, good = int(sampled[place]), bool(ok[place])
            lost = NOT_GAINED if good or token == MASKED or row == 5 else NOT_GAINED_BAD
            words[place] = (token | (0 if good else BAD_LOGITS)) if going else lost
            due[place] = going
            gained += [token] * going
            going = going and good and token == drafts[place]
        ended[row] = gained
    words[PLACES.index((5, 0))] = int(record(state, 5)[LAST_TOKEN.value])
    on_device = with_drafts(state.clone()).to(device)
    ring = torch.zeros(4, RING_HEAD + 12, dtype=torch.int32, pin_memory=device.type == "cuda")
    found_gained = torch.full((len(PLACES),), -7, dtype=torch.int32, device=device)
    arrays = torch.from_numpy(sampled).to(device), torch.from_numpy(ok).to(device), found_gained
    finish_drafts(on_device, LAYOUT, *arrays, ring, len(PLACES), 3, MASKED)
    found = on_device.cpu()
    assert int(ring[0, 0]) == 1
    assert ring[0, RING_HEAD : RING_HEAD + len(PLACES)].tolist() == [words[place] for place in range(len(PLACES))]
    assert found_gained.tolist() == due.tolist()
    for row, gained in ended.items():
        before, after = record(state, row), record(found, row)
        if row == 5:
            assert np.array_equal(before, after), "it had stopped"
            continue
        stops = before[LAYOUT.stops_at : LAYOUT.stops_at + before[NUM_STOPS.value]].tolist()
        assert after[NUM_COMPUTED.value] == before[NUM_COMPUTED.value] + len(gained)
        assert after[LAST_TOKEN.value] == gained[-1]
        assert bool(after[STOPPED.value]) == any(token in stops for token in gained)


def test_the_number_of_a_step_wraps_around(device: torch.device, state: torch.Tensor) -> None:
    rows, token_ids = torch.tensor([4], dtype=torch.int32, device=device), torch.tensor([1], device=device)
    ring, on_device = ring_of(device), state.clone().to(device)
    on_device[STEP_COUNT.value] = torch.iinfo(torch.int32).max
    finish_rows(on_device, LAYOUT, rows, token_ids, token_ids.bool(), ring, 1)
    finish_rows(on_device, LAYOUT, rows, token_ids, token_ids.bool(), ring, 1)
    least = torch.iinfo(torch.int32).min
    assert on_device.cpu()[STEP_COUNT.value] == least + 1
    assert ring[:, 0].tolist() == [least + 1, 0, 0, least]
