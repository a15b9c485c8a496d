"""Steps with drafts on a GPU.

Drafts follow from a row's last tokens, and a step is launched before the host has those of the step before. So the host
follows rows a step late, and waits for the step before only where a row's drafts are likely to pay; other steps are
launched ahead. When a step is followed depends on the messages alone, never on when its tokens arrived: all ranks draft
alike.

A row with drafts has several places in a decode step, one for each token: sequences of the same block table, each a
token longer than the one before. Their keys and values are written before any of them attends. So attention, CUDA
graphs and the sampling kernels are those of a decode step of so many rows, and all tokens are sampled at once: a token
after a draft counts only if the draft is what was sampled before it, which `finish_drafts` finds on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import RowError
from ringcore.tracing import now_ns
from ringcore.tracing.kinds import REPLAYED
from ringcore.worker.drafts.proposer import Proposer, draft, room_for_drafts
from ringcore.worker.logits.draft_adjustments import DraftPlaces
from ringcore.worker.logits.result_ring import ResultRing
from ringcore.worker.rows.drafts import Drafts
from ringcore.worker.rows.request_rows import UNKNOWN_TOKEN
from ringcore.worker.runner.decode_step import DecodeStep
from ringcore.worker.runner.device_step import DeviceStep, StepReader
from ringcore.worker.runner.draft_costs import fastest
from ringcore.worker.runner.step_launcher import StepStages

__all__ = ["DeviceDrafts", "make_drafts"]

_NUM_AHEAD = 16  # steps that are launched ahead at once to time them


class DeviceDrafts:
    """Decides which decode steps have drafts, and launches them."""

    def __init__(
        self,
        stages: StepStages,
        config: EngineConfig,
        proposer: Proposer,
        decode: DecodeStep,
        reader: StepReader,
    ) -> None:
        self._stages, self._proposer, self._decode, self._reader = stages, proposer, decode, reader
        speculation = config.scheduler.speculation
        assert speculation is not None, "speculative is None"
        self._max_drafts, self._most_positions = speculation.num_drafts, config.scheduler.max_sampled_positions
        self._unfollowed: list[DeviceStep] = []  # in the order of their launches
        proposer.verified_in(decode.verified_places)

    @property
    def _ring(self) -> ResultRing:
        return self._reader.ring

    # ---------------------------------------------------------------------------------------------------------------
    # Following rows.

    def add(self, step: DeviceStep) -> None:
        """A step was launched."""
        self._unfollowed.append(step)
        if step.drafts is None:
            self._proposer.take(step.rows, step.starts, step.ends - step.starts)
        else:
            self._proposer.take_verified(step.rows, step.starts, 1 + step.drafts)

    def follow(self, num_left: int = 1) -> None:
        """Follows all steps but the last num_left; that one too if it has drafts, since how many tokens its rows have
        is not known before."""
        if num_left and self._unfollowed and self._unfollowed[-1].drafts is not None:
            num_left = 0
        end = max(0, len(self._unfollowed) - num_left)
        followed, self._unfollowed = self._unfollowed[:end], self._unfollowed[end:]
        for step in followed:
            step.read()
            self._follow(step)

    def _follow(self, step: DeviceStep) -> None:
        """Stores a step's tokens in the host's rows, unless another request has the row by now, or none."""
        all_rows, places = self._stages.rows, step.sampling
        rows, begins = step.rows[places], step.ends[places]
        token_ids, counts = step.gained()
        is_current = all_rows.num_admissions[rows] == step.admissions[places]
        is_current &= all_rows.num_tokens[rows] > begins
        if not is_current.any():
            return
        if not is_current.all():
            token_ids = token_ids[np.repeat(is_current, counts)]
            rows, begins, counts = rows[is_current], begins[is_current], counts[is_current]
        all_rows.learn_tokens(rows, token_ids, begins, counts)
        self._proposer.follow(rows, begins + counts)

    # ---------------------------------------------------------------------------------------------------------------
    # A step.

    def draft(self, scheduled: np.ndarray, max_gained: np.ndarray | None) -> Drafts | None:
        """Of rows [n], all of which decode; None: none has any, and nothing was waited for unless it seemed to pay.

        Rows whose logits the host adjusts have none: it would have to know each token before the next is sampled.
        """
        if max_gained is None:
            return None
        max_gained = np.where(self._stages.adjustments.is_host_adjusted[scheduled], 1, max_gained)
        room = room_for_drafts(self._most_positions, self._stages.rows, scheduled, None, max_gained)
        if room is None or not self._proposer.may_propose(room.rows, room.most, room.num_tokens):
            return None
        self.follow(num_left=0)
        return draft(self._proposer, self._stages.rows, scheduled, room)

    def launch(self, scheduled: np.ndarray, drafts: Drafts, errors: dict[int, RowError]) -> DeviceStep:
        stages, rows, decode = self._stages, self._stages.rows, self._decode
        starts = rows.num_computed_tokens[scheduled]
        tracer = stages.tracer
        began = tracer.is_on and now_ns()
        places = DraftPlaces(scheduled, drafts)
        is_adjusted = stages.sampling.is_adjusted(scheduled)
        finish = partial(decode.finish_drafts, max_drafts=self._max_drafts, is_adjusted=is_adjusted)
        logits = decode.launch_logits(scheduled, drafts)
        replayed = began and now_ns()
        rows.advance(scheduled, None)
        logprobs = stages.sampling.sample_drafts(logits, places, decode.draw, finish, errors).logprobs
        if began:
            tracer.record((REPLAYED.number, began, replayed, now_ns(), len(scheduled)))
        rows.append_tokens(scheduled, UNKNOWN_TOKEN)
        return DeviceStep(
            reader=self._reader,
            number=self._ring.num_launched,
            rows=scheduled,
            starts=starts,
            ends=starts + 1,
            admissions=rows.num_admissions[scheduled],
            sampling=np.arange(len(scheduled)),
            logprobs=logprobs,
            errors=errors,
            is_adjusted=is_adjusted,
            prompt_logprobs=stages.prompt_logprobs.finished(scheduled, rows),
            drafts=drafts.counts,
        )

    # ---------------------------------------------------------------------------------------------------------------
    # What steps take.

    def time_steps(self, sizes: Sequence[int]) -> tuple[list[float], float]:
        """Steps with drafts of so many places that have no rows, each of which the host waits for; and by how many
        seconds one of one place is slower than a step without drafts that is launched ahead."""
        seconds = [fastest(partial(self._run_padding, size)) for size in sizes]
        ahead_s = fastest(self._run_ahead) / _NUM_AHEAD
        return seconds, max(0.0, seconds[0] - ahead_s)

    def _run_padding(self, num_places: int) -> None:
        self._ring.take(self._decode.launch_padding(num_places, self._max_drafts), 0)

    def _run_ahead(self) -> None:
        for _ in range(_NUM_AHEAD):
            self._decode.launch(int_array())
        self._ring.take(self._ring.num_launched, 0)


def make_drafts(
    stages: StepStages, config: EngineConfig, decode: DecodeStep | None, reader: StepReader
) -> DeviceDrafts | None:
    """None: no row has drafts. Raises `ConfigError` where the model's decode steps do not run on the device alone."""
    if stages.proposer is None:
        return None
    if decode is None:
        names = ", ".join(sorted({backend.name for backend in stages.paged.backends}))
        raise ConfigError(
            f"speculative={config.scheduler.speculative!r}: attention_backend {names} plans its steps on the host, and "
            "drafts are verified in steps that the device plans; give attention_backend='triton', or leave this out",
            option="speculative",
            value=repr(config.scheduler.speculative),
        )
    return DeviceDrafts(stages, config, stages.proposer, decode, reader)
