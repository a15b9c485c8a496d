"""Inputs: compressed, split anywhere, with ids that occur twice, in the order of their prefixes."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections import Counter

import numpy as np
import pytest
import zstandard
from batch_command import read_results, write_lines
from fake_engine import make_model_folder

from ringcore import batch
from ringcore.batch.duplicates import IdCheck
from ringcore.batch.input_order import InputOrder
from ringcore.batch.job import InputFacts
from ringcore.batch.journal import DoneLines, Record
from ringcore.batch.lines import Outcome
from ringcore.batch.look_ahead import LookAhead
from ringcore.batch.options import BatchOptions
from ringcore.batch.plain_lines import PlainLines
from ringcore.batch.scan import scan
from ringcore.batch.sources import HashedChunks, open_input, split_lines
from ringcore.errors import ConfigError
from ringcore.testing import FakeExecutor


@pytest.mark.parametrize("seed", range(20))
def test_lines_however_they_are_cut(seed):
    rng = random.Random(seed)
    lines = [rng.randbytes(rng.choice([0, 1, 5, 30])).replace(b"\n", b"x") for _ in range(rng.randrange(12))]
    data = b"\n".join(lines) + rng.choice([b"", b"\n"])
    chunks = []
    while data[sum(map(len, chunks)) :]:
        begun = sum(map(len, chunks))
        chunks.append(data[begun : begun + rng.choice([1, 2, 7, 40])])
    expected = data.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert list(split_lines(iter(chunks), 10)) == [line if len(line) <= 10 else None for line in expected]


PACKED = {
    "plain": lambda data: data,
    "gzip": lambda data: gzip.compress(data[:1000]) + gzip.compress(data[1000:]),
    "zstd": lambda data: zstandard.compress(data[:1000]) + zstandard.compress(data[1000:]),
}


@pytest.mark.parametrize("kind", PACKED)
def test_compressed_inputs_are_their_content(tmp_path, kind):
    """By their first bytes, whatever they are called."""
    data = b'{"prompt": "x"}\n' * 200 + b"\n{"
    path = tmp_path / "in"
    path.write_bytes(PACKED[kind](data))
    with open_input(str(path)) as stream:
        assert b"".join(HashedChunks(stream)) == data
    found = scan(str(path), "auto", 1 << 20, str(tmp_path), lambda: False)
    assert (found.input.num_bytes, found.num_lines, found.num_requests, found.format) == (3202, 202, 201, "plain")
    path.write_bytes(PACKED[kind](data)[:-3])
    if kind != "plain":
        with pytest.raises(ConfigError, match="cannot be read"), open_input(str(path)) as stream:
            b"".join(HashedChunks(stream))


@pytest.mark.parametrize("seed", range(10))
def test_ids_that_occur_twice_among_many_runs(tmp_path, seed):
    rng = random.Random(seed)
    ids = [f"id-{i}" for i in range(2000)] + [f"id-{rng.randrange(2000)}" for _ in range(5)]
    rng.shuffle(ids)
    check = IdCheck(str(tmp_path), run_length=rng.choice([64, 333, 5000]))
    first, expected = {}, []
    for line, name in enumerate(ids, start=1):
        check.add(name, line)
        if name in first:
            expected.append((first[name], line))
        first[name] = line
    assert check.duplicates(100) == sorted(expected, key=lambda pair: pair[1])
    assert list(tmp_path.iterdir()) == []


def test_hashes_that_are_alike_in_part_are_not_the_same(tmp_path, monkeypatch):
    digests = iter([bytes(8) + bytes([i] * 8) for i in (1, 2, 1)])
    monkeypatch.setattr(
        "ringcore.batch.duplicates.blake2b", lambda *_, **__: type("", (), {"digest": lambda self: next(digests)})()
    )
    check = IdCheck(str(tmp_path))
    for line in (1, 2, 3):
        check.add("x", line)
    assert check.duplicates(9) == [(1, 3)]


def take_all(path, done: DoneLines, order: InputOrder | None = None, **options) -> list[int]:
    with open_input(str(path)) as stream:
        chunks = HashedChunks(stream)
        assert list(chunks)

    async def take() -> list[int]:
        lines = LookAhead(
            str(path),
            BatchOptions(**options),
            chunks.facts(),
            done=done,
            prefix=PlainLines(0, {}).prefix,
            order=order,
            stopped=asyncio.get_running_loop().create_future(),
        )
        numbers = []
        while (line := await lines.take()) is not None:
            numbers.append(line.number)
        await lines.close()
        return numbers

    return asyncio.run(take())


def test_lines_with_a_common_prefix_are_near_each_other(tmp_path):
    """In blocks that are the same whatever was done before."""
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": f"{'cba'[i % 3]} {i:03}"} for i in range(20)])
    whole = take_all(path, DoneLines.none_of(20), look_ahead=6)
    assert whole[:6] == [3, 6, 2, 5, 1, 4]
    assert sorted(whole) == list(range(1, 21))
    done = DoneLines.none_of(20)
    for line in (1, 2, 5, 9, 14, 20):
        done.count(Record(line, False, 0, 0))
    assert take_all(path, done, look_ahead=6) == [line for line in whole if not done.is_done(line)]
    assert take_all(path, DoneLines.none_of(20), look_ahead=1) == list(range(1, 21))


def test_an_input_that_changes_while_it_is_read(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}] * 4)

    async def take() -> None:
        lines = LookAhead(
            str(path),
            BatchOptions(),
            InputFacts("0" * 64, 64),
            done=DoneLines.none_of(4),
            prefix=lambda text: b"",
            order=None,
            stopped=asyncio.get_running_loop().create_future(),
        )
        while await lines.take():
            pass

    with pytest.raises(ConfigError, match="its content has changed while the job ran"):
        asyncio.run(take())


def test_results_in_the_order_of_the_input():
    written: list[int] = []
    order = InputOrder(lambda outcome: written.append(outcome.record.line), limit=2)

    async def run() -> None:
        order.expect([1, 3, 4, 8])
        waiting = order.may_go_on()
        assert waiting is not None
        for line, expected in ((4, []), (1, [1]), (8, [1]), (3, [1, 3, 4, 8])):
            order.add(Outcome(Record(line, False, 0, 0), b""))
            assert written == expected
        assert waiting.done()
        assert order.may_go_on() is None

    asyncio.run(run())


def test_done_lines_one_by_one_and_all_at_once():
    one, other = DoneLines.none_of(100), DoneLines.none_of(100)
    records = [Record(line, line % 3 == 0, line, 2) for line in random.Random(0).sample(range(1, 101), 40)]
    for record in records:
        one.count(record)
    columns = [(r.line, 0, 0, 2 * r.is_failed, r.prompt_tokens, r.output_tokens, 0) for r in records]
    names = ["line", "end", "crc", "flags", "prompt_tokens", "output_tokens", "check"]
    other.count_all(np.array(columns, dtype={"names": names, "formats": ["<u8", "<u8", *["<u4"] * 5]}))
    assert (one.bits == other.bits).all()
    assert [line for line in range(1, 101) if one.is_done(line)] == sorted(r.line for r in records)
    fields = ("num_done", "num_failed", "prompt_tokens", "output_tokens")
    assert [getattr(one, name) for name in fields] == [getattr(other, name) for name in fields]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


ENGINE = {"load_format": "dummy", "max_model_len": 128, "use_tqdm": False, "executor": FakeExecutor}


def test_prefixes_are_found_in_the_cache(folder, tmp_path):
    """48 prompts of 12 prefixes, which the input has one after the other; the cache holds few of them at once."""
    prefixes = [f"prefix {name} " * 7 for name in "abcdefghijkl"]
    path = write_lines(
        tmp_path / "in.jsonl", [{"prompt": f"{prefixes[i % 12]}{i}", "max_tokens": 2} for i in range(48)]
    )
    rates = {}
    for look_ahead in (1, 48):
        summary = batch.run(
            path,
            tmp_path / f"out-{look_ahead}",
            folder,
            look_ahead=look_ahead,
            num_blocks_override=24,
            max_in_flight=2,
            **ENGINE,
        )
        rates[look_ahead] = summary.cache_hit_rate
    assert rates[1] < 0.05
    assert rates[48] > 0.5  # three of four find the prefix of the first


def test_two_engines_share_a_queue_and_a_url_of_fsspec(folder, tmp_path):
    """From memory, to memory, in the order of the input."""
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    lines = [{"prompt": f"line {i}", "max_tokens": 2, "ignore_eos": True} for i in range(40)]
    files.pipe("/batch/in.jsonl.gz", gzip.compress("".join(f"{json.dumps(line)}\n" for line in lines).encode()))
    url, options = "memory://batch/out.jsonl", ENGINE | {"journal": str(tmp_path / "journal"), "order": "input"}
    with pytest.raises(ConfigError, match="say where by journal"):
        batch.run("memory://batch/in.jsonl.gz", url, folder, **ENGINE)
    summary = batch.run("memory://batch/in.jsonl.gz", url, folder, data_parallel=2, max_in_flight=3, **options)
    results = read_results(files.cat("/batch/out.jsonl"))
    assert [result["custom_id"] for result in results] == list(range(1, 41))
    assert Counter(result["usage"]["completion_tokens"] for result in results) == {2: 40}
    assert (summary.num_done, summary.exit_code) == (40, 0)
    with pytest.raises(ConfigError, match="it exists"):
        batch.run("memory://batch/in.jsonl.gz", url, folder, **options | {"journal": str(tmp_path / "another")})
    with pytest.raises(ConfigError, match=r"none.jsonl'?: cannot be read"):
        batch.run("memory://batch/none.jsonl", tmp_path / "out", folder, **ENGINE)
