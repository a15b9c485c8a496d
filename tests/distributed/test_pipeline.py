"""Messages between the stages of a pipeline, over gloo; a stage is a thread here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from ringcore.distributed.parallel import Stage
from ringcore.distributed.pipeline import GlooLink
from ringcore.distributed.rendezvous import Rendezvous

TIMEOUT = timedelta(seconds=20)


def on_all_stages(
    num_stages: int, folder: Path, work: Callable[[GlooLink], object], ends_alone: bool = False
) -> list[object]:
    """What `work` returns on each stage; raises what one of them raises. ends_alone: a stage closes its link when it is
    done, whatever the others do."""
    found: list[object] = [None] * num_stages
    connected, closing = threading.Barrier(num_stages), threading.Barrier(num_stages)
    errors: list[BaseException] = []
    place = str(folder / "rendezvous")

    def run(index: int) -> None:
        try:
            link = GlooLink(Stage(index, num_stages), Rendezvous(place, index, num_stages, TIMEOUT), "column")
            connected.wait(20)
            found[index] = work(link)
            if not ends_alone:
                closing.wait(20)
            link.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(num_stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return found


@pytest.mark.parametrize("num_stages", [2, 3])
def test_rows_go_through_all_stages_and_tokens_back_to_the_first(tmp_path, num_stages):
    """Several steps are on their way before the first is back: no send waits for its receiver."""

    def work(link: GlooLink) -> list[int]:
        seen, arrivals, stage = [], [], link.stage
        for step in range(1, num_stages + 2):
            rows = torch.full((step, 4), float(step))
            if not stage.is_first:
                rows = torch.empty(step, 4)
                link.receive_rows(rows)
                seen.append(int(rows.sum()))
            if not stage.is_last:
                link.send_rows(rows + 1)
            else:
                link.send_tokens(torch.arange(step) + step)
            if stage.is_first:
                token_ids = torch.empty(step, dtype=torch.int64)
                arrivals.append((link.receive_tokens(token_ids), token_ids))
        for arrival, token_ids in arrivals:
            arrival.wait()
            seen.append(token_ids.tolist())
        return seen

    first, *others = on_all_stages(num_stages, tmp_path, work)
    steps = range(1, num_stages + 2)
    assert first == [list(range(step, 2 * step)) for step in steps]
    for index, seen in enumerate(others, start=1):
        assert seen == [4 * step * (step + index) for step in steps]


def test_a_send_does_not_wait(tmp_path):
    sent = threading.Event()

    def work(link: GlooLink) -> bool:
        if link.stage.is_first:
            link.send_rows(torch.ones(1 << 20))
            sent.set()
            return True
        was_sent = sent.wait(60)
        link.receive_rows(torch.empty(1 << 20))
        return was_sent

    assert on_all_stages(2, tmp_path, work) == [True, True]


def test_what_is_sent_is_kept_until_it_has_arrived(tmp_path):
    """The sender forgets it at once."""

    def work(link: GlooLink) -> list[float]:
        if link.stage.is_first:
            for step in range(3):
                link.send_rows(torch.full((1 << 18,), float(step)))
                torch.full((1 << 18,), -1.0)  # would take its memory
            return []
        time.sleep(0.05)
        received = [torch.empty(1 << 18) for _ in range(3)]
        for out in received:
            link.receive_rows(out)
        return [float(out.mean()) for out in received]

    assert on_all_stages(2, tmp_path, work) == [[], [0.0, 1.0, 2.0]]


def test_a_stage_that_is_gone_is_an_error(tmp_path):
    def work(link: GlooLink) -> None:
        if link.stage.is_first:
            with pytest.raises(RuntimeError):
                link.receive_tokens(torch.empty(1)).wait()

    on_all_stages(2, tmp_path, work, ends_alone=True)


def test_a_missing_stage_is_an_error(tmp_path):
    with pytest.raises(RuntimeError):
        GlooLink(Stage(0, 2), Rendezvous(str(tmp_path / "rendezvous"), 0, 2, timedelta(milliseconds=300)), "column")
