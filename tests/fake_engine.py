"""A model without a tensor: a worker whose next token is a function of the tokens so far, and executors that run it.

`execute_model` keeps its own rows, as a real worker does, so that what the engine sends is what counts. Some token
ids in a prompt make the worker misbehave.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ringcore.errors import CapacityError, InvalidRequestError
from ringcore.executor.multiproc import MultiprocExecutor
from ringcore.executor.uniproc import UniProcExecutor
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from ringcore.params.structured_outputs import StructuredOutputsParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.requests import PromptLogprobs, TokenLogprobs
from ringcore.protocol.steps import ModelRunnerOutput, NewRequest, RowError, SchedulerOutput
from ringcore.tracing import Tracer
from ringcore.worker import rpc
from ringcore.worker.traced_worker import TracedWorker

if TYPE_CHECKING:
    from ringcore.testing.fake_prompts import FakePrompts

VOCAB_SIZE = 300
EOS = 256
# A prompt with this token does this to its step.
RAISES, KILLS, ROW_FAILS, SLOW, KILLS_ONCE = 290, 291, 292, 293, 294
SLOW_STEP_S = 0.05
CHECKPOINT = 0
_HURRIES = "hurries"  # while a file of this name is in the model's folder, the worker waits for nothing


def next_token(tokens: list[int], weights: int = 0) -> int:
    """A lower-case letter."""
    return 97 + (sum(tokens[-8:]) * 31 + len(tokens) * 7 + weights) % 26


def expected(prompt: list[int], num_tokens: int, weights: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, weights))
    return tokens[len(prompt) :]


@contextmanager
def hurried(folder: str) -> Iterator[None]:
    """Meanwhile the engines of this model's folder have no slow steps, and naps end: what a test had to find running
    costs no more than was looked at."""
    (file := Path(folder) / _HURRIES).touch()
    try:
        yield
    finally:
        file.unlink()


class FakeWorker(TracedWorker):
    def __init__(self, config, rank: int) -> None:
        self.config, self.rank, self.tracer = config, rank, Tracer()
        self._requests: dict[int, NewRequest] = {}
        self._tokens: dict[int, list[int]] = {}
        self._num_computed: dict[int, int] = {}
        self._num_steps = 0
        self._rows: list[int] = []  # of the last step
        self._prompts: FakePrompts | None = None  # from the first prompt of which something is reported
        # The weights are one number, CHECKPOINT's is 0; None where there is no memory, or what is in it means nothing.
        self.weights: int | None = CHECKPOINT
        self.memory = {"weights": "resident", "kv_cache": "resident"}
        self.target: dict[str, str] | None = None  # of a change that was prepared
        self.memory_calls: list[str] = []
        self.failing: dict[str, BaseException] = {}  # what the next call of a method of memory or grammars raises
        self.grammars: list[StructuredOutputsParams] = []

    @rpc(scope="engine")
    def init_device(self) -> None:
        pass

    @rpc(scope="engine")
    def load_model(self) -> dict[str, float]:
        return {"weights_bytes": 0.0, "weights_s": 0.0}

    @rpc(scope="engine")
    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        spec = FullAttentionSpec(self.config.cache.block_size, num_kv_heads=1, head_size=4, dtype="float32")
        return {"layers.0": spec, "layers.1": spec}

    @rpc(scope="engine")
    def determine_available_memory(self) -> dict[str, int]:
        return {"total": 1 << 30, "available_kv_cache_bytes": self.config.cache.kv_cache_bytes or 1 << 20}

    @rpc(scope="engine")
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self._num_blocks = kv_cache_config.num_blocks

    @rpc(scope="engine")
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        for row in scheduler_output.finished_rows.tolist():
            del self._tokens[row]
        for new in scheduler_output.new_requests:
            self._requests[new.row] = new
            self._note_prompt(new)
            self._tokens[new.row] = new.token_ids.tolist()
            self._num_computed[new.row] = new.num_computed_tokens
        assert set(self.memory.values()) == {"resident"}, f"a step without its memory: {self.memory}"
        assert self.weights is not None, "a step with weights that are none"
        self._num_steps += 1
        rows, token_ids, logprobs, errors, of_prompts = [], [], [], [], []
        for row, num_tokens in self._scheduled(scheduler_output):
            tokens = self._tokens[row]
            self._misbehave(tokens)
            self._num_computed[row] += num_tokens
            if self._num_computed[row] < len(tokens):
                continue
            if ROW_FAILS in tokens:
                errors.append(RowError(row, "logits are not finite"))
                continue
            if len(tokens) == self._requests[row].num_prompt_tokens:
                of_prompts += self._prompt_logprobs(row, tokens)
            tokens.append(next_token(tokens, self.weights))
            rows.append(row)
            token_ids.append(tokens[-1])
            wanted = self._requests[row].sampling_params.logprobs
            logprobs.append(None if wanted is None else self._logprobs(tokens[-1], wanted))
        if self.rank != self.config.parallel.layout.output_rank:
            return None
        return ModelRunnerOutput(
            scheduler_output.step,
            int_array(rows),
            int_array(token_ids),
            logprobs if any(logprobs) else None,
            errors,
            of_prompts,
            pooled=self._prompts.pooled(int_array(rows)) if self._prompts else [],
        )

    def _note_prompt(self, new: NewRequest) -> None:
        params = new.sampling_params
        if self._prompts is None and (params.pooling is not None or params.prompt_logprobs is not None):
            # Importing it takes as long as numpy, which in most tests is for nothing.
            from ringcore.testing.fake_prompts import FakePrompts

            self._prompts = FakePrompts(VOCAB_SIZE)
        if self._prompts is not None:
            self._prompts.note(new)

    def _scheduled(self, step: SchedulerOutput) -> list[tuple[int, int]]:
        """The step's rows, and the tokens of each."""
        assert step.num_steps == 1
        if step.rows is not None:
            self._rows = step.rows.tolist()
        counts = [1] * len(self._rows) if step.num_scheduled_tokens is None else step.num_scheduled_tokens.tolist()
        assert step.num_tokens == sum(counts)
        return list(zip(self._rows, counts, strict=True))

    def _misbehave(self, tokens: list[int]) -> None:
        if RAISES in tokens:
            raise ZeroDivisionError("the forward pass failed")
        if KILLS in tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if SLOW in tokens:
            self.nap(SLOW_STEP_S)
        if KILLS_ONCE in tokens and len(tokens) >= tokens.index(KILLS_ONCE) + 4:
            mark = Path(self.config.model.model) / "has_killed"
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        num_top = VOCAB_SIZE if num_top < 0 else num_top
        ids = [token_id, *((token_id + i) % VOCAB_SIZE for i in range(num_top))]
        return TokenLogprobs(ids, [-0.5, *(-0.5 - i for i in range(num_top))], [1, *range(1, num_top + 1)])

    def _prompt_logprobs(self, row: int, prompt: list[int]) -> list[PromptLogprobs]:
        wanted = self._requests[row].sampling_params.prompt_logprobs
        if wanted is None:
            return []
        count = VOCAB_SIZE if wanted < 0 else wanted
        positions = [self._logprobs(token_id, count) for token_id in prompt[1:]]
        columns = [
            [value for one in positions for value in getattr(one, name)] for name in TokenLogprobs.__struct_fields__
        ]
        token_ids, logprobs, ranks = columns
        return [PromptLogprobs(row, count, int_array(token_ids), np.array(logprobs, np.float32), int_array(ranks))]

    # Memory, as the real worker has it.

    def _called(self, name: str) -> None:
        self.memory_calls.append(name)
        if name in self.failing:
            raise self.failing.pop(name)

    @rpc(scope="engine")
    def prepare_memory(self, target: dict[str, str]) -> dict[str, float]:
        assert self.target is None
        self._called("prepare_memory")
        self.target = target
        return {"copied_bytes": 10.0 + self.rank}

    @rpc(scope="engine")
    def commit_memory(self) -> dict[str, float]:
        self._called("commit_memory")
        assert self.target is not None
        target, self.target = self.target, None
        if target.get("weights") == "discarded":
            self.weights = None
        self.memory |= target
        return {"residue_bytes": 5.0}

    @rpc(scope="engine")
    def roll_back_memory(self) -> None:
        self._called("roll_back_memory")
        self.target = None

    @rpc(read_only=True)
    def memory_states(self) -> dict[str, str]:
        return self.memory

    @rpc(scope="engine")
    def start_weight_update(self) -> None:
        assert self.memory["weights"] == "resident"
        self._called("start_weight_update")
        self.new_weights: int | None = None

    @rpc(scope="engine")
    def update_weights(self, source: dict) -> dict[str, float]:
        """{"number": n}, or files in a folder named so."""
        self.weights = None
        self._called("update_weights")
        self.new_weights = int(Path(source["path"]).name if source["kind"] == "files" else source["number"])
        return {"num_tensors": 1.0}

    @rpc(scope="engine")
    def finish_weight_update(self, require_all: bool) -> dict[str, float]:
        self._called("finish_weight_update")
        if require_all and self.new_weights is None:
            raise InvalidRequestError("tensor 'x' is missing", field="tensors", value="x")
        self.weights = self.weights if self.new_weights is None else self.new_weights
        return {"seconds": 0.0}

    @rpc(scope="engine")
    def reset_rows(self) -> None:
        self._tokens.clear()

    @rpc(read_only=True, scope="engine")
    def compile_grammar(self, spec: StructuredOutputsParams) -> None:
        """Remembers it: what is written here keeps to no grammar."""
        self.grammars.append(spec)
        if "compile_grammar" in self.failing:
            raise self.failing.pop("compile_grammar")

    @rpc(read_only=True)
    def stats(self) -> dict:
        return {"rank": self.rank, "num_steps": self._num_steps, "num_blocks": self._num_blocks}

    @rpc(read_only=True)
    def health(self) -> dict:
        return {"rank": self.rank, "device": "cpu"}

    @rpc(scope="engine")
    def shutdown(self) -> None:
        pass

    # For tests alone.

    @rpc
    def echo(self, value: str, times: int = 1) -> str:
        return f"{self.rank}:{value * times}"

    @rpc(read_only=True)
    def stack(self) -> str:
        return f"Thread 1:\n  rank {self.rank}"

    @rpc
    def set_level(self, level: str, verbosity: int, options: dict[str, list[str]]) -> None:
        self.level = (level, verbosity, options)

    @rpc
    def shift(self, by: int) -> int:
        return by

    @rpc
    def nap(self, seconds: float) -> None:
        """Until `hurried` ends it."""
        until = time.monotonic() + seconds
        hurries = Path(self.config.model.model) / _HURRIES
        while (left_s := until - time.monotonic()) > 0 and not hurries.exists():
            time.sleep(min(left_s, 0.01))

    @rpc
    def fail(self) -> None:
        raise KeyError("no such thing")

    @rpc
    def zeros(self, num_bytes: int) -> bytes:
        return bytes(num_bytes)

    @rpc
    def doubled(self, array: np.ndarray) -> np.ndarray:
        return array * 2

    @rpc
    def fail_on(self, ranks: list[int]) -> None:
        if self.rank in ranks:
            raise KeyError(f"rank {self.rank}")

    @rpc
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class BrokenWorker(FakeWorker):
    @rpc(scope="engine")
    def load_model(self) -> dict[str, float]:
        from ringcore.errors import ModelLoadError

        raise ModelLoadError("tensor 'x' is missing", tensor="x")


