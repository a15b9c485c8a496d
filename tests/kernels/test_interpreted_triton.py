"""The interpreter that the tests of kernels run in gives, to the bit, what Triton's own gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import interpreted_triton
import pytest
import torch
from interpreted_kernels import digests, results

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


def test_results_are_those_of_tritons_own() -> None:
    from triton.runtime import interpreter

    assert interpreter._patch_attr is interpreted_triton._patch_attr
    here = results()
    assert all(tensor.count_nonzero() > tensor.numel() // 2 for tensor in here)
    own = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted_kernels.py"))],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        check=True,
    )
    assert digests(here) == json.loads(own.stdout)
