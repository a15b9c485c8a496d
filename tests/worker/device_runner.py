"""The GPU's runner on a CPU: its own kernels in Triton's interpreter, the model and its attention in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ringcore.attention.backends import BACKENDS
from ringcore.attention.backends.torch_sdpa import TorchSdpaBackend
from ringcore.attention.metadata import AttentionMetadata
from ringcore.worker import worker as worker_module
from ringcore.worker.platforms.cpu import CpuPlatform

__all__ = ["rows_on_device"]


class PlansOnDevice(TorchSdpaBackend):
    """It may read the numbers when it plans, since on a CPU there is no graph that would keep them."""

    def plan_on_device(
        self, seq_lens: torch.Tensor, block_table: torch.Tensor, *, one_token_each: bool = False
    ) -> object:
        lens = seq_lens.clamp(min=1).numpy()  # of padding it sees a token of the null block
        if one_token_each:
            last_blocks = block_table[torch.arange(len(lens)), torch.from_numpy(lens - 1) // self.spec.block_size]
            last_blocks = last_blocks[seq_lens > 0]
            assert len(last_blocks.unique()) == len(last_blocks), "two rows write to the blocks of one request"
        return self.plan(
            AttentionMetadata(
                num_tokens=len(lens),
                num_seqs=len(lens),
                max_query_len=1,
                max_seq_len=int(lens.max()),
                query_start_loc_cpu=np.arange(len(lens) + 1, dtype=np.int32),
                seq_lens_cpu=lens,
                block_table_cpu=block_table[:, : -(-int(lens.max()) // self.spec.block_size)].numpy(),
                slot_mapping=torch.zeros(len(lens), dtype=torch.int64),
            )
        )


def rows_on_device(
    monkeypatch: pytest.MonkeyPatch, *, plans_on_device: bool, backend: type[TorchSdpaBackend] = PlansOnDevice
) -> None:
    """Workers that are made from now on have the GPU's runner, and with plans on the device this backend."""
    from ringcore.worker.runner.device_launcher import DeviceLauncher

    monkeypatch.setattr(worker_module, "_launcher_class", lambda platform: DeviceLauncher)
    if plans_on_device:
        for name in CpuPlatform.attention_backends[:2]:  # of heads
            monkeypatch.setitem(BACKENDS, name, backend)
