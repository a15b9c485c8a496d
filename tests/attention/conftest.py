"""Kernels run compiled where there is a GPU, and in Triton's interpreter, on the CPU, where there is none."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: it is read then
