import numpy as np
import pytest

from ringcore.errors import InvalidRequestError
from ringcore.testing import poisson_trace, read_trace, write_trace
from ringcore.testing.prompts import PromptMaker

LINES = """\
{"time": 2.0, "prompt_tokens": 30, "output_tokens": 5, "prefix_id": "b", "prefix_tokens": 20, "priority": 3}

{"time": 1, "prompt_tokens": 10, "output_tokens": 4}
{"time": 3.5, "prompt_tokens": 8, "output_tokens": 1, "prefix_id": "a"}
"""


def test_a_file_is_read_in_the_order_of_time(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text(LINES)
    trace = read_trace(file)
    assert len(trace) == 3
    assert trace.time_s.tolist() == [1.0, 2.0, 3.5]
    assert trace.prompt_tokens.tolist() == [10, 30, 8]
    assert trace.output_tokens.tolist() == [4, 5, 1]
    assert trace.priority.tolist() == [0, 3, 0]
    assert [trace.prefix_ids[i] if i >= 0 else None for i in trace.prefix.tolist()] == [None, "b", "a"]
    assert trace.prefix_tokens.tolist() == [0, 20, 8]  # without prefix_tokens the whole prompt is shared


def test_what_is_written_is_read(tmp_path):
    trace = poisson_trace(50, 3.0, num_prefixes=4, prefix_tokens=16)
    write_trace(trace, tmp_path / "t.jsonl")
    again = read_trace(tmp_path / "t.jsonl")
    for name in ("time_s", "prompt_tokens", "output_tokens", "prefix_tokens", "priority"):
        assert np.array_equal(getattr(again, name), getattr(trace, name))
    assert [again.prefix_ids[i] for i in again.prefix] == [trace.prefix_ids[i] for i in trace.prefix]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line: it is no JSON"),
        ('"a"', "line: Expected `object`, got `str`"),
        ("\xff", "line: it is no JSON"),
        ('{"time": 1, "prompt_tokens": 5}', "line: Object missing required field `output_tokens`"),
        ('{"time": "1", "prompt_tokens": 5, "output_tokens": 5}', "time: Expected `float`, got `str`"),
        ('{"time": -1, "prompt_tokens": 5, "output_tokens": 5}', "time: is -1.0; give seconds, 0 or more"),
        ('{"time": 1, "prompt_tokens": 5.5, "output_tokens": 5}', "prompt_tokens: Expected `int`, got `float`"),
        ('{"time": 1, "prompt_tokens": 0, "output_tokens": 5}', "prompt_tokens: is 0; give 1 to"),
        ('{"time": 1, "prompt_tokens": 5, "output_tokens": 0}', "output_tokens: is 0; give 1 to"),
        ('{"time": 1, "prompt_tokens": 5, "output_tokens": 5, "prefix": "a"}', "unknown field `prefix`"),
        ('{"time": 1, "prompt_tokens": 5, "output_tokens": 5, "prefix_tokens": 3}', "prefix_tokens: has no prefix_id"),
        (
            '{"time": 1, "prompt_tokens": 5, "output_tokens": 5, "prefix_id": "a", "prefix_tokens": 6}',
            "prefix_tokens: is 6; give 1 to prompt_tokens, 5",
        ),
    ],
)
def test_a_wrong_line_is_told_with_file_line_and_field(tmp_path, line, says):
    file = tmp_path / "wrong.jsonl"
    file.write_bytes(f"{LINES}{line}\n".encode("latin-1"))
    with pytest.raises(InvalidRequestError) as caught:
        read_trace(file)
    assert caught.value.message.startswith(f"trace {str(file)!r}, line 5: ")
    assert says in caught.value.message


def test_no_requests_and_no_file(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(InvalidRequestError, match="has no requests"):
        read_trace(tmp_path / "empty.jsonl")
    with pytest.raises(InvalidRequestError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.jsonl")


def test_a_made_trace_has_the_means_asked_for():
    trace = poisson_trace(20_000, 10.0, prompt_tokens=300, output_tokens=50, num_prefixes=10, prefix_tokens=100)
    assert trace.time_s[-1] == pytest.approx(2000, rel=0.05)
    assert (np.diff(trace.time_s) >= 0).all()
    assert trace.prompt_tokens.mean() == pytest.approx(400, rel=0.05)
    assert trace.output_tokens.mean() == pytest.approx(50, rel=0.05)
    assert trace.output_tokens.min() >= 1
    counts = np.bincount(trace.prefix)
    assert counts[0] == pytest.approx(10 * counts[9], rel=0.2)  # Zipf's law
    same = poisson_trace(20_000, 10.0, prompt_tokens=300, output_tokens=50, num_prefixes=10, prefix_tokens=100)
    assert np.array_equal(trace.time_s, same.time_s)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_requests": 0}, "num_requests=0"),
        ({"requests_per_s": 0.0}, "requests_per_s=0.0"),
        ({"output_tokens": 0}, "output_tokens=0"),
        ({"num_prefixes": 3}, "give both, or neither"),
    ],
)
def test_a_trace_that_cannot_be_made(arguments, says):
    with pytest.raises(InvalidRequestError, match=says):
        poisson_trace(**{"num_requests": 5, "requests_per_s": 1.0} | arguments)


@pytest.mark.parametrize("vocab_size", [2, 10, 1000])
def test_prompts_begin_alike_only_with_one_prefix(vocab_size):
    """The first block that two prompts do not share has to be another."""
    prompts = PromptMaker(vocab_size, 20)
    digits = prompts._num_digits
    plain = [prompts.make(i, 100, -1, 0) for i in range(10)]
    shared = [prompts.make(i, 100, i % 2, 40) for i in range(10)]
    for made in (*plain, *shared):
        assert len(made) == 100
        assert all(0 <= token < vocab_size for token in made)
    assert len({tuple(made[:digits]) for made in plain}) == 10
    assert {tuple(made[:40]) for made in shared[::2]} == {tuple(shared[0][:40])}
    assert len({tuple(made[:digits]) for made in (*plain, shared[0], shared[1])}) == 12
    assert len({tuple(made[: 40 + digits]) for made in shared}) == 10
    assert prompts.make(3, 25, 0, 25) == shared[0][:25]
    assert prompts.make(3, 90, 0, 60)[:40] == shared[0][:40]
    assert len(prompts.make(3, 200_000, -1, 0)) == 200_000
