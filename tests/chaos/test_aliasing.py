"""What was received stays as it was, and what was sent may be changed at once."""

from __future__ import annotations

import os
import random
import zlib

import numpy as np
import pytest
from chaos_engine import WAIT_S, make_config

from ringcore.executor.near_queue import NearReader, NearWriter, create_queue
from ringcore.executor.value_codec import decode_value, encode_value
from ringcore.front_end.client import EngineCoreClient

CAPACITY = 256 << 10
NUM_KEPT = 1000


class Pair:
    def __init__(self) -> None:
        self.handle = create_queue(CAPACITY, 1)
        self.writer, self.reader = NearWriter(self.handle), NearReader(self.handle, 0)

    def pass_value(self, value: object) -> object:
        assert self.writer.try_send(encode_value(value))
        with self.reader.try_receive() as parts:
            return decode_value(parts)

    def close(self) -> None:
        self.writer.close()
        self.reader.close()
        self.handle.close()


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


def some_array(rng: np.random.Generator, i: int) -> np.ndarray:
    """In the message's body, in a buffer of its own, and now and then beside the ring."""
    num_bytes = [16, 1000, 5000, 40_000, CAPACITY][4 if i % 100 == 99 else i % 4]
    return rng.integers(0, 256, num_bytes, dtype=np.uint8)


def test_a_thousand_payloads_stay_while_ten_times_the_capacity_passes(pair):
    rng = np.random.default_rng(5)
    kept = []
    for i in range(NUM_KEPT):
        sent = some_array(rng, i)
        kept.append((pair.pass_value([i, sent, sent.tobytes()]), zlib.crc32(sent)))
    num_bytes = 0
    while num_bytes < 10 * CAPACITY:
        num_bytes += len(pair.pass_value(rng.integers(0, 256, 50_000, dtype=np.uint8)))
    for i, ((number, array, raw), crc) in enumerate(kept):
        assert number == i
        assert zlib.crc32(array) == crc
        assert zlib.crc32(raw) == crc
        array[:] = 0  # it is the receiver's own


@pytest.mark.parametrize("num_bytes", [10, 5000, CAPACITY // 2 - 200, CAPACITY // 2, 3 * CAPACITY])
def test_a_sender_may_change_its_buffer_at_once(pair, num_bytes):
    buffer = bytearray(os.urandom(num_bytes))
    sent = bytes(buffer)
    for _ in range(5):
        assert pair.writer.try_send([b"head", buffer])
        buffer[:] = bytes(num_bytes)
        with pair.reader.try_receive() as parts:
            assert bytes(parts[0]) == b"head"
            assert bytes(parts[1]) == sent
        buffer[:] = sent


def test_a_sender_may_change_its_buffer_while_nobody_has_read(pair):
    buffer = bytearray(1000)
    for i in range(50):
        buffer[:] = bytes([i]) * 1000
        assert pair.writer.try_send([buffer])
    for i in range(50):
        with pair.reader.try_receive() as parts:
            assert bytes(parts[0]) == bytes([i]) * 1000


def test_a_view_kept_beyond_its_lease_fails_loudly(pair):
    assert pair.writer.try_send([b"one", b"two"])
    with pair.reader.try_receive() as parts:
        kept = list(parts)
    for part in kept:
        with pytest.raises(ValueError, match="released"):
            bytes(part)


def test_arguments_and_values_of_calls_stay(model_folder):
    rng = random.Random(9)
    values = [np.frombuffer(rng.randbytes(8 * n), np.int64) for n in (1, 600, 5000, 20_000) for _ in range(25)]
    with EngineCoreClient(make_config(model_folder)) as client:
        answers = []
        for i, value in enumerate(values):
            mutable = value.copy()
            answers.append(client.collective_rpc("echo", [mutable], timeout=WAIT_S))
            assert client.collective_rpc("keep", [mutable], timeout=WAIT_S) == [i + 1, i + 1]
            mutable[:] = 0
        kept = client.collective_rpc("kept", timeout=WAIT_S)
        for i, value in enumerate(values):
            for rank in (0, 1):
                assert np.array_equal(answers[i][rank][1], value)
                assert np.array_equal(kept[rank][i], value)
