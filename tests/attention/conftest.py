"""Kernels run compiled where there is a GPU, and in Triton's interpreter, on the CPU, where there is none."""

from __future__ import annotations

import interpreted_triton  # noqa: F401, before the kernels
