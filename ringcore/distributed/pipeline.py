"""Point-to-point messages between the stages of a pipeline.

    stage 0 ──rows──▶ stage 1 ──rows──▶ ... ──rows──▶ stage n - 1
       ▲                                                  │
       └─────────────────────tokens───────────────────────┘

Each rank exchanges messages with the ranks of its own number in the other stages. Messages of a kind arrive in the
order of sending. A send does not wait for its receiver: a stage has sent a step's rows long before the next one wants
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroupGloo

from ringcore.distributed.parallel import Stage
from ringcore.distributed.rendezvous import Rendezvous

__all__ = ["Arrival", "GlooLink", "GroupLink", "NcclLink", "StageLink"]

_ROWS, _TOKENS = 0, 1  # tags: gloo matches messages by them


class Arrival(Protocol):
    """A message to be received."""

    def wait(self) -> object:
        """Until it has arrived: on a CPU the caller waits, on a GPU what is launched afterwards."""
        ...


class StageLink(ABC):
    """One rank of a stage, as its neighbours see it."""

    stage: Stage

    @abstractmethod
    def send_rows(self, rows: torch.Tensor) -> None:
        """To the next stage. The caller must not write to `rows` afterwards."""

    @abstractmethod
    def receive_rows(self, out: torch.Tensor) -> None:
        """From the previous stage, into `out`, contiguous; waits as `Arrival`."""

    @abstractmethod
    def send_tokens(self, token_ids: torch.Tensor) -> None:
        """From the last stage to the first. The caller must not write to `token_ids` afterwards."""

    @abstractmethod
    def receive_tokens(self, out: torch.Tensor) -> Arrival:
        """In the first stage: into `out`, contiguous."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


class GroupLink(StageLink):
    """Over torch's process groups, in which a rank's number is that of its stage. Rows and tokens have groups that do
    not wait for each other."""

    def __init__(self, stage: Stage, rows: Any, tokens: Any) -> None:
        self.stage = stage
        self._rows, self._tokens = rows, tokens
        # A step is sent after the engine has had the results of those that are as many before as may be in flight.
        self._max_unfinished = stage.size + 1
        self._unfinished: deque[tuple[Any, torch.Tensor]] = deque()  # sends, each with the tensor that it reads

    def send_rows(self, rows: torch.Tensor) -> None:
        self._send(self._rows, rows, self.stage.index + 1, _ROWS)

    def receive_rows(self, out: torch.Tensor) -> None:
        self._rows.recv([out], self.stage.index - 1, _ROWS).wait()

    def send_tokens(self, token_ids: torch.Tensor) -> None:
        self._send(self._tokens, token_ids, 0, _TOKENS)

    def receive_tokens(self, out: torch.Tensor) -> Arrival:
        arrival: Arrival = self._tokens.recv([out], self.stage.size - 1, _TOKENS)
        return arrival

    def _send(self, group: Any, tensor: torch.Tensor, to: int, tag: int) -> None:
        sent = tensor.contiguous()
        self._unfinished.append((group.send([sent], to, tag), sent))
        while len(self._unfinished) > self._max_unfinished:
            self._unfinished.popleft()[0].wait()

    def close(self) -> None:
        rows, tokens, self._rows, self._tokens = self._rows, self._tokens, None, None
        self._unfinished.clear()
        for group in dict.fromkeys((rows, tokens)):
            if group is not None:
                group.shutdown()


class GlooLink(GroupLink):
    """Over the loopback interface, or between hosts."""

    def __init__(self, stage: Stage, rendezvous: Rendezvous, name: str) -> None:
        """Returns when all stages are connected, or raises RuntimeError. name: of the group, among those of the
        rendezvous."""
        group = ProcessGroupGloo(rendezvous.store(name), stage.index, stage.size, rendezvous.gloo_options())
        super().__init__(stage, group, group)


class NcclLink(GroupLink):
    """Between GPUs, on streams of NCCL's: what is launched before a send, on the current stream, is done before it, and
    a receive before what is launched after its `wait`. Two groups: in one, two stages would have one stream for both
    directions, and what each sends would wait for what the other does."""

    def __init__(self, stage: Stage, rendezvous: Rendezvous, name: str, device: torch.device) -> None:
        """As `GlooLink`."""
        from torch.distributed import ProcessGroupNCCL  # a CPU build has none

        def group(kind: str) -> Any:
            options = ProcessGroupNCCL.Options()
            options._timeout = rendezvous.timeout
            return ProcessGroupNCCL(rendezvous.store(f"{name} {kind}"), stage.index, stage.size, options)

        super().__init__(stage, group("rows"), group("tokens"))
        self._connect(device)

    def _connect(self, device: torch.device) -> None:
        """Sends a message over every connection, since NCCL makes one when it is first used."""
        word = torch.zeros(1, device=device)
        if not self.stage.is_first:
            self.receive_rows(word)
        if not self.stage.is_last:
            self.send_rows(word)
        if self.stage.is_first:
            self.receive_tokens(word).wait()
        if self.stage.is_last:
            self.send_tokens(word)
        torch.cuda.synchronize(device)
