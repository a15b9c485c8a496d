"""An executor in this process whose worker dies when a test or a request says so, and whose replies may be late."""

from __future__ import annotations

from collections import deque

from fake_engine import CHECKPOINT, FakeWorker, next_token

from ringcore.errors import EngineDeadError
from ringcore.executor.base import Executor
from ringcore.executor.rpc_call import EncodedCall
from ringcore.executor.value_codec import decode_request, decode_value, encode_value
from ringcore.protocol.messages import RankHealth
from ringcore.worker.rpc import call_rpc, rpc_methods

KILLER = 140  # a prompt with token KILLER + n kills the worker whenever it has n tokens or more; n < 50
CRASHER = 190  # the same, but the step raises, and the worker lives on


class WorkerKilled(BaseException):
    pass


class MortalWorker(FakeWorker):
    """Checks what it is told of its rows, and remembers who was in each step, and with which seeds, by the first token
    of the prompt."""

    def __init__(self, config, rank: int) -> None:
        super().__init__(config, rank)
        self.steps: list[set[int]] = []
        self.seeds: dict[int, set[int]] = {}
        self.possible_weights = {CHECKPOINT}  # that tokens of before may be of

    def execute_model(self, scheduler_output):
        finished = scheduler_output.finished_rows.tolist()
        assert all(row in self._tokens for row in finished), "a row that this worker never had is finished"
        for new in scheduler_output.new_requests:
            assert new.row not in self._tokens or new.row in finished, "a row is given to two requests"
            generated = new.token_ids.tolist()[new.num_prompt_tokens :]
            prompt = new.token_ids.tolist()[: new.num_prompt_tokens]
            for index, token in enumerate(generated):
                possible = {next_token(prompt + generated[:index], weights) for weights in self.possible_weights}
                assert token in possible, "a resumed request has a wrong token"
            self.seeds.setdefault(prompt[0], set()).add(new.seed)
        known = {row: tokens[0] for row, tokens in self._tokens.items()}
        known |= {new.row: int(new.token_ids[0]) for new in scheduler_output.new_requests}
        self.steps.append({known[row] for row, _ in self._scheduled(scheduler_output)})
        return super().execute_model(scheduler_output)

    def _misbehave(self, tokens: list[int]) -> None:
        super()._misbehave(tokens)
        if any(0 <= token - KILLER < 50 and len(tokens) >= token - KILLER for token in tokens):
            raise WorkerKilled
        if any(0 <= token - CRASHER < 50 and len(tokens) >= token - CRASHER for token in tokens):
            raise ZeroDivisionError("the forward pass failed")


class Reply:
    """The future of a step or call: the parts of a value, or an error. Neither is there while it is held."""

    def __init__(self, value=None, error: Exception | None = None, is_held: bool = False) -> None:
        self.value, self.error, self.is_held = value, error, is_held

    def finish(self) -> None:
        self.is_held = False

    def done(self) -> bool:
        return not self.is_held

    def result(self, timeout=None):
        if self.error is not None:
            raise self.error
        return self.value


class CallReply(Reply):
    """Of a call, whose value is encoded."""

    def result(self, timeout=None):
        return [decode_value(parts) for parts in self.encoded_result()]

    def encoded_result(self):
        return super().result()


class MortalExecutor(Executor):
    """One fake worker; steps and calls are executed when they are submitted, as long as it lives.

    `holds`: a step's reply is under way until it is waited for, or until `finish`, and a death loses it; else it has
    arrived at once. `start_errors` are raised by the next restarts, in order.
    """

    def __init__(self, config, *, holds: bool = False) -> None:
        super().__init__(config)
        self.holds = holds
        self.start_errors: deque[Exception] = deque()
        self.kv_cache_bytes: int | None = None  # of the next worker; the configuration's if None
        self.workers: list[MortalWorker] = []
        self.replies: list[Reply] = []
        self.steps: deque[Reply] = deque()
        self.calls: list[str] = []
        self.dead: EngineDeadError | None = EngineDeadError("not started")
        self.is_noticed = True  # a death that is not is found by the next wait
        self.num_shutdowns = 0
        self.step_age_s: float | None = None

    @property
    def worker(self) -> MortalWorker:
        return self.workers[-1]

    def start(self):
        self.calls.append("start")
        return self._start()

    def restart(self):
        self.calls.append("restart")
        self.die("the workers were replaced")
        return self._start()

    def _start(self):
        if self.num_shutdowns:
            raise EngineDeadError("the workers were shut down", process="workers")
        if self.start_errors:
            raise self.start_errors.popleft()
        self.workers.append(MortalWorker(self.config, 0))
        self.methods = rpc_methods(self.worker)
        if self.kv_cache_bytes is not None:
            table = {"total": 1 << 30, "available_kv_cache_bytes": self.kv_cache_bytes}
            self.worker.determine_available_memory = lambda: table
        self.replies, self.dead = [], None
        self.steps.clear()
        return {"start_workers": 0.5, "load_model": 2.0}

    def die(self, why: str = "worker 0 was killed by SIGKILL", *, noticed: bool = True) -> None:
        """The worker is no more. One that is not noticed still takes what is sent to it, and never answers."""
        error = EngineDeadError(why, process="worker 0", rank=0, exit_code=None, signal="SIGKILL", last_log=[])
        self.dead, self.is_noticed = error, noticed
        for reply in self.replies:
            if reply.is_held or (reply.value is None and reply.error is None):
                reply.error, reply.is_held = error, False

    def forward(self, call: EncodedCall):
        return self._submit(lambda: self._call(call), CallReply())

    def _call(self, call: EncodedCall):
        method, args, kwargs = decode_request(call.parts)
        self.calls.append(method)
        if method == "determine_available_memory":
            return [encode_value(self.worker.determine_available_memory())]
        return [encode_value(call_rpc(self.worker, method, args, kwargs, call.by_engine))]

    def execute_model(self, scheduler_output):
        reply = self._submit(lambda: self.worker.execute_model(scheduler_output), Reply(is_held=self.holds))
        self.steps.append(reply)
        return reply

    def _submit(self, run, reply: Reply) -> Reply:
        if self.dead is not None and self.is_noticed:
            raise self.dead
        self.replies.append(reply)
        if self.dead is not None:
            reply.error, reply.is_held = self.dead, False
            return reply
        try:
            reply.value = run()
        except WorkerKilled:
            self.die()
        except Exception as error:
            reply.error = error
        return reply

    def wait_fds(self):
        self.check()
        return [len(self.workers)]

    def check(self) -> None:
        if self.dead is not None:
            self.is_noticed = True
            raise self.dead

    def pids(self):
        return {"worker 0": 1000 + len(self.workers)}

    def health(self):
        return [RankHealth(0, 1000 + len(self.workers), "running", 0.0, None, 0.0, 0)]

    def oldest_step_s(self):
        return self.step_age_s

    def diagnose(self) -> str:
        return ""

    def shutdown(self) -> None:
        self.num_shutdowns += 1
        self.die("the workers were shut down")
