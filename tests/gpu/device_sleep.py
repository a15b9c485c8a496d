"""What the tests of sleep on a GPU share: a batch that is begun, a trainer, and what is in use on the card."""

from __future__ import annotations

import shutil
import threading
import time
from collections import defaultdict
from pathlib import Path

import torch
from engine import tokens
from new_weights import OtherWeights
from safetensors.torch import save_file
from sleeping import PROMPTS, greedy

from ringcore import LLM, EngineCore
from ringcore.protocol.requests import EngineCoreOutput, EngineCoreRequest
from ringcore.weights import WeightGroup


class Batch:
    """The reference's prompts in an engine in this process, begun at once."""

    def __init__(self, core: EngineCore, num_tokens: int) -> None:
        self._core, stamp = core, time.monotonic_ns()
        self._outputs: dict[str, list[EngineCoreOutput]] = defaultdict(list)
        self._ids = [f"{stamp}-{i}" for i in range(len(PROMPTS))]
        for request_id, prompt in zip(self._ids, PROMPTS, strict=True):
            core.add_request(EngineCoreRequest(request_id, prompt, greedy(num_tokens), time.monotonic()))

    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._take()

    def finish(self) -> list[list[int]]:
        """The tokens of each prompt."""
        while self._core.has_unfinished:
            self._take()
        return tokens([self._outputs[request_id] for request_id in self._ids])

    def _take(self) -> None:
        for output in self._core.step().outputs:
            self._outputs[output.request_id].append(output)


def save_model(other: OtherWeights, model: str, folder: Path) -> str:
    """A folder with a model's configuration and these weights."""
    folder.mkdir()
    for file in Path(model).iterdir():
        if file.name != "model.safetensors":
            shutil.copy(file, folder)
    save_file(other.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def update(llm: LLM | EngineCore, other: OtherWeights, device: str) -> None:
    """In chunks, from tensors of this process on a device."""
    llm.start_weight_update()
    for chunk in other.chunks(3):
        on_device = {name: tensor.to(device) for name, tensor in chunk.items()}
        report = llm.update_weights(on_device)
        assert [rank["num_tensors"] for rank in report.ranks] == [len(chunk)] * len(report.ranks)
    llm.finish_weight_update()


def broadcast(llm: LLM, other: OtherWeights, backend: str, device: str) -> None:
    """By a trainer, a thread of this process, from tensors on a device."""
    with WeightGroup("127.0.0.1", 0, world_size=2, backend=backend, timeout_s=60) as group:

        def train() -> None:
            for chunk in other.chunks(2):
                group.broadcast({name: tensor.to(device) for name, tensor in chunk.items()})

        trainer = threading.Thread(target=train, daemon=True)
        trainer.start()
        llm.collective_rpc("join_weight_group", ("127.0.0.1", group.port, 2, 1, backend, 60.0), timeout=90)
        llm.start_weight_update()
        for chunk in other.chunks(2):
            llm.update_weights({"kind": "group", "tensors": group.describe(chunk)}, timeout=90)
        llm.finish_weight_update()
        trainer.join(60)
        assert not trainer.is_alive()
        llm.collective_rpc("leave_weight_group", timeout=60)


def used_bytes() -> int:
    """Of the first card, by whomever."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(0)
    return total - free
