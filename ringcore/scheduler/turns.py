"""Turns of the running requests in a pipeline: as many batches as stages, each in every so many steps.

With two stages, four requests that decode, and the steps in flight of which each column is a time:

    stage 0   ab  cd  ab  cd        a token that step 0 samples in stage 1 is the input of step 2 in stage 0:
    stage 1       ab  cd  ab        both stages always have work
"""

from __future__ import annotations

import numpy as np

from ringcore.scheduler.running_table import RunningTable

__all__ = ["Turns"]


class Turns:
    """Rounds of as many steps as stages, in each of which every request that decodes has one turn. Batches of a round
    differ by one request at most.

    Invariant: in the round that began with step `_round_began`, those have had their turn that were in a step since.
    """

    def __init__(self, num_stages: int, most: int) -> None:
        """most: the tokens of a request that steps in flight may be about to sample."""
        self._num_stages, self._most = num_stages, most
        self._round_began = 0

    def left_out(self, step: int, running: RunningTable, counts: np.ndarray) -> np.ndarray:
        """The positions of requests that decode, and not in this step. Chunks of prompts wait for no token, so they are
        in every step. step: its number; asked again for the same, this answers the same. counts: [num], the tokens that
        each request has to compute."""
        decodes = np.flatnonzero((running.total - running.computed == 1) & (counts > 0))
        waits = running.last_step[decodes] < self._round_began
        if not waits.any():
            self._round_began = step
            waits = running.last_step[decodes] < step
        steps_left = max(1, self._num_stages - (step - self._round_began))
        share = -(-int(waits.sum()) // steps_left)
        may = waits & (running.total[decodes] - running.known[decodes] < self._most)
        order = np.lexsort((decodes, running.last_step[decodes], ~may))
        return decodes[order[min(share, int(may.sum())) :]]
