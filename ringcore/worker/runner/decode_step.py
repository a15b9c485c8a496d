"""Decoding steps that run entirely on the device."""

from __future__ import annotations

import numpy as np
import torch

from ringcore.attention.context import GroupContext
from ringcore.kernels.logits.sampling import sample_tokens
from ringcore.kernels.steps.finish_drafts import finish_drafts
from ringcore.kernels.steps.step import RaggedRows, finish_rows, prepare_decode
from ringcore.kernels.steps.step_state import DecodeInputs
from ringcore.protocol.codec import int_array
from ringcore.worker.drafts.drafts_behind import VerifiedPlaces
from ringcore.worker.logits.result_ring import ResultRing
from ringcore.worker.logits.sampling_stage import ALL_MASKED
from ringcore.worker.rows.device_rows import DeviceRows
from ringcore.worker.rows.drafts import Drafts
from ringcore.worker.runner.graph_capture import padded_metadata
from ringcore.worker.runner.paged_model import PagedModel
from ringcore.worker.runner.stage_port import StagePort

__all__ = ["DecodeStep"]


class DecodeStep:
    """A pure decoding step, in which every row has one uncomputed token: inputs, model, sampling, stop checks. In a
    stage of a pipeline that is not the last: inputs and layers.

    Of the host's state it depends only on the number of rows. A step is launched whole by `launch`, or in three parts:
    `launch_logits`, `draw`, `finish`.
    """

    def __init__(self, paged: PagedModel, rows: DeviceRows, ring: ResultRing, port: StagePort) -> None:
        """paged: each of its backends can `plan_on_device`."""
        self._paged, self._rows, self._ring, self._port = paged, rows, ring, port
        max_rows, device = rows.layout.num_places, rows.state.device
        self._has_drafts = rows.layout.max_drafted > 0
        self._inputs = DecodeInputs.allocate(rows.layout, rows.state, max_rows)
        stage = paged.model.stage
        self._received = None if stage.is_first else paged.model.new_inputs(max_rows, device)  # a static buffer
        self._handed_on = None if stage.is_last else _HandedOn(paged.model.hidden_size, max_rows, device)
        self._logits: torch.Tensor | None = None  # [max_rows, vocab_size], a static buffer; None: each step allocates
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._ok = torch.zeros(max_rows, dtype=torch.bool, device=device)
        self._gained = torch.zeros(max_rows, dtype=torch.int32, device=device)

    @property
    def verified_places(self) -> VerifiedPlaces:
        """Of steps that `finish_drafts` ends."""
        inputs, rows = self._inputs, self._rows
        of_places = inputs.positions, inputs.seq_lens, inputs.slots, inputs.block_tables
        return VerifiedPlaces(rows.batch, self._token_ids, self._gained, *of_places, rows.block_tables)

    def warm_up(self) -> None:
        """Sets up before the first request what would delay it: a dummy run, a step without rows."""
        self.launch(int_array())

    @property
    def missing(self) -> list[int]:
        """Padded sizes whose graph is not captured yet, ascending."""
        return []

    def capture(self, size: int) -> None:
        """Captures the graph of a missing size; called between steps."""
        raise AssertionError(f"size {size} is not missing")

    def launch(self, scheduled: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Launches a step of rows [n] -> logits [n, vocab_size] and token ids [n]; or, in a stage that is not the last,
        the model's output [n, hidden_size] alone; valid until the next launch."""
        self._set_rows(scheduled)
        self._ring.launched()
        return self._run(max(1, len(scheduled)))

    def launch_logits(self, scheduled: np.ndarray, drafts: Drafts | None = None) -> torch.Tensor:
        """Launches a step of rows [n], n > 0, up to its logits [n, vocab_size], which are valid until the next launch;
        `draw` and `finish` must follow.

        With drafts [num_places, vocab_size], after each row's last token and its drafts; `finish_drafts` must follow.
        """
        num_places = len(scheduled) + (0 if drafts is None else len(drafts.token_ids))
        self._prepare_logits(num_places)
        self._set_rows(scheduled, drafts)
        return self._launch_logits(num_places)

    def launch_padding(self, num_places: int, max_drafts: int) -> int:
        """Launches a step with drafts of so many places, but without rows -> its number in the ring."""
        self._prepare_logits(num_places, must_capture=True)
        self._set_rows(int_array())
        self.finish_drafts(*self.draw(self._launch_logits(num_places)), max_drafts, is_adjusted=False)
        return self._ring.num_launched

    def _prepare_logits(self, num_places: int, must_capture: bool = False) -> None:
        """Before the rows of a step up to its logits are set. must_capture: its graph, where there are some, so that
        its time is that of later steps."""

    def _launch_logits(self, num_places: int) -> torch.Tensor:
        return self._run_logits(num_places, one_token_each=not self._has_drafts)

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples from logits [n, vocab_size] of any float dtype, by the parameters of the batch's rows -> token ids
        and ok [n], valid until the next launch."""
        token_ids, ok = self._token_ids[: len(logits)], self._ok[: len(logits)]
        sample_tokens(logits, self._inputs.sampling, token_ids=token_ids, ok=ok)
        return token_ids, ok

    def finish(self, token_ids: torch.Tensor, ok: torch.Tensor) -> None:
        """Ends the step that `launch_logits` began: token ids and ok [n] go to the rows and to the result ring."""
        self._ring.launched()
        self._finish(token_ids, ok)

    def finish_drafts(
        self, token_ids: torch.Tensor, ok: torch.Tensor, max_drafts: int, is_adjusted: bool
    ) -> torch.Tensor:
        """As `finish`, of a step with at most max_drafts drafts a row -> [num_places] int32: 1 where the row gained the
        token, valid until the next launch."""
        gained, masked = self._gained[: len(token_ids)], ALL_MASKED if is_adjusted else -1
        self._ring.launched()
        state, layout, words = self._rows.state, self._rows.layout, self._ring.words
        finish_drafts(state, layout, token_ids, ok, gained, words, len(token_ids), max_drafts, masked)
        return gained

    def _set_rows(self, scheduled: np.ndarray, drafts: Drafts | None = None) -> None:
        """Sets the batch of the next launch, and receives what other stages have computed of it."""
        self._rows.set_batch(scheduled, drafts)
        self._rows.write()
        if self._received is not None and len(scheduled):
            self._port.fill(self._received[: len(scheduled)])

    def _run(self, size: int) -> tuple[torch.Tensor, ...]:
        if self._handed_on is not None:
            return (self._run_layers(size, self._handed_on),)
        logits = self._run_logits(size, one_token_each=True)
        token_ids, ok = self.draw(logits)
        self._finish(token_ids, ok)
        return logits, token_ids

    def _run_layers(self, size: int, handed_on: _HandedOn) -> torch.Tensor:
        """In a stage that is not the last, whose rows go on without tokens."""
        hidden = handed_on.rows[:size].copy_(self._run_model(size, one_token_each=True))
        self._finish(self._token_ids[:size], self._ok[:size], handed_on.ragged(size))
        return hidden

    def _run_logits(self, size: int, *, one_token_each: bool) -> torch.Tensor:
        """one_token_each: no row has drafts."""
        logits = None if self._logits is None else self._logits[:size]
        return self._paged.model.compute_logits(self._run_model(size, one_token_each), logits)

    def _run_model(self, size: int, one_token_each: bool) -> torch.Tensor:
        inputs = self._inputs
        prepare_decode(self._rows.state, self._rows.layout, inputs, size)
        groups = []
        for backend, slots, table in zip(self._paged.backends, inputs.slots, inputs.block_tables, strict=True):
            plan = backend.plan_on_device(inputs.seq_lens[:size], table[:size], one_token_each=one_token_each)
            assert plan is not None, f"{backend.name} cannot plan on the device"
            groups.append(GroupContext(padded_metadata(size, slots[:size]), backend, plan))
        model_inputs = inputs.input_ids if self._received is None else self._received
        return self._paged.forward(model_inputs[:size], inputs.positions[:size], groups)

    def _finish(self, token_ids: torch.Tensor, ok: torch.Tensor, ragged: RaggedRows | None = None) -> None:
        state, layout, batch = self._rows.state, self._rows.layout, self._rows.batch
        finish_rows(state, layout, batch, token_ids, ok, self._ring.words, len(token_ids), ragged)


class _HandedOn:
    """The output of a decoding step for the next stage, and its rows, each of which has a token and samples none."""

    def __init__(self, hidden_size: int, max_rows: int, device: torch.device) -> None:
        self.rows = torch.zeros(max_rows, hidden_size, dtype=torch.float32, device=device)
        self._starts = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._counts = torch.ones(max_rows, dtype=torch.int32, device=device)
        self._samples = torch.full((max_rows,), -1, dtype=torch.int32, device=device)

    def ragged(self, size: int) -> RaggedRows:
        finite = torch.isfinite(self.rows[:size].sum(-1))
        return RaggedRows(self._starts[:size], self._counts[:size], self._samples[:size], finite)
