"""When attention may read a row's tokens before the kernels before it have ended: in decoding steps without drafts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from adjusted_requests import Asked
from device_runner import PlansOnDevice, rows_on_device
from drafted_rows import MAX_TOKENS, SPECULATIVE, write
from scripted_drafts import ScriptedDrafts
from step_driver import make_config, start

from ringcore.params.sampling_params import SamplingParams
from ringcore.worker.runner import draft_costs
from ringcore.worker.worker import Worker


@pytest.mark.parametrize("drafts", [False, True])
def test_rows_with_drafts_say_that_they_are_several_of_one_request(
    tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    said: list[bool] = []

    class Recording(PlansOnDevice):
        def plan_on_device(
            self, seq_lens: torch.Tensor, block_table: torch.Tensor, *, one_token_each: bool = False
        ) -> object:
            if (seq_lens > 0).any():
                said.append(one_token_each)
            return super().plan_on_device(seq_lens, block_table, one_token_each=one_token_each)

    rows_on_device(monkeypatch, plans_on_device=True, backend=Recording)
    monkeypatch.setattr(draft_costs, "COST_SIZES", (1,))
    monkeypatch.setattr(ScriptedDrafts, "script", staticmethod(lambda known, most: [3] * most if drafts else []))
    config = make_config(tiny_llama[0], speculative=SPECULATIVE, max_num_seqs=2)
    worker = start(Worker(config, 0, None), num_blocks=1 + 2 * MAX_TOKENS // 4)
    try:
        said.clear()
        write(worker, [Asked([5, 9], SamplingParams(temperature=0, max_tokens=None), seed=1)], random.Random(1))
    finally:
        worker.shutdown()
    assert True in said
    assert (False in said) == drafts
