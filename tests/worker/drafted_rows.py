"""Rows that one worker computes with the drafts of a test, as a scheduler would send them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
from adjusted_requests import EOS, VOCAB_SIZE, Asked
from step_driver import admit, make_step

from ringcore.protocol.codec import int_array
from ringcore.protocol.row_spans import RowSpans
from ringcore.worker.runner.host_launcher import HostLauncher
from ringcore.worker.worker import Worker

__all__ = ["MAX_TOKENS", "NUM_DRAFTS", "SPECULATIVE", "guess", "write"]

NUM_DRAFTS = 4
MAX_TOKENS = 32  # of a row
SPECULATIVE = {"method": "scripted_drafts:ScriptedDrafts", "num_drafts": NUM_DRAFTS}


def write(worker: Worker, requests: list[Asked], rng: random.Random, seen: list[Any] | None = None) -> tuple[int, int]:
    """Computes all requests side by side, by a GPU's runner two steps at once; -> tokens that they gained, and drafts
    that were verified."""
    depth = 1 if isinstance(worker._runner.launcher, HostLauncher) else 2  # type: ignore[union-attr]
    num_blocks = MAX_TOKENS // worker.config.cache.block_size
    num_gained = num_drafts = 0
    new = [
        msgspec.structs.replace(
            admit(
                row,
                asked.prompt,
                range(1 + row * num_blocks, 1 + (row + 1) * num_blocks),
                params=asked.params,
                stop_token_ids=[EOS],
                bad_words=asked.bad_words,
            ),
            seed=asked.seed,
        )
        for row, asked in enumerate(requests)
    ]
    step, rows = make_step({row: len(asked.prompt) for row, asked in enumerate(requests)}, new=new), [*range(len(new))]
    ahead: list[tuple[Any, list[int]]] = []
    while rows or ahead:
        if rows:
            most = int_array([rng.randint(1, 1 + NUM_DRAFTS) for _ in rows])
            ahead.append((worker.execute_model(msgspec.structs.replace(step, max_gained=most)), [*rows]))
        over: list[int] = []
        if len(ahead) >= depth or not rows:
            launched, scheduled = ahead.pop(0)
            output = launched.result()
            assert output is not None
            assert output.row_errors == []
            spans = RowSpans(1, output.num_gained)
            for index, row in enumerate(scheduled):
                for token in output.token_ids[spans.slice_of(index)].tolist():
                    if not requests[row].is_done:
                        requests[row].written.append(token)
            num_gained += len(output.token_ids)
            num_drafts += 0 if output.num_drafts is None else int(output.num_drafts.sum())
            if seen is not None:
                seen += output.logprobs or []
            over = [row for row in rows if requests[row].is_done]
            rows = [row for row in rows if row not in over]
        rng.shuffle(rows)
        step = make_step(dict.fromkeys(rows, 1), finished=over)
    worker.reset_rows()
    return num_gained, num_drafts


def guess(texts: list[list[int]], chance: float, rng: random.Random) -> Callable[[list[int], int], list[int]]:
    def script(tokens: list[int], most: int) -> list[int]:
        rest = next((text[len(tokens) :] for text in texts if text[: len(tokens)] == tokens), [])
        rest += [2] * (most - len(rest))
        return [token if rng.random() < chance else (token + 5) % VOCAB_SIZE for token in rest[:most]]

    return script
