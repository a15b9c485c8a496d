"""Every engine option: its name, default, one-line description, and part of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ringcore.checkpoint import AnySpec, ModelFiles
from ringcore.checkpoint.mtp_head import AnyHeadSpec
from ringcore.config.rank_layout import LOCALHOST, UNPLACED, RankLayout
from ringcore.config.speculation import Speculation, speculation_of

__all__ = ["CacheConfig", "DeviceConfig", "ModelConfig", "ParallelConfig", "SchedulerConfig"]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
MODEL_IMPLS = ("auto", "native", "transformers")
QUANTIZATIONS = ("fp8", "int4")
GGUF_WEIGHTS = ("auto", "packed", "packed_int8", "expanded")
GENERATION_CONFIGS = ("auto", "ringcore")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
DEVICES = ("auto", "cpu", "cuda")
SCHEDULING_POLICIES = ("fcfs", "priority")
EXECUTORS = ("multiproc", "uniproc", "ray")
ATTENTION_BACKENDS = (
    *("auto", "triton", "flash_attn", "cpu_attn", "torch_sdpa"),
    *("triton_mla", "torch_mla", "triton_rows"),
)
DEVICE_MEMORY = ("auto", "arena", "plain")
LARGE_MESSAGES = ("memfd", "zmq")
START_FROM = ("new", "parked", "parked_only")
STRUCTURED_OUTPUTS_BACKENDS = ("auto", "llguidance", "xgrammar")


def _option(default: Any, doc: str) -> Any:
    if isinstance(default, list):  # a copy per instance
        return field(default_factory=default.copy, metadata={"option": doc})
    return field(default=default, metadata={"option": doc})


MAX_STEPS_IN_FLIGHT = 2
MAX_GRAPH_TOKENS = 2048  # of `DeviceConfig.max_cudagraph_capture_size`


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model: str = _option("", "a model folder, a .gguf file, or a hub id")
    tokenizer: str | None = _option(None, "a folder or file with the tokenizer; None means the model's own")
    dtype: str = _option("auto", f"one of {', '.join(DTYPES)}; auto is the checkpoint's where the device is fast at it")
    load_format: str = _option("auto", f"one of {', '.join(LOAD_FORMATS)}; dummy makes random weights")
    model_impl: str = _option(
        "auto", f"one of {', '.join(MODEL_IMPLS)}; auto is native where the architecture has a model of its own here"
    )
    quantization: str | None = _option(
        None,
        f"one of {', '.join(QUANTIZATIONS)}: quantizes a 16-bit checkpoint while it is loaded; None keeps it as it is",
    )
    gguf_weights: str = _option(
        "auto",
        f"one of {', '.join(GGUF_WEIGHTS)}: on a CPU the matrices of a .gguf file stay in its blocks, with "
        "packed_int8 their inputs are rounded to 8 bits, or are expanded; auto packs where there is a C compiler, or "
        "where expanded ones would take more than half of the free memory",
    )
    max_model_len: int | Literal["auto"] | None = _option(
        None, "prompt and completion together, in tokens; None means the model's own, auto as much of it as fits"
    )
    seed: int = _option(0, "seeds dummy weights and the seeds of requests that bring none")
    deterministic: bool = _option(
        False,
        "give a request the same tokens and log-probabilities, bit for bit, alone, in any batch, however its prompt is "
        "cut into steps, on one machine with the same dtype and tensor_parallel_size",
    )
    generation_config: str = _option(
        "auto",
        f"one of {', '.join(GENERATION_CONFIGS)}: sampling parameters that a request does not give are those of the "
        "model's generation_config.json, or ringcore's own",
    )
    tokenizer_timeout_s: float = _option(10.0, "a prompt whose chat template and tokenizer take longer is refused")
    max_tokenizer_queue: int = _option(1024, "prompts that may wait for the tokenizer; further ones are refused")
    logits_processors: list[str] = _option([], "'module:Class' of each custom LogitsProcessor, or the class itself")
    # resolved
    files: ModelFiles
    spec: AnySpec
    sampling_defaults: dict[str, Any] = field(default_factory=dict)  # by the names of `SamplingParams`
    draft_head: AnyHeadSpec | None = None  # of `SchedulerConfig.speculative`

    @property
    def context_len(self) -> int:
        """`max_model_len`, or the model's own; for "auto" the upper bound, which start-up lowers to what fits."""
        return self.max_model_len if isinstance(self.max_model_len, int) else self.spec.max_position_embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    block_size: int = _option(16, "tokens in a block of the KV cache")
    kv_cache_dtype: str = _option(
        "auto",
        f"one of {', '.join(KV_CACHE_DTYPES)}; fp8, which is fp8_e4m3, has twice the tokens of 16 bits in the same "
        "memory; auto is the model's dtype",
    )
    num_blocks_override: int | None = _option(None, "this many blocks whatever the memory, the null block among them")
    kv_cache_bytes: int | None = _option(None, "bytes of the KV cache on each rank; None measures what is free")
    gpu_memory_utilization: float | None = _option(
        None,
        "the share of the device's memory to use; None means 0.9, and on a CPU 0.75 of what the weights leave",
    )
    enable_prefix_caching: bool = _option(True, "keep full blocks of finished requests for prompts that begin alike")
    host_kv_cache_bytes: int | None = _option(
        None, "bytes on each rank for blocks that leave the prefix cache, in host memory; None keeps none"
    )
    host_kv_cache_dir: str | None = _option(
        None, "a directory behind that memory, which keeps them for later engines with the same model and options too"
    )
    host_kv_cache_dir_bytes: int | None = _option(
        None,
        "bytes of all blocks in that directory, of every engine that uses it; None means 8 times host_kv_cache_bytes "
        "for each rank",
    )
    host_kv_cache_dir_timeout_s: float = _option(
        10.0, "a read or write of a block there that takes longer takes the directory out of use"
    )

    @property
    def is_fp8(self) -> bool:
        return self.kv_cache_dtype != "auto"

    def directory_bytes(self, num_ranks: int) -> int:
        """The limit of `host_kv_cache_dir`, for an engine of so many ranks; 0 without one."""
        if self.host_kv_cache_dir is None or self.host_kv_cache_bytes is None:
            return 0
        return self.host_kv_cache_dir_bytes or 8 * self.host_kv_cache_bytes * num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int = _option(256, "requests that run at once")
    max_num_batched_tokens: int | None = _option(
        None, "tokens computed in one step, prompts and completions together; None means 8192 on a GPU, 512 on a CPU"
    )
    long_prefill_token_threshold: int | None = _option(None, "chunked prefill: the most tokens of a prompt in a step")
    scheduling_policy: str = _option("fcfs", f"one of {', '.join(SCHEDULING_POLICIES)}; a lower priority goes first")
    preempt_lower_priority: bool = _option(False, "make room for a waiting request by preempting running lower ones")
    max_skip_ahead: int = _option(16, "how many later requests may start before one that waits for blocks")
    max_logprobs: int = _option(20, "the most logprobs and prompt_logprobs a request may ask for; -1 is no bound")
    steps_in_flight: int | None = _option(
        None,
        "1, or 2 to schedule a step before the tokens of the one before it are known; None means 2 on a GPU, and on a "
        "CPU after steps that only decode and are so short that a new prompt may wait for one more",
    )
    structured_outputs_backend: Literal["auto", "llguidance", "xgrammar"] = _option(
        "auto", f"one of {', '.join(STRUCTURED_OUTPUTS_BACKENDS)}; auto is llguidance where it is installed"
    )
    structured_outputs_timeout_s: float = _option(10.0, "a grammar that takes longer to compile is refused")
    speculative: dict[str, Any] | None = _option(
        None,
        'speculative decoding, as {"method": "suffix", "num_drafts": 8, "min_match": 3, "shared_tokens": 262144}, all '
        'but the method optional, or {"method": "eagle3", "model": FOLDER, "num_drafts": 4}, or {"method": "mtp", '
        '"num_drafts": 2}; None means one token in a step',
    )
    # resolved
    num_stages: int = 1  # `ParallelConfig.pipeline_parallel_size`
    short_step_s: float | None = None  # a step is launched ahead only after decodes that take no longer; None: any

    @property
    def max_steps_in_flight(self) -> int:
        """One step in each stage of a pipeline; or one more, so that no stage waits for the scheduler."""
        return self.steps_of_a_stage + self.num_stages - 1

    @property
    def steps_of_a_stage(self) -> int:
        """`steps_in_flight`; the most, where the device is not known yet."""
        return self.steps_in_flight or MAX_STEPS_IN_FLIGHT

    @property
    def speculation(self) -> Speculation | None:
        """`speculative` with its defaults."""
        return speculation_of(self.speculative)

    @property
    def max_gain(self) -> int:
        """The most tokens of a request that a step appends."""
        given = self.speculation
        return 1 if given is None else 1 + given.num_drafts

    @property
    def lookahead(self) -> int:
        """Positions behind a step with drafts that have blocks too: a head drafts there for the next one."""
        given = self.speculation
        return given.num_drafts - 1 if given is not None and given.is_by_head else 0

    @property
    def max_sampled_positions(self) -> int:
        """The most tokens after which a step samples: one of each row, and drafts."""
        return self.max_num_seqs if self.speculative is None else max(self.max_num_seqs, 8 * self.max_gain)

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens`, resolved by `EngineConfig.on_device`."""
        assert self.max_num_batched_tokens is not None, "the device is not known yet"
        return self.max_num_batched_tokens

    @property
    def max_tokens_in_flight(self) -> int:
        """The most tokens of one request in steps in flight: scheduled, results pending."""
        return self.max_steps_in_flight * self.max_row_tokens

    @property
    def max_row_tokens(self) -> int:
        """The most tokens of one request in a step: of its prompt, or its last token and drafts."""
        return min(self.token_budget, self.long_prefill_token_threshold or self.token_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    tensor_parallel_size: int = _option(1, "workers that share each layer")
    expert_parallel: bool = _option(False, "each of the tensor_parallel_size workers has whole experts of a mixture")
    redundant_experts: int | None = _option(
        None,
        "with expert_parallel: experts are placed by how many tokens they have, with this many replicas; None means "
        "each stays where it was loaded",
    )
    expert_balance_steps: int = _option(3000, "with redundant_experts: the steps from one placement to the next")
    pipeline_parallel_size: int = _option(1, "stages of successive layers, each on tensor_parallel_size workers")
    executor: str = _option("multiproc", "multiproc, uniproc, ray, or an Executor class (or its 'module:Class')")
    worker_extension: str | None = _option(None, "'module.Class' mixed into the worker; its @rpc methods can be called")
    allow_callables: bool = _option(False, "let collective_rpc take Python functions from the client (by cloudpickle)")
    max_worker_restarts: int = _option(0, "how often workers that died are replaced, and their requests computed again")
    step_timeout_s: float | None = _option(300.0, "a step that takes longer ends its workers; None means never")
    engine_timeout_s: float | None = _option(
        60.0, "an engine process without progress for longer, or a stopped worker, is killed; None means never"
    )
    stall_warning_s: float = _option(30.0, "a step or call older than this is diagnosed in the log")
    call_ring_bytes: int = _option(64 << 20, "shared memory of the ring to the workers; larger ones use a memfd")
    reply_ring_bytes: int = _option(8 << 20, "shared memory of the ring back from each worker")
    large_messages: str = _option(
        "memfd", f"one of {', '.join(LARGE_MESSAGES)}: how messages above half a ring reach workers of this host"
    )
    hosts: list[str] | None = _option(
        None, "the host of each rank; localhost is this one, others join by ringcore worker; None means all are here"
    )
    join_endpoint: str | None = _option(None, "tcp://HOST:PORT of this host where the others of hosts join")
    join_keys: str | None = _option(None, "the directory with the keys of join_endpoint, by 'ringcore keys DIR'")
    ray_address: str | None = _option(
        None, "HOST:PORT of the Ray cluster of executor='ray'; None means RAY_ADDRESS, or the cluster of this host"
    )
    ray_resources: dict[str, float] | None = _option(
        None, 'what Ray reserves for each rank, as {"GPU": 1, "CPU": 4}; None means one GPU, or one CPU'
    )
    ray_runtime_env: dict[str, Any] | None = _option(None, "Ray's runtime environment of the workers' hosts")
    ray_timeout_s: float = _option(600.0, "seconds that Ray may take to find hosts and to start agents there")
    local_admin: bool = _option(True, "let this user's processes on this host call the engine: ringcore ps, rpc, top")
    admin_endpoint: str | None = _option(None, "tcp://HOST:PORT where AdminClients may call workers; port 0 picks one")
    admin_keys: str | None = _option(None, "the directory with the keys of admin_endpoint, by 'ringcore keys DIR'")
    start_from: str = _option(
        "new",
        f"one of {', '.join(START_FROM)}: parked adopts an engine of the same configuration that 'ringcore park' keeps "
        "on this host, or starts a new one where there is none; parked_only is an error then",
    )
    # resolved
    ranks: RankLayout | None = None  # another layout than every rank on this host

    @property
    def layout(self) -> RankLayout:
        """The one source for the number of ranks, their hosts, their stages and the output rank."""
        if self.ranks is not None:
            return self.ranks
        num_stages = self.pipeline_parallel_size
        here = UNPLACED if self.executor == "ray" else LOCALHOST
        hosts = self.hosts or [here] * (self.tensor_parallel_size * num_stages)
        return RankLayout.on_hosts(hosts, num_stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    device: str = _option("auto", f"one of {', '.join(DEVICES)}")
    device_ids: list[int] | None = _option(
        None, "the GPU of each rank, by its number among the visible ones; None means the first ones"
    )
    attention_backend: str = _option("auto", f"one of {', '.join(ATTENTION_BACKENDS)}")
    enforce_eager: bool = _option(False, "launch kernels one by one, and capture no CUDA graphs")
    max_cudagraph_capture_size: int | None = _option(
        None,
        "tokens of the largest step with prompts that is a CUDA graph; kernels of larger ones are launched one by one; "
        f"None means {MAX_GRAPH_TOKENS}, the most",
    )
    kernel_autotune: bool = _option(
        False,
        "on a GPU, time the tiles of the model's products at the first start and keep the fastest in the user's cache; "
        "the next start searches nothing",
    )
    kernel_autotune_timeout_s: float = _option(60.0, "no shape is begun later; what is left goes on at the next start")
    device_memory: str = _option(
        "auto",
        f"one of {', '.join(DEVICE_MEMORY)}: weights and KV cache in arenas of CUDA virtual memory, or by torch's own "
        "allocator; auto is arenas where they can be had",
    )
    enable_sleep_mode: bool = _option(False, "keep weights and KV cache in arenas, whose memory sleep() gives back")
    sleep_directory: str | None = _option(
        None, "where sleep() keeps the weights in an unnamed file; None means host memory"
    )
