"""Drafts of a step's rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["Drafts"]


class Drafts(NamedTuple):
    """Of n rows."""

    counts: np.ndarray  # [n] int64: drafts of each, at least 0
    token_ids: np.ndarray  # [sum of counts] int32: row-major
