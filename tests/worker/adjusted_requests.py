"""Requests for adjusted and plain rows, and a scheduler without sense that runs them on one worker."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
from adjusted_model import expected_tokens
from step_driver import admit, make_step

from ringcore.params.sampling_params import SamplingParams
from ringcore.params.structured_outputs import StructuredOutputsParams
from ringcore.worker.worker import Worker

__all__ = ["EOS", "PROCESSORS", "Asked", "Driver", "expected", "some_requests"]

EOS, COUNT = 1, 7
VOCAB_SIZE = 97  # tokens that are used: a model may have more
MAX_TOKENS = 32  # of a row
PROCESSORS = ["processors:Pushed", "processors:NoRepeat"]


@dataclass
class Asked:
    """A request, and how far it has come."""

    prompt: list[int]
    params: SamplingParams
    bad_words: list[list[int]] = field(default_factory=list)
    seed: int = 0
    written: list[int] = field(default_factory=list)
    row: int | None = None
    num_computed: int = 0  # as far as steps were sent
    num_sent: int = 0  # tokens, as far as steps were sent: those that are not known yet among them

    @property
    def is_done(self) -> bool:
        return len(self.written) >= COUNT or EOS in self.written

    @property
    def is_decoding(self) -> bool:
        return self.num_computed == self.num_sent - 1


def guided(text: str, **others: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(regex=text), max_tokens=None, **others)


def some_requests(rng: random.Random) -> list[Asked]:
    def prompt() -> list[int]:
        return [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.choice([1, 3, 6, 11]))]

    some = [rng.randrange(2, VOCAB_SIZE) for _ in range(12)]
    drawn = {"temperature": 1.1}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        drawn,
        {"temperature": 0, "repetition_penalty": 1.8},
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 2.0},
        {**drawn, "repetition_penalty": 0.5, "frequency_penalty": -2.0},
        {"temperature": 0, "logit_bias": {some[0]: 9.0, some[1]: 8.5, some[2]: -100.0}},
        {**drawn, "top_k": 9, "top_p": 0.9, "allowed_token_ids": some, "presence_penalty": 2.0, "min_tokens": 5},
        {"temperature": 0, "extra_args": {"push": some[3]}, "allowed_token_ids": some[:9]},
        {**drawn, "extra_args": {"no_repeat": 4}, "allowed_token_ids": some},
        {"temperature": 0, "extra_args": {"no_repeat": 6, "push": some[4]}, "frequency_penalty": 1.0},
    ]
    found = [Asked(prompt(), SamplingParams(**kind, max_tokens=None), seed=rng.getrandbits(40)) for kind in kinds]
    words = [[some[0]], [some[1], some[2]], [some[3], some[3]], [some[2], some[1], some[4]]]
    worded = SamplingParams(temperature=0, allowed_token_ids=some[:5], max_tokens=None)
    found.append(Asked(prompt(), worded, words))
    found.append(Asked(prompt(), guided(f"{some[0]} 2 {some[0] + 7}", temperature=0)))
    found.append(Asked(prompt(), guided("60 2 90", **drawn), [[61, 62], [63]], seed=5))
    rng.shuffle(found)
    return found


class Driver:
    """A scheduler without sense: random chunks, preemptions and messages of several steps, `depth` of them ahead."""

    def __init__(self, worker: Worker, requests: list[Asked], depth: int, rng: random.Random) -> None:
        self._worker, self._waiting, self._depth, self._rng = worker, list(requests), depth, rng
        scheduler, cache = worker.config.scheduler, worker.config.cache
        self._num_blocks = MAX_TOKENS // cache.block_size  # of a row: it has the same ones whoever is in it
        self._rows: list[Asked | None] = [None] * scheduler.max_num_seqs
        self._left: list[int] = []  # rows given back since the last step
        self._ahead: list[tuple[Any, list[Asked], int]] = []
        self.num_preempted = 0

    def run(self) -> None:
        while self._waiting or any(self._rows):
            self._give_back()
            new = self._admit()
            running = [asked for asked in self._rows if asked is not None]
            self._send(running, new)
            while len(self._ahead) >= self._depth:
                self._take()
        while self._ahead:
            self._take()

    def _give_back(self) -> None:
        if self._rng.random() < 0.25:  # a preemption: what is under way has to be known
            while self._ahead:
                self._take()
            running = [asked for asked in self._rows if asked is not None and not asked.is_done]
            if running:
                self._waiting.insert(0, self._rng.choice(running))
                self._leave(self._waiting[0])
                self.num_preempted += 1
        for asked in self._rows:
            if asked is not None and asked.is_done:
                self._leave(asked)

    def _leave(self, asked: Asked) -> None:
        assert asked.row is not None
        self._left.append(asked.row)
        self._rows[asked.row], asked.row = None, None

    def _admit(self) -> list[Any]:
        new = []
        free = [row for row, asked in enumerate(self._rows) if asked is None]
        self._rng.shuffle(free)
        for row in free[: len(self._waiting)]:
            asked = self._waiting.pop(0)
            self._rows[row], asked.row, asked.num_computed = asked, row, 0
            tokens = [*asked.prompt, *asked.written]
            asked.num_sent = len(tokens)
            request = admit(
                row,
                tokens,
                range(1 + row * self._num_blocks, 1 + (row + 1) * self._num_blocks),
                params=asked.params,
                num_prompt_tokens=len(asked.prompt),
                stop_token_ids=[EOS],
                bad_words=asked.bad_words,
            )
            new.append(msgspec.structs.replace(request, seed=asked.seed))
        return new

    def _send(self, running: list[Asked], new: list[Any]) -> None:
        self._rng.shuffle(running)
        num_steps = self._rng.choice([1, 1, 2, 3]) if all(asked.is_decoding for asked in running) else 1
        room = min((MAX_TOKENS - asked.num_sent for asked in running), default=0)
        num_steps = max(1, min(num_steps, room))
        counts, sampling = {}, []
        for asked in running:
            left = asked.num_sent - asked.num_computed
            counts[asked.row] = self._rng.choice([left, left, self._rng.randint(1, left)])
            asked.num_computed += counts[asked.row]
            if asked.num_computed == asked.num_sent:
                asked.num_sent += num_steps
                asked.num_computed += num_steps - 1
                sampling.append(asked)
        step = make_step(counts, new=new, finished=self._left, num_steps=num_steps)
        self._left = []
        self._ahead.append((self._worker.execute_model(step), sampling, num_steps))

    def _take(self) -> None:
        output, sampling, num_steps = self._ahead.pop(0)
        output = output.result()
        assert output.row_errors == []
        tokens = output.token_ids.reshape(-1, num_steps).tolist()
        for asked, written in zip(sampling, tokens, strict=True):
            for token in written:
                if not asked.is_done:
                    asked.written.append(token)


def expected(model: Any, asked: Asked) -> list[int]:
    structure, words = asked.params.structured_outputs, asked.bad_words
    if structure is None:
        return expected_tokens(model, asked.prompt, asked.params, COUNT, bad_words=words, stops=[EOS], seed=asked.seed)
    first, step, last = map(int, str(structure.regex).split())
    return [*range(first, last + 1, step), EOS][:COUNT]
