"""What the benchmark of speculative decoding has requests write, and the drafts of a known text."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.peers.known_text import KNOWN_TOKEN, KnownText
from benchmarks.speculation_texts import forced_load, free_load


@pytest.mark.parametrize("chance", [0.0, 0.7, 1.0])
def test_known_drafts_are_right_with_their_chance(chance):
    load = forced_load(50, 96, 5000, chance)
    assert load.params.logit_bias == {KNOWN_TOKEN: 100.0}
    prompts = np.array(load.prompts)
    rows = SimpleNamespace(token_ids=prompts, num_tokens=np.full(50, prompts.shape[1]))
    proposer = KnownText(None, rows)
    drafts = proposer.propose(np.arange(50), np.full(50, 20), 50)
    assert drafts.counts.tolist() == [20] * 50
    assert (drafts.token_ids == KNOWN_TOKEN).mean() == pytest.approx(chance, abs=0.05)
    proposer.margin = np.inf
    assert not proposer.propose(np.arange(50), np.full(50, 20), 50).counts.any()


def test_free_text_is_sampled_and_has_a_prompt_for_each_request():
    load = free_load(3, 10, 5000)
    assert (load.case, len(load.prompts), load.params.temperature) == ("free text, 3 requests", 3, 1)
    assert len({tuple(prompt) for prompt in load.prompts}) == 3
