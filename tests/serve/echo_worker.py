"""The worker of `echo_model`: a module of its own, as the processes of an engine import it, and need no web server."""

from __future__ import annotations

from fake_engine import EOS, FakeWorker, next_token

from ringcore.executor.multiproc import MultiprocExecutor
from ringcore.worker import rpc

SAY_ID, SAID_ID = EOS + 1, EOS + 2  # around what the model is to say, in the prompt


class EchoWorker(FakeWorker):
    @rpc(scope="engine")
    def execute_model(self, scheduler_output):
        output = super().execute_model(scheduler_output)
        for i, row in enumerate(output.rows.tolist()):
            request, tokens = self._requests[row], self._tokens[row]
            tokens[-1] = output.token_ids[i] = _next_token(tokens[:-1], request)
            if output.logprobs:
                output.logprobs[i] = self._logprobs(tokens[-1], request.sampling_params.logprobs)
        return output


def _next_token(tokens: list[int], request) -> int:
    if SAY_ID not in tokens:  # a prompt without a template
        return next_token(tokens)
    told = tokens[tokens.index(SAY_ID) + 1 : tokens.index(SAID_ID)]
    alternatives = [[]]
    for token in told:
        if alternatives[-1][-1:] == [token] == [ord("|")]:
            alternatives[-1].pop()
            alternatives.append([])
        else:
            alternatives[-1].append(token)
    said = alternatives[(request.sampling_params.seed or 0) % len(alternatives)]
    num_said = len(tokens) - request.num_prompt_tokens
    return said[num_said] if num_said < len(said) else EOS


def create_worker(config, rank, rendezvous):
    return EchoWorker(config, rank)


class EchoMultiproc(MultiprocExecutor):
    def __init__(self, config) -> None:
        super().__init__(config, worker_factory="echo_worker:create_worker")
