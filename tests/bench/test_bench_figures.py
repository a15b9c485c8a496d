"""The figures of loads whose times are known."""

from __future__ import annotations

import pytest

from ringcore.bench.figures import Figures, batch_latencies, read_slos
from ringcore.bench.load import Answer, Failure, Record
from ringcore.bench.prompts import BenchRequest
from ringcore.errors import InvalidRequestError

ASKED = BenchRequest("a", 3)


def record(due_s, sent_s, text_s, num_output=3, num_prompt=10, **fields) -> Record:
    answer = Answer(list(text_s), num_prompt, num_output, **fields)
    return Record(ASKED, due_s, sent_s, text_s[-1], answer)


def test_latencies_count_from_the_moment_a_request_was_due_and_from_its_sending():
    figures = Figures([record(10.0, 10.5, [11.0, 11.5, 12.5]), record(11.0, 11.0, [13.0, 13.25, 13.5])], [90.0])
    values = figures.to_dict()
    assert values["mean_ttft_ms"] == pytest.approx((1000 + 2000) / 2)
    assert values["mean_ttft_from_sent_ms"] == pytest.approx((500 + 2000) / 2)
    assert values["median_e2el_ms"] == pytest.approx(2500)
    assert values["mean_e2el_from_sent_ms"] == pytest.approx((2000 + 2500) / 2)
    assert values["mean_tpot_ms"] == pytest.approx((750 + 250) / 2)
    assert values["mean_itl_ms"] == pytest.approx((500 + 1000 + 250 + 250) / 4)
    assert values["std_tpot_ms"] == pytest.approx(250)
    assert values["p90_ttft_ms"] == pytest.approx(1900)
    assert values["duration"] == pytest.approx(3.5)
    assert values["request_throughput"] == pytest.approx(2 / 3.5)
    assert values["output_throughput"] == pytest.approx(6 / 3.5)
    assert values["total_token_throughput"] == pytest.approx(26 / 3.5)
    assert values["max_concurrent_requests"] == 2
    assert values["max_sent_late_ms"] == pytest.approx(500)


def test_pieces_of_several_tokens():
    """TPOT counts tokens, ITL pieces."""
    values = Figures([record(0.0, 0.0, [1.0, 2.0], num_output=5)]).to_dict()
    assert (values["mean_tpot_ms"], values["mean_itl_ms"]) == (pytest.approx(250), pytest.approx(1000))


def test_whole_answers_have_no_first_token():
    values = Figures([record(0.0, 0.0, [2.0], is_streamed=False)]).to_dict()
    assert values["mean_ttft_ms"] is values["p99_itl_ms"] is None
    assert values["mean_e2el_ms"] == pytest.approx(2000)


def test_goodput_is_of_answers_within_every_limit():
    records = [
        record(0.0, 0.0, [0.1, 0.2, 0.3]),  # 100 ms to the first, then 100 ms each
        record(0.0, 0.0, [0.3, 0.4, 0.5]),  # too late
        record(0.0, 0.0, [0.1, 0.5, 1.0]),  # too slow
        Record(ASKED, 0.0, 0.0, 2.0, Failure("timeout", "")),
    ]
    figures = Figures(records, slos=read_slos(["ttft:200", "tpot:150"]))
    assert figures.num_good == 1
    assert figures.to_dict()["request_goodput"] == pytest.approx(1 / 2.0)
    assert Figures(records).to_dict()["request_goodput"] is None
    assert "Request goodput (req/s), ttft 200 ms, tpot 150 ms:" in "\n".join(figures.table())


@pytest.mark.parametrize("text", ["ttft", "ttft:0", "ttft:x", "itl:3", ":5"])
def test_a_wrong_limit_is_named(text):
    with pytest.raises(InvalidRequestError, match="give ttft, tpot, e2el, a colon and milliseconds"):
        read_slos([text])


def test_failures_are_counted_by_kind():
    failures = [Record(ASKED, 0.0, 0.0, 1.0, Failure(kind, "x")) for kind in ("http 429", "timeout", "http 429")]
    figures = Figures([*failures, record(0.0, 0.0, [1.0, 2.0, 4.0])])
    values = figures.to_dict()
    assert (values["completed"], values["failed"]) == (1, 3)
    assert values["failures"] == {"http 429": 2, "timeout": 1}
    assert values["request_throughput"] == pytest.approx(1 / 4)
    assert [row.get("failure") for row in figures.samples()["requests"]] == ["http 429", "timeout", "http 429", None]
    assert Figures(failures).to_dict()["mean_e2el_ms"] is None


def test_batches():
    good, failed = record(1.0, 1.0, [2.0]), Record(ASKED, 1.0, 1.0, 5.0, Failure("timeout", ""))
    values = batch_latencies([Figures([good]), Figures([good, failed]), Figures([record(0.0, 0.0, [3.0])])], [90.0])
    assert values["latencies"] == [1.0, 3.0]
    assert (values["avg_latency"], values["failed"], values["percentiles"]) == (2.0, 1, {"50": 2.0, "90": 2.8})
    assert batch_latencies([Figures([failed])], [90.0])["avg_latency"] is None
