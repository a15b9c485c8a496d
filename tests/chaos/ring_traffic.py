"""Messages that prove their own order and content, and a reader process that checks them."""

from __future__ import annotations

import json
import os
import random
import struct
import time
import zlib

from process_table import num_descriptors, status_kb

from ringcore.executor.child_main import PARENT_DEATH
from ringcore.executor.near_queue import NearReader, NearWriter, QueueHandle
from ringcore.executor.ring_buffer import LINE

CAPACITY = 256 << 10
HALF = CAPACITY // 2 - LINE  # the largest single part that goes into the ring
WAIT_S = 60.0
END = b"end"

SIZES_IN_RING = (0, 1, 15, 16, 17, 63, 64, 65, 1000, 4096)
SIZES_AROUND_HALF = (HALF - 1, HALF, HALF + 1)
SIZES_BESIDE = (CAPACITY, CAPACITY + 1, 3 * CAPACITY)

_HEAD = struct.Struct("<QI")  # sequence number, number of further parts; then the crc32 of each


class Traffic:
    """An endless sequence of messages, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        pool = memoryview(self._rng.randbytes(max(SIZES_BESIDE) + 4096))
        self._parts = {}
        for sizes, copies in ((SIZES_IN_RING, 40), (SIZES_AROUND_HALF, 4), (SIZES_BESIDE, 3)):
            for size in sizes:
                starts = [self._rng.randrange(len(pool) - size) for _ in range(copies)]
                self._parts[size] = [(pool[s : s + size], zlib.crc32(pool[s : s + size])) for s in starts]
        self._sequence = 0

    def next(self) -> list[bytes | memoryview]:
        """A head, and up to four parts; about one in a hundred is large, one in five hundred goes beside the ring."""
        draw = self._rng.random()
        if draw < 0.002:
            sizes = [self._rng.choice(SIZES_BESIDE), self._rng.choice(SIZES_IN_RING)]
        elif draw < 0.01:
            sizes = [self._rng.choice(SIZES_AROUND_HALF)]
        else:
            sizes = [self._rng.choice(SIZES_IN_RING) for _ in range(self._rng.randint(0, 4))]
        chosen = [self._rng.choice(self._parts[size]) for size in sizes]
        head = _HEAD.pack(self._sequence, len(chosen)) + b"".join(struct.pack("<I", crc) for _, crc in chosen)
        self._sequence += 1
        return [head, *(part for part, _ in chosen)]


def check_message(parts, sequence: int) -> None:
    """Raises unless this is message number `sequence`, whole and unchanged."""
    found, num_parts = _HEAD.unpack_from(parts[0])
    assert found == sequence, f"message {found} came where {sequence} is due"
    assert len(parts) == 1 + num_parts, f"message {sequence} has {len(parts) - 1} parts of {num_parts}"
    crcs = struct.unpack_from(f"<{num_parts}I", parts[0], _HEAD.size)
    for i, (part, crc) in enumerate(zip(parts[1:], crcs, strict=True)):
        assert zlib.crc32(part) == crc, f"part {i} of message {sequence} has changed"


def read_all(payload: bytes, fds: dict[str, int]) -> None:
    """A reader process: checks each message, at a random pace, and reports what it held at the first and the last."""
    start = json.loads(payload)
    rng = random.Random(start["seed"])
    own = {name.removeprefix("in."): fd for name, fd in fds.items() if name.startswith("in.")}
    back = {name.removeprefix("out."): fd for name, fd in fds.items() if name.startswith("out.")}
    deaths = [fds[PARENT_DEATH]]
    reader = NearReader(QueueHandle.from_fds(own), start["index"], deaths, start["spin_s"])
    report = NearWriter(QueueHandle.from_fds(back), deaths)
    sequence, held = 0, []
    while True:
        with reader.receive(time.monotonic() + WAIT_S) as parts:
            if len(parts) == 1 and parts[0] == END:
                break
            check_message(parts, sequence)
        sequence += 1
        if sequence in start["census_at"]:
            held.append([num_descriptors(), status_kb("RssAnon")])
        if rng.random() < start["pause_share"]:
            time.sleep(rng.random() * 0.003)
    report.send([json.dumps({"count": sequence, "held": held}).encode()], time.monotonic() + WAIT_S)
    # The parent reads the report and then lets go: leaving earlier would be a death to it.
    os.read(fds["leave"], 1)
