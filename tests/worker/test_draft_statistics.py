"""Sampled tokens have the model's probabilities, whatever the drafts are."""

from __future__ import annotations

import numpy as np
import torch
from step_driver import admit, cache_of

from ringcore.kv_cache.spec import FullAttentionSpec
from ringcore.model_executor.sampler import sample
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.row_spans import RowSpans
from ringcore.worker.logits.draft_turns import DraftTurns
from ringcore.worker.rows.request_rows import RequestRows

NUM_ROWS, VOCAB_SIZE, LENGTH = 6000, 4, 3


def test_texts_of_three_tokens_with_drafts_of_any_kind() -> None:
    """A model whose next token depends on the last one. Some drafts are likely tokens, some are not, some rows have
    none; 64 texts, chi-squared with 63 degrees of freedom: above 128 once in a million times."""
    rng = np.random.default_rng(11)
    table = torch.from_numpy(rng.normal(0, 0.6, (VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32))
    rows = make_rows()
    num_accepted = num_drafts = 0
    while len(left := np.flatnonzero(rows.num_tokens < 1 + LENGTH).astype(np.int32)):
        room = LENGTH - rows.num_tokens[left]
        drafts = np.minimum(rng.integers(0, 3, len(left)), room)
        places = rows.num_tokens[left]
        for offset in range(2):  # half of them what the model most likely writes
            before = rows.token_ids[left, places + offset - 1]
            likely = table.argmax(dim=1).numpy()[before]
            random = rng.integers(0, VOCAB_SIZE, len(left))
            rows.token_ids[left, places + offset] = np.where(rng.random(len(left)) < 0.5, likely, random)
        spans = RowSpans(1, 1 + drafts)
        read = rows.token_ids[spans.repeat(left), spans.repeat(places - 1) + spans.offsets(len(left))]
        logits, turns = table[torch.from_numpy(read).long()], DraftTurns(rows, left, drafts)
        while len(turns.rows):
            drawn = sample(turns.logits_of(logits), rows.sampling_inputs(turns.rows)).token_ids.numpy().astype(np.int32)
            turns.append(drawn)
            turns.end(drawn, None)
        gained = turns.sampled().num_gained
        assert gained is not None
        num_accepted, num_drafts = num_accepted + int((gained - 1).sum()), num_drafts + int(drafts.sum())
    assert 0.2 < num_accepted / num_drafts < 0.8
    texts = rows.token_ids[:, 1 : 1 + LENGTH]
    counts = np.bincount(texts @ (VOCAB_SIZE ** np.arange(LENGTH)), minlength=VOCAB_SIZE**LENGTH)
    p = table.softmax(-1).double().numpy()
    joint = np.einsum("a,ab,bc->cba", p[0], p, p).reshape(-1)  # the first token of a text counts least
    expected = NUM_ROWS * joint
    assert expected.min() > 5, "enough of each"
    assert ((counts - expected) ** 2 / expected).sum() < 128


def make_rows() -> RequestRows:
    """Each has a prompt of one token, 0, and a seed of its own."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype="float32")
    rows = RequestRows(NUM_ROWS, cache_of(spec, max_model_len=16), 1)
    for row in range(NUM_ROWS):
        rows.admit(admit(row, [0], [1], params=SamplingParams(max_tokens=None, seed=row)))
    return rows
