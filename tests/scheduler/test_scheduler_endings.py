"""How a request ends: its length, a stop token, an error of its row, an abort."""

from __future__ import annotations

import msgspec
import pytest
from fake_model import completion
from scheduler_driver import EOS, Driver

from ringcore.errors import WorkerError, error_from_wire
from ringcore.protocol.requests import TokenLogprobs

A = list(range(1, 9))  # two blocks of 4
B = list(range(11, 19))


class TestTheEnd:
    def test_length(self):
        engine = Driver(max_model_len=10)
        engine.add("a", A, max_tokens=1)
        engine.add("b", B, max_tokens=None)
        engine.drain()
        assert [len(engine.tokens(name)) for name in "ab"] == [1, 2]
        assert [engine.finish_reason(name) for name in "ab"] == ["length", "length"]

    def test_stop_token_is_the_last_one_and_the_reason(self):
        stop = completion(A, 3)[2]
        engine = Driver()
        engine.add("a", A, max_tokens=9, stop_token_ids=[stop])
        engine.drain()
        last = engine.outputs["a"][-1]
        assert (engine.tokens("a"), last.finish_reason, last.stop_reason) == (completion(A, 3), "stop", stop)

    @pytest.mark.parametrize("ignore_eos", [False, True])
    def test_end_of_text(self, ignore_eos):
        prompt = next(p for p in ([n, m] for n in range(50) for m in range(50)) if completion(p, 1) == [EOS])
        engine = Driver()
        engine.add("a", prompt, max_tokens=2, ignore_eos=ignore_eos)
        engine.drain()
        last = engine.outputs["a"][-1]
        assert (len(engine.tokens("a")), last.finish_reason) == ((2, "length") if ignore_eos else (1, "stop"))
        assert last.stop_reason is None

    def test_end_of_text_is_a_users_stop_where_it_is_ignored_as_such(self):
        prompt = next(p for p in ([n, m] for n in range(50) for m in range(50)) if completion(p, 1) == [EOS])
        engine = Driver()
        engine.add("a", prompt, max_tokens=2, ignore_eos=True, stop_token_ids=[EOS])
        engine.drain()
        assert engine.outputs["a"][-1].stop_reason == EOS

    def test_min_tokens(self):
        stop = completion(A, 1)[0]
        engine = Driver()
        engine.add("a", A, max_tokens=4, min_tokens=3, stop_token_ids=[stop])
        step = engine.schedule()
        assert step.new_requests[0].stop_token_ids == [stop]
        # A worker that does not bar the stop token does not end the request early either.
        step, output = engine.in_flight[0]
        output.token_ids[0] = stop
        engine.worker.rows[0].tokens[-1] = stop
        assert engine.update()[0].finish_reason is None

    def test_stop_ids_sent_hold_the_end_of_text_unless_ignored(self):
        engine = Driver()
        engine.add("a", A, stop_token_ids=[7, EOS], ignore_eos=False)
        engine.add("b", B, stop_token_ids=[7], ignore_eos=True)
        assert [new.stop_token_ids for new in engine.schedule().new_requests] == [[EOS, 7], [7]]

    def test_an_error_of_a_row_spares_its_neighbours(self):
        engine = Driver(depth=2)
        engine.add("a", A, max_tokens=3)
        engine.add("b", B, max_tokens=3)
        engine.schedule()
        engine.worker.rows[0].poisoned = True
        engine.drain()
        last = engine.outputs["a"][-1]
        assert (last.finish_reason, engine.tokens("b")) == ("error", completion(B, 3))
        error = error_from_wire({"type": last.error.type, "message": last.error.message, "details": last.error.details})
        assert isinstance(error, WorkerError)
        assert "'a'" in error.message
        assert "not finite" in error.details["error_message"]

    def test_logprobs_are_handed_through(self):
        engine = Driver()
        engine.add("a", A, max_tokens=2, logprobs=1)
        engine.add("b", B, max_tokens=2)
        engine.schedule()
        step, output = engine.in_flight[0]
        entry = TokenLogprobs([int(output.token_ids[0])], [-0.5], [1])
        engine.in_flight[0] = step, msgspec.structs.replace(output, logprobs=[entry, None])
        assert [output.logprobs for output in engine.update()] == [[entry], None]

    def test_logprobs_of_the_last_tokens_too(self):
        stop = completion(A, 3)[2]
        engine = Driver(num_blocks=20, max_steps=4)
        engine.add("a", A, max_tokens=9, logprobs=1, stop_token_ids=[stop])
        engine.add("b", B, max_tokens=9)
        engine.step()
        assert engine.schedule().num_steps == 4
        step, output = engine.in_flight[0]
        entries = [TokenLogprobs([int(token_id)], [-0.5], [1]) for token_id in output.token_ids[:4]]
        engine.in_flight[0] = step, msgspec.structs.replace(output, logprobs=[*entries, None, None, None, None])
        engine.update()
        assert [engine.outputs[name][-1].logprobs for name in "ab"] == [entries[:2], None]

    def test_abort(self):
        engine = Driver(max_num_seqs=1)
        engine.add("a", A)
        engine.add("b", B)
        engine.step()
        outputs = engine.abort("b", "a", "nobody", "a")
        assert [(output.request_id, output.finish_reason) for output in outputs] == [("b", "abort"), ("a", "abort")]
        assert engine.abort("a") == []
        assert not engine.scheduler.has_unfinished
        assert engine.kv_cache.num_free_blocks == engine.kv_cache.num_usable_blocks
        assert outputs[0].first_scheduled_s is None
        assert outputs[1].first_scheduled_s == 0
