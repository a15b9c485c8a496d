"""Triton set up to compile for a GPU that need not be there. To be imported before any kernel is launched."""

from __future__ import annotations

from ringcore.kernels.launch.target_only import compile_for

compile_for("cuda", 90, 32)
