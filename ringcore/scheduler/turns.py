"""Turns of the running requests in a pipeline: as many batches as stages, each in every so many steps.

With two stages, four requests that decode, and the steps in flight of which each column is a time:

    stage 0   ab  cd  ab  cd        a token that step 0 samples in stage 1 is the input of step 2 in stage 0:
    stage 1       ab  cd  ab        both stages always have work
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringcore.scheduler.running_table import RunningTable

__all__ = ["Turns"]


@dataclass(frozen=True, slots=True)
class Turns:
    """num_stages: of the pipeline. most: the tokens of a request that steps in flight may be about to sample."""

    num_stages: int
    most: int

    def left_out(self, running: RunningTable, counts: np.ndarray) -> np.ndarray:
        """The positions of requests that decode, and not in the next step. Of those that may, its equal share of all
        that decode is in the step: the ones whose last turn is the longest ago. Chunks of prompts wait for no token, so
        they are in every step. counts: [num], the tokens that each request has to compute."""
        decodes = np.flatnonzero((running.total - running.computed == 1) & (counts > 0))
        share = -(-len(decodes) // self.num_stages)
        in_flight = running.total[decodes] - running.known[decodes]
        # Those with all their turns taken come last, and are none of the share.
        order = np.lexsort((decodes, running.last_step[decodes], in_flight >= self.most))
        num_free = int((in_flight < self.most).sum())
        return decodes[order[min(share, num_free) :]]
