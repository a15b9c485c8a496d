"""Messages through the real ring, to processes that check each of them: none lost, changed or out of order."""

from __future__ import annotations

import json
import os
import random
import time

import pytest
from process_table import Census, status_kb
from ring_traffic import CAPACITY, END, SIZES_AROUND_HALF, SIZES_BESIDE, SIZES_IN_RING, WAIT_S, Traffic, check_message

from ringcore.executor.child_process import ChildProcess, terminate_all
from ringcore.executor.near_queue import NearReader, NearWriter, create_queue
from ringcore.executor.waiting import spin_budget_s

SHORT, LONG = 60_000, 1_000_000  # messages, over all tests in the short form, each in the long one
GROWTH_KB = 8 << 10


class Stress:
    """A writer here, and readers in processes of their own."""

    def __init__(self, num_readers: int, seed: int, census_at: list[int], pause_share: float) -> None:
        self.queue = create_queue(CAPACITY, num_readers)
        self.reports = [create_queue(CAPACITY, 1) for _ in range(num_readers)]
        self.leave_read, self.leave_write = os.pipe2(os.O_CLOEXEC)
        spin_s = spin_budget_s(1 + num_readers)
        self.children = [
            ChildProcess.start(
                f"reader {i}",
                "ring_traffic:read_all",
                json.dumps(
                    {"index": i, "seed": seed + i, "census_at": census_at, "pause_share": pause_share, "spin_s": spin_s}
                ).encode(),
                {
                    **{f"in.{name}": fd for name, fd in self.queue.fds_of_reader(i).items()},
                    **{f"out.{name}": fd for name, fd in self.reports[i].fds_of_writer().items()},
                    "leave": self.leave_read,
                },
            )
            for i in range(num_readers)
        ]
        deaths = [child.pidfd for child in self.children]
        self.writer = NearWriter(self.queue, deaths, spin_s)
        self.report_readers = [NearReader(report, 0, deaths) for report in self.reports]

    def read_report(self, index: int) -> dict:
        with self.report_readers[index].receive(time.monotonic() + WAIT_S) as parts:
            return json.loads(bytes(parts[0]))

    def close(self) -> None:
        os.close(self.leave_write)
        terminate_all(self.children, WAIT_S)
        self.writer.close()
        for reader, report in zip(self.report_readers, self.reports, strict=True):
            reader.close()
            report.close()
        self.queue.close()
        os.close(self.leave_read)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_readers", [1, 2, 4, 8])
def test_every_message_arrives_once_unchanged_and_in_order(num_readers, is_long, seed):
    share = {1: 0.5, 2: 0.3, 4: 0.15, 8: 0.05}[num_readers]
    count = LONG if is_long else int(SHORT * share)
    census_at = [count // 5, count]
    before = Census()
    stress = Stress(num_readers, seed, census_at, pause_share=0.002)
    try:
        held = send_all(stress, count, seed, census_at)
        for index in range(num_readers):
            report = stress.read_report(index)
            assert report["count"] == count
            check_flat(f"reader {index}", *report["held"])
        check_flat("the writer", *held)
    finally:
        stress.close()
    assert Census().grown_since(before) == []


def send_all(stress: Stress, count: int, seed: int, census_at: list[int]) -> list[list[int]]:
    traffic, rng = Traffic(seed), random.Random(seed)
    held = []
    for sequence in range(1, count + 1):
        stress.writer.send(traffic.next(), time.monotonic() + WAIT_S)
        if sequence in census_at:
            held.append([len(os.listdir("/proc/self/fd")), status_kb("RssAnon")])
        if rng.random() < 0.001:
            time.sleep(rng.random() * 0.003)  # the readers go to sleep
    stress.writer.send([END], time.monotonic() + WAIT_S)
    return held


def check_flat(who: str, first: list[int], last: list[int]) -> None:
    # A large message that waits for a slow reader has a descriptor in the socket, not in a table.
    assert last[0] <= first[0] + 2, f"{who} holds {last[0]} descriptors, {first[0]} at first"
    assert last[1] < first[1] + GROWTH_KB, f"{who} holds {last[1]} kB, {first[1]} at first"


def test_the_traffic_has_every_size():
    traffic, seen = Traffic(1), set()
    for sequence in range(30_000):
        message = traffic.next()
        check_message(message, sequence)
        seen.update(map(len, message[1:]))
    assert seen == {*SIZES_IN_RING, *SIZES_AROUND_HALF, *SIZES_BESIDE}


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: [m[0], *m[2:]],
        lambda m: [m[0][:8] + bytes([m[0][8] ^ 1]) + m[0][9:], *m[1:]],
        lambda m: [bytes([m[0][0] ^ 1]) + m[0][1:], *m[1:]],
        lambda m: [*m[:-1], bytes([m[-1][0] ^ 128]) + m[-1][1:]],
    ],
)
def test_the_check_finds_damage(damage):
    traffic, sequence = Traffic(1), 0
    while len(message := traffic.next()) < 3 or not all(map(len, message[1:])):
        sequence += 1
    check_message(message, sequence)
    with pytest.raises((AssertionError, ValueError)):
        check_message(damage(message), sequence)