def create_worker(config, rank: int, rendezvous: str | None) -> FakeWorker:
    return FakeWorker(config, rank)


def create_broken_worker(config, rank: int, rendezvous: str | None) -> FakeWorker:
    return BrokenWorker(config, rank)


def create_fragile_worker(config, rank: int, rendezvous: str | None) -> FakeWorker:
    """It is made as soon as there is no file "holds" in the model's folder, and not at all while there is a "fails"."""
    folder = Path(config.model.model)
    while (folder / "holds").exists():
        time.sleep(0.01)
    if (folder / "fails").exists():
        raise CapacityError("there is no memory left", needed_bytes=2, available_bytes=1)
    return FakeWorker(config, rank)


class FragileMultiproc(MultiprocExecutor):
    def __init__(self, config) -> None:
        super().__init__(config, worker_factory="fake_engine:create_fragile_worker")


class FragileUniproc(UniProcExecutor):
    def __init__(self, config) -> None:
        super().__init__(config, worker_factory="fake_engine:create_fragile_worker")


class FakeMultiproc(MultiprocExecutor):
    """The real executor, its workers fake."""

    def __init__(self, config) -> None:
        super().__init__(config, worker_factory="fake_engine:create_worker")


class BrokenMultiproc(MultiprocExecutor):
    def __init__(self, config) -> None:
        super().__init__(config, worker_factory="fake_engine:create_broken_worker")


class FakeUniproc(UniProcExecutor):
    def __init__(self, config) -> None:
        super().__init__(config, worker_factory="fake_engine:create_worker")


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def make_model_folder(folder: Path) -> str:
    """A model folder without weights: a Llama of 2 layers whose tokens are bytes, 256 the end of text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    vocab = {_byte_letter(byte): byte for byte in range(256)}
    assert set(vocab) == set(letters)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
        )
    )
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 256,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "tie_word_embeddings": True,
                "torch_dtype": "float32",
                "eos_token_id": EOS,
                "bos_token_id": None,
                "hidden_act": "silu",
            }
        )
    )
    return str(folder)


def _byte_letter(byte: int) -> str:
    """The printable character that byte-level BPE writes for a byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in plain else chr(256 + [b for b in range(256) if b not in plain].index(byte))
