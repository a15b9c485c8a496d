"""The profile run on a CPU, whose platform only runs the steps; the sampling kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from step_driver import make_config

from ringcore.kernels.logits.sampling import DeviceSamplingInputs
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.row_parameters import EVERY_PARAMETER, ROW_PARAMETERS
from ringcore.worker.platforms.cpu import CpuPlatform
from ringcore.worker.start_up import profile_run
from ringcore.worker.worker import Worker

SMALL_SIZES = [16, 32, 64, 128, 192, 256, 384, 512]
FEW: Any = SimpleNamespace(parameters=[0, 0, 0])


class Running(CpuPlatform):
    """The peak of a run is the number of rows that it sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.sampled: list[DeviceSamplingInputs] = []

    def peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        return len(self.sampled[-1].parameters)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU kernels are compiled, and take no memory of a CPU")
def test_its_steps_sample_every_row_with_filters(tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    platform, sample_tokens = Running(), profile_run.sample_tokens

    def sample(logits: torch.Tensor, inputs: DeviceSamplingInputs) -> tuple[torch.Tensor, torch.Tensor]:
        platform.sampled.append(inputs)
        return sample_tokens(logits, inputs)

    monkeypatch.setattr(profile_run, "sample_tokens", sample)
    worker = Worker(make_config(tiny_llama[0]), 0, None)  # 6 rows
    worker.init_device()
    worker.load_model()
    assert worker._loaded is not None
    peaks = profile_run.profile_steps(worker.config, worker._loaded.model, worker.get_kv_cache_spec(), platform)
    worker.shutdown()
    assert (peaks.largest_bytes, peaks.decode_bytes, peaks.mixed_bytes) == (6, 6, 0)
    for inputs in platform.sampled:
        records = inputs.parameters.numpy().view(ROW_PARAMETERS.dtype)[:, 0]
        for name in ("temperature", "top_k", "top_p", "min_p"):
            assert records[name].tolist() == [pytest.approx(getattr(EVERY_PARAMETER, name))] * 6
            assert getattr(EVERY_PARAMETER, name) != getattr(SamplingParams(), name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU kernels are compiled, and take no memory of a CPU")
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [*SMALL_SIZES, *range(576, 960, 64), 1024]),
        ({"max_cudagraph_capture_size": 512}, []),
        ({"max_cudagraph_capture_size": 640}, [*SMALL_SIZES, 576, 640]),
        ({"max_cudagraph_capture_size": 640, "enforce_eager": True}, []),
        ({"max_num_batched_tokens": 600}, [*SMALL_SIZES, 576, 600]),
    ],
)
def test_graphs_of_larger_mixed_steps_are_counted(tiny_llama, monkeypatch, options, sizes) -> None:
    """Above 512 tokens: the pass of the largest, its inputs, and the hidden states that each graph keeps."""
    monkeypatch.setattr(profile_run, "can_plan_mixed", lambda backends, device: True)
    platform, seen = Running(), []
    monkeypatch.setattr(profile_run._ProfileRun, "step", lambda run, lens: platform.sampled.append(FEW))
    forward = profile_run._ProfileRun._forward
    monkeypatch.setattr(
        profile_run._ProfileRun, "_forward", lambda run, lens: seen.append(int(lens.sum())) or forward(run, lens)
    )
    worker = Worker(
        make_config(tiny_llama[0], **{"max_num_batched_tokens": 1024, "max_num_seqs": 20, **options}), 0, None
    )
    worker.init_device()
    worker.load_model()
    assert worker._loaded is not None
    model = worker._loaded.model
    peaks = profile_run.profile_steps(worker.config, model, worker.get_kv_cache_spec(), platform)
    worker.shutdown()
    assert seen == 2 * sizes[-1:], "once for the size of its result, once measured"
    kept = sum(sizes) * model.hidden_size * 4 + 8 * (sizes[-1] if sizes else 0)
    assert peaks.mixed_bytes == (kept + len(FEW.parameters) if sizes else 0)
