"""Makes malformed bytes of good ones, and watches what a decoder does with them."""

from __future__ import annotations

import contextlib
import random
import time
import tracemalloc

SLOWEST_S = 1.0  # of the thread's own time; the bound is 50 ms, which a collection of garbage may exceed
TYPICAL_S = 0.05
MAX_BYTES = 8 << 20  # the frames here are a few kB; nobody may believe a length field
LENGTHS = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The bytes with something wrong: bits, length fields, cut, repeated, foreign, or nested without end."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(out)) if out else 0
        match rng.randrange(8):
            case 0 if out:
                out[at] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at] = rng.randrange(256)
            case 2:
                width = rng.choice([1, 2, 4, 8])
                field = (rng.choice(LENGTHS) & ((1 << 8 * width) - 1)).to_bytes(width, rng.choice(["big", "little"]))
                out[at : at + width] = field
            case 3:
                del out[at:]
            case 4:
                out[at:at] = out[at : at + rng.randrange(64)]
            case 5:
                out[at : at + rng.randrange(8)] = rng.randbytes(rng.randrange(16))
            case 6:
                out[at:at] = rng.choice([b"\x91", b"\x81\xa1a", b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff"]) * rng.choice(
                    [1, 2, 3000]
                )
            case 7:
                out[at:at] = rng.choice(
                    [b"\xc7\xff\x01", b"\xc9\xff\xff\xff\xff\x02", b"\xd4\x01", b"\xc6\x7f\xff\xff\xff"]
                )
    return bytes(out)


def mutated_parts(parts: list[bytes], rng: random.Random) -> list[bytes]:
    parts = list(parts)
    match rng.randrange(6):
        case 0:
            parts.insert(rng.randrange(len(parts) + 1), rng.randbytes(rng.randrange(100)))
        case 1:
            del parts[rng.randrange(len(parts))]
        case 2:
            rng.shuffle(parts)
        case _:
            at = rng.randrange(len(parts))
            parts[at] = mutated(parts[at], rng)
    return parts


class Watch:
    """Measures each attempt, and now and then the memory of one."""

    def __init__(self) -> None:
        self.num_attempts = self.num_refused = self.num_slow = 0

    @contextlib.contextmanager
    def attempt(self, *errors: type[BaseException]):
        measures = self.num_attempts % 50 == 0
        self.num_attempts += 1
        if measures:
            tracemalloc.start()
        started = time.thread_time()  # what others do on the machine does not count
        try:
            yield
        except errors:
            self.num_refused += 1
        finally:
            took_s = time.thread_time() - started
            if measures:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak < MAX_BYTES, f"{peak} bytes allocated"
            assert took_s < SLOWEST_S, f"took {took_s:.2f} s"
            self.num_slow += took_s > TYPICAL_S

    def check(self, count: int) -> None:
        assert self.num_attempts >= count
        assert self.num_refused > count // 20, "hardly any of it was refused: the fuzzer does not fuzz"
        assert self.num_slow <= max(3, count // 1000), f"{self.num_slow} took longer than {TYPICAL_S} s"


def owned(parts) -> list[bytes]:
    return [bytes(part) for part in parts]
